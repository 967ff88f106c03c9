"""The revisions of the schema that are served, and what tells them apart.

Clients compare these values with what they were tested against and turn away from a server
that doesn't fit, so they change only together with the schema itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SCHEMA_REVISION: Final = 1
"""Revision number that both services tell; clients ask for more fields from 3 on."""

MINIMUM_CLIENT_REVISION: Final = 1
"""Oldest revision that a client may speak."""


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision of the schema."""

    name: str
    """As flags and users call it."""
    schema_release: str
    """Commit of the public schema repository that holds it, as 40 hexadecimal digits."""
    services: tuple[str, ...]
    """Full names, as in gRPC paths and in grpc.health.v1."""
    detailed_errors: bool
    """Whether an EngineError tells more than code, message and retryable."""


SERVICE_NAME: Final = "openengine.v1.OpenEngine"
INFERENCE_NAME: Final = "openengine.v1.Inference"
CONTROL_NAME: Final = "openengine.v1.Control"

OPENENGINE: Final = Revision(
    name="openengine",
    schema_release="d0f29fec31f31db5cfd49cf3e0f67da84d10c709",
    services=(SERVICE_NAME,),
    detailed_errors=True,
)
"""The contract."""

SPLIT: Final = Revision(
    name="split",
    schema_release="4def7c50b05e0674a0c3b26917399155535966e4",
    services=(INFERENCE_NAME, CONTROL_NAME),
    detailed_errors=False,
)
"""The later public revision, whose service is split in two."""

REVISIONS: Final = {revision.name: revision for revision in (OPENENGINE, SPLIT)}
"""By name."""

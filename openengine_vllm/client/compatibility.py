"""Whether this client and a server speak revisions of the schema that fit.

The package name stays `openengine.v1` while its messages change, so a client has to look at
what the server says and turn away from one that it wasn't made for.
"""

from __future__ import annotations

from typing import Final

from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.revision import SCHEMA_REVISION

OLDEST_SERVER_REVISION: Final = 1
"""Oldest revision of a server that this client can talk to."""


def incompatibility(info: pb.EngineInfo) -> str | None:
    """What keeps this client from talking to a server, or None."""
    if info.minimum_client_revision > SCHEMA_REVISION:
        return (
            f"the server wants clients of schema revision {info.minimum_client_revision} "
            f"or later, and this one has {SCHEMA_REVISION}"
        )
    if info.schema_revision < OLDEST_SERVER_REVISION:
        return (
            f"the server has schema revision {info.schema_revision}, "
            f"and this client needs {OLDEST_SERVER_REVISION} or later"
        )
    return None

"""Which revision of the schema the `OpenEngine` service implements.

Clients compare these values with what they were tested against and turn away from a server
that doesn't fit, so they change only together with the schema itself.
"""

from typing import Final

SCHEMA_REVISION: Final = 1
"""Revision of the contract that is served; the first is 1."""

MINIMUM_CLIENT_REVISION: Final = 1
"""Oldest revision that a client may speak."""

SCHEMA_RELEASE: Final = "d0f29fec31f31db5cfd49cf3e0f67da84d10c709"
"""Commit of the public schema repository that holds the revision, as 40 hexadecimal digits."""

SERVICE_NAME: Final = "openengine.v1.OpenEngine"
"""Full name of the service, as in gRPC paths and in grpc.health.v1."""

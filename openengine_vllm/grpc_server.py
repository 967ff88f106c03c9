"""A gRPC server around handlers: bounds, authentication, health checks and reflection."""

from __future__ import annotations

from collections.abc import Mapping

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from openengine_vllm.metrics.server_metrics import ServerMetrics
from openengine_vllm.protocol.channel import server_options
from openengine_vllm.services.authentication import Services
from openengine_vllm.services.handlers import Handler, service_handler
from openengine_vllm.services.reflection import DESCRIPTORS, add_reflection
from openengine_vllm.settings import ServerSettings

LIVENESS_NAME = "liveness"
"""What grpc.health.v1 calls whether the process is of use still: also while it starts and drains,
so that whoever restarts what is not alive lets it finish."""


def grpc_server(
    settings: ServerSettings,
    services: Mapping[str, Mapping[str, Handler]],
    health: HealthServicer,
    metrics: ServerMetrics | None = None,
) -> aio.Server:
    """A server that is still to be bound and started.

    Args:
        services: by full name, the handlers of their methods; methods without one answer
            UNIMPLEMENTED. Those of a revision that the settings leave out are not served.
    """
    server = aio.server(
        options=server_options(
            max_receive_bytes=settings.max_request_bytes,
            max_send_bytes=settings.limits.max_response_bytes,
            max_concurrent_streams=settings.max_connection_streams,
            max_connections=settings.max_connections,
        )
    )
    door = Services(settings.api_keys, None if metrics is None else metrics.turned_away)
    observe = None if metrics is None else metrics.observed
    for revision in settings.revisions:
        door.add_generic_rpc_handlers(
            service_handler(
                DESCRIPTORS[name],
                services.get(name, {}),
                observe,
                detailed_errors=revision.detailed_errors,
            )
            for name in revision.services
        )
    health_pb2_grpc.add_HealthServicer_to_server(health, door.as_server())
    if settings.reflects:
        add_reflection(door.as_server(), settings.revisions[0])
    server.add_generic_rpc_handlers((door,))
    return server


async def report(
    health: HealthServicer, settings: ServerSettings, *, serving: bool, alive: bool = True
) -> None:
    """Have grpc.health.v1 tell of all services whether they can be used."""
    status = health_pb2.HealthCheckResponse
    await health.set(LIVENESS_NAME, status.SERVING if alive else status.NOT_SERVING)
    for name in ("", *(name for revision in settings.revisions for name in revision.services)):
        await health.set(name, status.SERVING if serving else status.NOT_SERVING)

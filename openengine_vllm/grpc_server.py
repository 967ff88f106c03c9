"""A gRPC server around handlers: bounds, authentication, health checks and reflection."""

from __future__ import annotations

from collections.abc import Mapping

from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from openengine_vllm.metrics.server_metrics import ServerMetrics
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.channel import server_options
from openengine_vllm.services.authentication import Services
from openengine_vllm.services.handlers import Handler, service_handler
from openengine_vllm.services.reflection import add_reflection
from openengine_vllm.settings import ServerSettings


def grpc_server(
    settings: ServerSettings,
    handlers: Mapping[str, Handler],
    health: HealthServicer,
    metrics: ServerMetrics | None = None,
) -> aio.Server:
    """A server that is still to be bound and started.

    Args:
        handlers: of the contract's methods, by name; the others answer UNIMPLEMENTED.
    """
    server = aio.server(
        options=server_options(
            max_receive_bytes=settings.max_request_bytes,
            max_send_bytes=settings.limits.max_response_bytes,
            max_concurrent_streams=settings.max_connection_streams,
            max_connections=settings.max_connections,
        )
    )
    services = Services(settings.api_keys, None if metrics is None else metrics.turned_away)
    observe = None if metrics is None else metrics.observed
    services.add_generic_rpc_handlers((service_handler(pb.SERVICE, handlers, observe),))
    health_pb2_grpc.add_HealthServicer_to_server(health, services.as_server())
    if settings.reflects:
        add_reflection(services.as_server())
    server.add_generic_rpc_handlers((services,))
    return server

"""The RPCs of a bridge that stands alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from grpc import aio
from grpc_health.v1._async import HealthServicer

from openengine_vllm.grpc_server import grpc_server, report
from openengine_vllm.kv_events.bridge import KvBridge
from openengine_vllm.kv_events.source import Publisher
from openengine_vllm.protocol import errors, split, split_messages
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.revision import (
    CONTROL_NAME,
    MINIMUM_CLIENT_REVISION,
    OPENENGINE,
    SCHEMA_REVISION,
    SERVICE_NAME,
)
from openengine_vllm.services.handlers import Context, Handler
from openengine_vllm.services.kv_events import KvEventsService
from openengine_vllm.services.split import control_handlers
from openengine_vllm.services.stalls import StallWatch
from openengine_vllm.settings import ServerSettings

_log = structlog.get_logger(__name__)

_REACH_SECONDS = 5.0
"""After which a publisher that is away is told of."""


class KvBridgeServer:
    """A bridge and its gRPC server, which is to be bound before :meth:`start`.

    Args:
        publishers: one a rank.
        instance_id: new at each start.
    """

    def __init__(
        self, settings: ServerSettings, publishers: Sequence[Publisher], instance_id: str
    ) -> None:
        self._settings = settings
        self._instance_id = instance_id
        self._bridge = KvBridge(settings.kv_events.bridge, publishers)
        self._stalls = StallWatch(settings.stall_timeout)
        self._events = KvEventsService(lambda: None, self._stalls)
        self._watching: asyncio.Future[None] | None = None
        self._grpc_health = HealthServicer()
        self.grpc_server = self._build()
        """Serves once it is bound and started."""

    def _build(self) -> aio.Server:
        handlers: dict[str, Handler] = {
            "GetEngineInfo": self._engine_info,
            "Health": self._health,
            "GetKvEventSources": self._events.sources,
            "SubscribeKvEvents": self._events.subscribe,
        }
        own: dict[str, Handler] = {
            "GetServerInfo": self._server_info,
            "GetKvEventSources": self._events.grpc_sources,
            "SubscribeKvEvents": self._events.subscribe_plain,
        }
        services = {SERVICE_NAME: handlers, CONTROL_NAME: control_handlers(handlers, own)}
        return grpc_server(self._settings, services, self._grpc_health)

    async def start(self, address: str) -> None:
        """Follow the publishers and serve at ``address``, which is bound.

        Raises:
            BridgeError: an address of ours cannot be used.
        """
        self._bridge.start()
        settings = self._settings
        self._events.attach(self._bridge, address, settings.advertise_host)
        await report(self._grpc_health, settings, serving=True)
        await self.grpc_server.start()
        self._watching = asyncio.ensure_future(self._watch())
        _log.info("listening", address=address, instance=self._instance_id)
        if not (settings.loopback or settings.authenticates):
            _log.warning(
                "anyone who can reach the address can read what is cached", address=address
            )

    async def _watch(self) -> None:
        await self._bridge.reached(_REACH_SECONDS)
        for number, rank in self._bridge.ranks.items():
            if not rank.source.connected:
                endpoint = rank.source.publisher.endpoint
                _log.warning("KV event publisher not reached yet", rank=number, endpoint=endpoint)
        await self._stalls.run()

    async def stop(self, grace: float) -> None:
        """End all subscriptions and stop; those that do not read get ``grace`` seconds."""
        if self._watching is not None:
            self._watching.cancel()
        self._events.end()
        await self.grpc_server.stop(grace)
        await self._bridge.stop()

    async def _engine_info(
        self, request: pb.GetEngineInfoRequest, context: Context
    ) -> pb.EngineInfo:
        """What is known of an engine by its events alone."""
        return pb.EngineInfo(
            engine_name="vllm",
            instance_id=self._instance_id,
            schema_revision=SCHEMA_REVISION,
            minimum_client_revision=MINIMUM_CLIENT_REVISION,
            schema_release=OPENENGINE.schema_release,
        )

    async def _server_info(
        self, request: split.GetServerInfoRequest, context: Context
    ) -> split.ServerInfo:
        return split_messages.server_info(
            await self._engine_info(pb.GetEngineInfoRequest(), context)
        )

    async def _health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        """The bridge serves what it has also while a publisher is away."""
        if request.model:
            raise errors.model_not_found(request.model)
        if request.role != pb.ENGINE_ROLE_UNSPECIFIED:
            raise errors.role_mismatch("role", "a KV event bridge has no role")
        response = pb.HealthResponse(state=pb.HEALTH_STATE_READY)
        response.checks.add(name="grpc", state=pb.HEALTH_STATE_READY)
        for number, rank in self._bridge.ranks.items():
            here = rank.source.connected
            response.checks.add(
                name=f"publisher.{number}",
                state=pb.HEALTH_STATE_READY if here else pb.HEALTH_STATE_NOT_READY,
                message="" if here else "the publisher cannot be reached",
            )
        return response

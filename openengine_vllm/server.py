"""The gRPC server in front of one engine, whoever owns the process.

:meth:`Server.open`, :meth:`Server.follow`, :meth:`Server.serve`, :meth:`Server.watch`,
:meth:`Server.drain`, :meth:`Server.close`: everything that changes the server's state happens
here. Our own process (:mod:`openengine_vllm.process`) loads an engine in between, the plugin
(:mod:`openengine_vllm.plugin`) takes the one that `vllm serve` has.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

import grpc
import structlog
from grpc_health.v1._async import HealthServicer

from openengine_vllm.binding import bind
from openengine_vllm.drain import Drains
from openengine_vllm.grpc_server import grpc_server, report
from openengine_vllm.kv_events.bridge import KvBridge
from openengine_vllm.lifecycle import Lifecycle, Serving
from openengine_vllm.metrics.endpoint import served_metrics
from openengine_vllm.metrics.server_metrics import ServerMetrics
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.revision import CONTROL_NAME, INFERENCE_NAME, SERVICE_NAME
from openengine_vllm.registry import EndReason, RequestRegistry
from openengine_vllm.services.control import ControlService
from openengine_vllm.services.discovery import DiscoveryService
from openengine_vllm.services.drain import DrainService
from openengine_vllm.services.generate import GenerateService
from openengine_vllm.services.handlers import Handler
from openengine_vllm.services.kv_events import KvEventsService
from openengine_vllm.services.load import LoadService
from openengine_vllm.services.lora import lora_handlers
from openengine_vllm.services.probe import InferenceProbe
from openengine_vllm.services.readings import add_readings
from openengine_vllm.services.runtime_events import RuntimeEventsService
from openengine_vllm.services.split import control_handlers, inference_handlers
from openengine_vllm.services.stalls import StallWatch
from openengine_vllm.settings import ServerSettings
from openengine_vllm.tls import server_credentials

_log = structlog.get_logger(__name__)

_DEATH_POLL_SECONDS = 0.2
_FLUSH_SECONDS = 2.0
_REACH_SECONDS = 2.0


class Server:
    """One engine, one listening address.

    Args:
        settings: the operator's.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.instance_id = uuid.uuid4().hex
        """New at each start."""
        self.lifecycle = Lifecycle()
        """The state, and the live engine once there is one."""
        self.registry = RequestRegistry(settings.max_concurrent_requests)
        """The live requests."""
        self._probe = InferenceProbe(settings.probe_timeout)
        self.metrics = None if settings.metrics_port is None else ServerMetrics()
        """What is counted, and room for more; None where nobody asks for it."""
        self.metrics_address: str | None = None
        """Where it can be read, once it can."""
        self._stalls = StallWatch(settings.stall_timeout, self.metrics)
        self._events = RuntimeEventsService(
            self.lifecycle, self.registry, self._stalls, self.instance_id
        )
        if self.metrics is not None:
            add_readings(
                self.metrics,
                self.instance_id,
                self.lifecycle,
                self.registry,
                self._stalls,
                self._events,
            )
        self._kv_events = KvEventsService(lambda: self.lifecycle.serving, self._stalls)
        self._kv_bridge: KvBridge | None = None
        self._health = HealthServicer()
        self._drains = Drains(self.lifecycle, self.registry, self._report_health)
        self._address = ""
        self._grpc_server: grpc.aio.Server | None = None
        self._watching: asyncio.Future[None] | None = None
        self._metrics_endpoint = contextlib.AsyncExitStack()

    async def open(self) -> str:
        """Listen; everything but Health is refused until :meth:`serve`. Returns the address.

        Raises:
            TlsError: the certificate cannot be served.
            BindError: the address cannot be served.
        """
        settings = self._settings
        server = self._build()
        credentials = None if settings.tls is None else server_credentials(settings.tls)
        if self.metrics is not None and settings.metrics_port is not None:
            self.metrics_address = await self._metrics_endpoint.enter_async_context(
                served_metrics(self.metrics, settings.metrics_host, settings.metrics_port)
            )
        self._address = address = bind(server, settings, credentials)
        await self._report_health()
        await server.start()
        self._grpc_server = server
        self._watching = asyncio.ensure_future(self._stalls.run())
        _log.info(
            "listening",
            address=address,
            tls=settings.tls is not None,
            api_keys=len(settings.api_keys),
            instance=self.instance_id,
        )
        if not (settings.loopback or settings.authenticates):
            _log.warning("anyone who can reach the address can use the engine", address=address)
        return address

    async def follow(self, serving: Serving) -> None:
        """Follow the engine's KV events, before its first request runs, so that none is missed.

        Raises:
            BridgeError: an address cannot be served, or not be followed.
        """
        if not serving.kv_publishers:
            return
        settings = self._settings
        bridge = KvBridge(settings.kv_events.bridge, serving.kv_publishers)
        bridge.start()
        self._kv_bridge = bridge
        serving.engine.tell_of_resets(bridge.emptying)
        self._kv_events.attach(bridge, self._address, settings.advertise_host)
        await bridge.reached(_REACH_SECONDS)

    async def serve(self, serving: Serving) -> None:
        """Take requests for this engine, which has proven that it works."""
        serving.engine.share(self.registry, lambda: self.lifecycle.accepting)
        self.lifecycle.ready(serving)
        await self._report_health()

    async def watch(self, stop: asyncio.Event) -> bool:
        """Wait until told to stop or until the engine has died; true when it has.

        Where the server is to outlive its engine, its death alone does not end the wait.
        """
        engine = self.lifecycle.serving.engine
        while not stop.is_set():
            if engine.dead and self.lifecycle.state != pb.HEALTH_STATE_NOT_READY:
                await self._engine_died()
                if self._settings.exit_on_engine_death:
                    return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _DEATH_POLL_SECONDS)
        return self.lifecycle.state == pb.HEALTH_STATE_NOT_READY

    async def drain(self, now: asyncio.Event) -> None:
        """Take no more work and wait for what runs: for the drain timeout, or until ``now``."""
        drain = await self._drains.begin(
            stop_accepting=True,
            deadline=self._settings.drain_timeout,
            abort_after_deadline=True,
        )
        hurrying = asyncio.ensure_future(now.wait())
        await first(drain.finished, hurrying)
        hurrying.cancel()
        drain.hurry()
        await drain.finished

    async def close(self) -> None:
        """Stop listening; what is left of the streams is cut off after a moment."""
        if self._watching is not None:
            self._watching.cancel()
        self._events.end()
        self._kv_events.end()
        if self._grpc_server is not None:
            await self._grpc_server.stop(_FLUSH_SECONDS)
        if self._kv_bridge is not None:
            await self._kv_bridge.stop()
        await self._metrics_endpoint.aclose()

    def _build(self) -> grpc.aio.Server:
        settings = self._settings
        metrics = self.metrics
        generate = GenerateService(
            self.lifecycle, self.registry, settings.limits, self._stalls, metrics
        )
        discovery = DiscoveryService(self.lifecycle)
        control = ControlService(
            self.lifecycle, self.registry, self._probe, pb.ENGINE_ROLE_AGGREGATED
        )
        drain = DrainService(self.lifecycle, self._drains, self._stalls)
        handlers: dict[str, Handler] = {
            "Generate": generate.generate,
            "GetEngineInfo": discovery.engine_info,
            "GetModelInfo": discovery.model_info,
            "Health": control.health,
            "Abort": control.abort,
            "Drain": drain.drain,
            "GetLoad": LoadService(self.lifecycle).load,
            "SubscribeRuntimeEvents": self._events.subscribe,
            "GetKvEventSources": self._kv_events.sources,
            "SubscribeKvEvents": self._kv_events.subscribe,
            **lora_handlers(self.lifecycle),
        }
        services = {
            SERVICE_NAME: handlers,
            INFERENCE_NAME: inference_handlers(generate),
            CONTROL_NAME: control_handlers(
                handlers,
                {
                    "GetServerInfo": discovery.server_info,
                    "GetModelInfo": discovery.split_model_info,
                    "GetKvEventSources": self._kv_events.grpc_sources,
                    "SubscribeKvEvents": self._kv_events.subscribe_plain,
                },
            ),
        }
        return grpc_server(settings, services, self._health, metrics)

    async def _engine_died(self) -> None:
        _log.error("the engine has died")
        self.lifecycle.fail()
        await self._report_health()
        self._end_all(EndReason.ENGINE_DEAD)
        self._events.end(errors.engine_dead())
        self._kv_events.end(errors.engine_dead())

    def _end_all(self, reason: EndReason) -> None:
        for entry in self.registry:
            entry.end(reason)

    async def _report_health(self) -> None:
        state = self.lifecycle.state
        await report(
            self._health,
            self._settings,
            serving=state == pb.HEALTH_STATE_READY,
            alive=state != pb.HEALTH_STATE_NOT_READY,
        )


async def first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of the futures is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)

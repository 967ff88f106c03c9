"""The process from its first bind to its last breath.

Read :meth:`Server.run` from the top: bind, load, prove, serve, drain, stop. Everything that
changes the process's state happens here.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from openengine_vllm.binding import bind
from openengine_vllm.children import stop_descendants
from openengine_vllm.drain import Drains
from openengine_vllm.kv_events.bridge import BridgeError, KvBridge
from openengine_vllm.lifecycle import Lifecycle, Serving
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.channel import server_options
from openengine_vllm.protocol.revision import SERVICE_NAME
from openengine_vllm.registry import EndReason, RequestRegistry
from openengine_vllm.services.authentication import Services
from openengine_vllm.services.control import ControlService
from openengine_vllm.services.discovery import DiscoveryService
from openengine_vllm.services.drain import DrainService
from openengine_vllm.services.generate import GenerateService
from openengine_vllm.services.handlers import Handler, service_handler
from openengine_vllm.services.kv_events import KvEventsService
from openengine_vllm.services.load import LoadService
from openengine_vllm.services.probe import InferenceProbe
from openengine_vllm.services.reflection import add_reflection
from openengine_vllm.services.runtime_events import RuntimeEventsService
from openengine_vllm.services.stalls import StallWatch
from openengine_vllm.settings import ServerSettings
from openengine_vllm.tls import server_credentials

_log = structlog.get_logger(__name__)

_DEATH_POLL_SECONDS = 0.2
_DEATH_LINGER_SECONDS = 2.0
_FLUSH_SECONDS = 2.0
_REACH_SECONDS = 2.0

Loader = Callable[[str], Serving]
"""Loads the engine in a thread, given the instance id."""


class StartError(Exception):
    """The engine could not be started; ``code`` is the exit status, the message says why."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Server:
    """One engine, one listening address, one life.

    Args:
        settings: the operator's.
        load: blocks while the model loads and returns the live engine.
        on_ready: told the bound address once requests can be served.
    """

    def __init__(
        self,
        settings: ServerSettings,
        load: Loader,
        on_ready: Callable[[str, Serving], None],
    ) -> None:
        self._settings = settings
        self._load = load
        self._on_ready = on_ready
        self._instance_id = uuid.uuid4().hex
        self.lifecycle = Lifecycle()
        """The state, and the live engine once there is one."""
        self.registry = RequestRegistry(settings.max_concurrent_requests)
        """The live requests."""
        self._probe = InferenceProbe(settings.probe_timeout)
        self._stalls = StallWatch(settings.stall_timeout)
        self._events = RuntimeEventsService(
            self.lifecycle, self.registry, self._stalls, self._instance_id
        )
        self._kv_events = KvEventsService(lambda: self.lifecycle.serving, self._stalls)
        self._kv_bridge: KvBridge | None = None
        self._address = ""
        self._health = HealthServicer()
        self._drains = Drains(self.lifecycle, self.registry, self._report_health)
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """Serve until told to stop or until the engine dies; returns the exit status.

        Raises:
            TlsError: the certificate cannot be served.
            BindError: the address cannot be served.
            StartError: the engine cannot be started.
        """
        settings = self._settings
        grpc_server = self._build()
        credentials = None if settings.tls is None else server_credentials(settings.tls)
        self._address = address = bind(grpc_server, settings, credentials)
        await self._report_health()
        await grpc_server.start()
        _log.info(
            "listening",
            address=address,
            tls=settings.tls is not None,
            api_keys=len(settings.api_keys),
            instance=self._instance_id,
        )
        if not (settings.loopback or settings.authenticates):
            _log.warning("anyone who can reach the address can use the engine", address=address)
        watching = asyncio.ensure_future(self._stalls.run())
        with self._signals():
            try:
                return await self._serve(address)
            finally:
                watching.cancel()
                self._events.end()
                self._kv_events.end()
                await grpc_server.stop(_FLUSH_SECONDS)
                if self._kv_bridge is not None:
                    await self._kv_bridge.stop()

    def _build(self) -> grpc.aio.Server:
        settings = self._settings
        server = grpc.aio.server(
            options=server_options(
                max_receive_bytes=settings.max_request_bytes,
                max_send_bytes=settings.limits.max_response_bytes,
                max_concurrent_streams=settings.max_connection_streams,
                max_connections=settings.max_connections,
            )
        )
        generate = GenerateService(self.lifecycle, self.registry, settings.limits, self._stalls)
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
        }
        services = Services(settings.api_keys)
        services.add_generic_rpc_handlers((service_handler(pb.SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, services.as_server())
        if settings.reflects:
            add_reflection(services.as_server())
        server.add_generic_rpc_handlers((services,))
        return server

    async def _serve(self, address: str) -> int:
        serving = await self._start()
        if serving is None:
            return 0
        try:
            self.lifecycle.ready(serving)
            await self._report_health()
            self._on_ready(address, serving)
            died = await self._until_stop_or_death(serving)
            if died:
                await self._mourn()
                return 1
            await self._drain()
            return 1 if serving.engine.dead else 0
        finally:
            _log.info("stopping the engine")
            await asyncio.to_thread(serving.engine.shutdown)
            await asyncio.to_thread(stop_descendants)

    async def _start(self) -> Serving | None:
        """Load the engine and see it answer once; None when told to stop meanwhile."""
        loaded = self._load_in_thread()
        stopping = asyncio.ensure_future(self._stop.wait())
        await _first(loaded, stopping)
        if not loaded.done():
            _log.info("told to stop while loading")
            await asyncio.to_thread(stop_descendants)
            return None
        serving = loaded.result()
        await self._follow_kv_events(serving)
        proving = asyncio.ensure_future(serving.engine.probe())
        await _first(proving, stopping)
        stopping.cancel()
        if proving.done() and proving.exception() is None:
            return serving
        proving.cancel()
        await asyncio.to_thread(serving.engine.shutdown)
        await asyncio.to_thread(stop_descendants)
        if proving.done() and (error := proving.exception()):
            raise StartError(f"the engine started but cannot infer: {error}")
        return None

    async def _follow_kv_events(self, serving: Serving) -> None:
        """Before the first request runs, so that no event is missed."""
        if not serving.kv_publishers:
            return
        settings = self._settings
        bridge = KvBridge(settings.kv_events.bridge, serving.kv_publishers)
        try:
            bridge.start()
        except BridgeError as error:
            await asyncio.to_thread(serving.engine.shutdown)
            await asyncio.to_thread(stop_descendants)
            raise StartError(str(error)) from error
        self._kv_bridge = bridge
        self._kv_events.attach(bridge, self._address, settings.advertise_host)
        await bridge.reached(_REACH_SECONDS)

    def _load_in_thread(self) -> asyncio.Future[Serving]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Serving] = loop.create_future()

        def settle(result: Serving | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            elif result is not None:
                future.set_result(result)

        def load() -> None:
            # The engine's processes inherit this mask: a Ctrl-C in the terminal reaches them
            # too, and must not kill the engine under streams that are still to finish.
            # Python's resource tracker is started first, for its start undoes the mask.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            outcome: tuple[Serving | None, BaseException | None]
            try:
                outcome = (self._load(self._instance_id), None)
            except BaseException as error:
                outcome = (None, error)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, *outcome)

        threading.Thread(target=load, name="engine-load", daemon=True).start()
        return future

    async def _until_stop_or_death(self, serving: Serving) -> bool:
        """Wait; true when the engine has died and the process is to follow it."""
        while not self._stop.is_set():
            if serving.engine.dead and self.lifecycle.state != pb.HEALTH_STATE_NOT_READY:
                await self._engine_died()
                if self._settings.exit_on_engine_death:
                    return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _DEATH_POLL_SECONDS)
        return self.lifecycle.state == pb.HEALTH_STATE_NOT_READY

    async def _engine_died(self) -> None:
        _log.error("the engine has died")
        self.lifecycle.fail()
        await self._report_health()
        self._end_all(EndReason.ENGINE_DEAD)
        self._events.end(errors.engine_dead())
        self._kv_events.end(errors.engine_dead())

    async def _mourn(self) -> None:
        """Stay for a moment, so that clients and probes learn what happened."""
        if not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _DEATH_LINGER_SECONDS)

    async def _drain(self) -> None:
        drain = await self._drains.begin(
            stop_accepting=True,
            deadline=self._settings.drain_timeout,
            abort_after_deadline=True,
        )
        now = asyncio.ensure_future(self._stop_now.wait())
        await _first(drain.finished, now)
        now.cancel()
        drain.hurry()
        await drain.finished

    def _end_all(self, reason: EndReason) -> None:
        for entry in self.registry:
            entry.end(reason)

    async def _report_health(self) -> None:
        serving = self.lifecycle.state == pb.HEALTH_STATE_READY
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    def stop(self) -> None:
        """Drain and stop; the second call cuts the drain short."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def _on_signal(self, number: int) -> None:
        _log.info("signal", name=signal.Signals(number).name)
        self.stop()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of the futures is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)

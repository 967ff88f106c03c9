"""A process of our own, from its first bind to its last breath.

Read :meth:`Process.run` from the top: bind, load, prove, serve, drain, stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker

import structlog

from openengine_vllm.binding import bind_tcp
from openengine_vllm.children import stop_descendants
from openengine_vllm.kv_events.bridge import BridgeError
from openengine_vllm.lifecycle import Serving
from openengine_vllm.server import Server, first
from openengine_vllm.settings import ServerSettings

_log = structlog.get_logger(__name__)

_DEATH_LINGER_SECONDS = 2.0

Loader = Callable[[str], Serving]
"""Loads the engine in a thread, given the instance id."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a process serves, as clients dial it; None for what it does not."""

    grpc: str
    http: str | None
    metrics: str | None


class StartError(Exception):
    """The engine could not be started; ``code`` is the exit status, the message says why."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Process:
    """One engine and its server, one life.

    Args:
        settings: the operator's.
        load: blocks while the model loads and returns the live engine.
        on_ready: told the addresses and the engine once requests can be served.
    """

    def __init__(
        self,
        settings: ServerSettings,
        load: Loader,
        on_ready: Callable[[Addresses, Serving], None],
    ) -> None:
        self._settings = settings
        self._load = load
        self._on_ready = on_ready
        self.server = Server(settings)
        """Its gRPC half."""
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """Serve until told to stop or until the engine dies; returns the exit status.

        Raises:
            TlsError: the certificate cannot be served.
            BindError: an address cannot be served.
            StartError: the engine cannot be started.
        """
        settings = self._settings
        with contextlib.ExitStack() as held:
            listener = None
            if settings.http_port is not None:
                listener = held.enter_context(bind_tcp(settings.http_host, settings.http_port))
            held.enter_context(self._signals())
            try:
                address = await self.server.open()
                return await self._serve(address, listener)
            finally:
                await self.server.close()

    async def _serve(self, address: str, listener: socket.socket | None) -> int:
        serving = await self._start()
        if serving is None:
            return 0
        try:
            await self.server.serve(serving)
            if serving.http is None or listener is None:
                return await self._live(serving, address, None)
            try:
                http_address = await serving.http.open(listener, self._settings)
            except Exception as error:
                raise StartError(f"cannot start the HTTP server: {error}") from error
            try:
                return await self._live(serving, address, http_address)
            finally:
                await serving.http.close()
        finally:
            _log.info("stopping the engine")
            await asyncio.to_thread(serving.engine.shutdown)
            await asyncio.to_thread(stop_descendants)

    async def _live(self, serving: Serving, address: str, http_address: str | None) -> int:
        self._on_ready(Addresses(address, http_address, self.server.metrics_address), serving)
        if await self.server.watch(self._stop):
            await self._mourn()
            return 1
        await self.server.drain(self._stop_now)
        return 1 if serving.engine.dead else 0

    async def _start(self) -> Serving | None:
        """Load the engine and see it answer once; None when told to stop meanwhile."""
        loaded = self._load_in_thread()
        stopping = asyncio.ensure_future(self._stop.wait())
        await first(loaded, stopping)
        if not loaded.done():
            _log.info("told to stop while loading")
            await asyncio.to_thread(stop_descendants)
            return None
        serving = loaded.result()
        try:
            await self.server.follow(serving)
        except BridgeError as error:
            await asyncio.to_thread(serving.engine.shutdown)
            await asyncio.to_thread(stop_descendants)
            raise StartError(str(error)) from error
        proving = asyncio.ensure_future(serving.engine.probe())
        await first(proving, stopping)
        stopping.cancel()
        if proving.done() and proving.exception() is None:
            return serving
        proving.cancel()
        await asyncio.to_thread(serving.engine.shutdown)
        await asyncio.to_thread(stop_descendants)
        if proving.done() and (fault := proving.exception()):
            raise StartError(f"the engine started but cannot infer: {fault}")
        return None

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
                outcome = (self._load(self.server.instance_id), None)
            except BaseException as error:
                outcome = (None, error)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, *outcome)

        threading.Thread(target=load, name="engine-load", daemon=True).start()
        return future

    async def _mourn(self) -> None:
        """Stay for a moment, so that clients and probes learn what happened."""
        if not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _DEATH_LINGER_SECONDS)

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

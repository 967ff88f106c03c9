"""Puts the gRPC server into a stock `vllm serve` process, on the engine that it has.

vLLM calls an endpoint plugin with the live engine in the running event loop. This one does
nothing unless the environment names a port (:mod:`openengine_vllm.environment`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import structlog

from openengine_vllm import logs
from openengine_vllm.api_keys import VLLM_API_KEY_VARIABLE
from openengine_vllm.cli import vllm_version
from openengine_vllm.environment import settings_from_environment, wants_server
from openengine_vllm.lifecycle import Serving
from openengine_vllm.orphan_guard import OrphanGuard
from openengine_vllm.server import Server
from openengine_vllm.settings import ServerSettings

_log = structlog.get_logger(__name__)


class OpenEnginePlugin:
    """What vLLM's group of endpoint plugins asks for; one for each HTTP server."""

    name = "openengine"
    required_tasks = None

    def __init__(self) -> None:
        self._beside: Beside | None = None

    def attach_router(self, app: Any) -> None:
        """No routes; the end of vLLM's HTTP server is the end of ours."""
        inner = app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[Any]:
            try:
                async with inner(app) as state:
                    yield state
            finally:
                if self._beside is not None:
                    await self._beside.close()

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Open the port and serve.

        Raises:
            ValueError: a variable is wrong, or this process cannot serve as asked.
            TlsError: the certificate cannot be served.
            BindError: the address cannot be served.
        """
        if not wants_server(os.environ):
            return
        if engine_client is None:
            _log.warning("no gRPC: this server has no engine")
            return
        if "add_request" in vars(engine_client):
            return  # Our own process, which serves HTTP beside gRPC.
        settings = settings_from_environment(os.environ)
        keys = args.api_key or [os.environ.get(VLLM_API_KEY_VARIABLE, "")]
        self._beside = Beside(settings.guarded_by(keys))
        await self._beside.open(engine_client, args)


class Beside:
    """Our server beside another's, which owns the process and the engine."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._server = Server(settings)
        self._stop = asyncio.Event()
        self._watching: asyncio.Future[bool] | None = None
        self._serving: Serving | None = None
        self._guard = OrphanGuard(Path(tempfile.mkdtemp(prefix="oe-")))

    async def open(self, llm: Any, args: Namespace) -> None:
        """Serve the engine; raises as :meth:`OpenEnginePlugin.init_state`."""
        if (getattr(args, "api_server_count", None) or 1) > 1:
            raise ValueError("OPENENGINE_PORT is set and needs --api-server-count 1")
        from openengine_vllm.loading import attach_engine

        logs.configure(self._settings.log_level, self._settings.log_format)
        names = args.served_model_name or [args.model]
        try:
            await self._server.open()
            self._guard.start()
            self._serving = await asyncio.to_thread(
                attach_engine,
                llm,
                names,
                self._settings,
                self._server.instance_id,
                vllm_version() or "",
            )
            await self._server.follow(self._serving)
            await self._serving.engine.probe()
            await self._server.serve(self._serving)
        except BaseException:
            await self.close()
            raise
        self._watching = asyncio.ensure_future(self._server.watch(self._stop))
        self._drain_before_shutdown(llm, asyncio.get_running_loop())

    def _drain_before_shutdown(self, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Have SIGTERM drain first: vLLM then shuts its engine down, from another thread."""
        shutdown, thread = llm.shutdown, threading.get_ident()

        def drain_and_shutdown(*args: Any, **options: Any) -> None:
            if threading.get_ident() != thread and not llm.errored:
                try:
                    asyncio.run_coroutine_threadsafe(self._drain(), loop).result()
                except Exception:
                    _log.exception("the drain failed")
            shutdown(*args, **options)

        llm.shutdown = drain_and_shutdown

    async def _drain(self) -> None:
        await self._server.drain(asyncio.Event())
        await self._end_watch()

    async def _end_watch(self) -> None:
        self._stop.set()
        if self._watching is not None:
            await self._watching

    async def close(self) -> None:
        """Stop serving, any number of times; the engine is left to its owner."""
        await self._end_watch()
        await self._server.close()
        if self._serving is not None:
            self._serving.engine.release()

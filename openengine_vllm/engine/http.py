"""vLLM's own HTTP server, on an engine that serves gRPC in the same process.

The app, its routes and its flags are all vLLM's. Ours are the socket, the keys, the certificate
and the order in which things end.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
from typing import TYPE_CHECKING, Any

import structlog
import uvicorn
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import FrontendArgs, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import NoSignalServer, validate_api_server_args
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from openengine_vllm.binding import address_of
from openengine_vllm.hosts import is_loopback
from openengine_vllm.http_keys import KeyCheck
from openengine_vllm.settings import ServerSettings, TlsFiles

if TYPE_CHECKING:
    import socket

    from vllm.v1.engine.async_llm import AsyncLLM

_log = structlog.get_logger(__name__)

_FLUSH_SECONDS = 2
_TLS_FLAGS = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")


def add_http_arguments(parser: FlexibleArgumentParser) -> None:
    """Add the flags of vLLM's HTTP server."""
    FrontendArgs.add_cli_args(parser)


class HttpFrontend:
    """vLLM's HTTP API.

    Args:
        flags: all of the command line, vLLM's for the engine and for HTTP among them.

    Raises:
        ValueError: a flag that means nothing here.
        Exception: whatever vLLM raises for a flag that is wrong.
    """

    def __init__(self, flags: argparse.Namespace) -> None:
        for name in _TLS_FLAGS:
            if getattr(flags, name):
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} has no effect: --tls-cert and --tls-key are for HTTP too")
        validate_parsed_serve_args(flags)
        if flags.tool_parser_plugin:
            ToolParserManager.import_tool_parser(flags.tool_parser_plugin)
        if flags.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(flags.reasoning_parser_plugin)
        validate_api_server_args(flags)
        self._flags = flags
        self._llm: AsyncLLM
        self._server: _Server | None = None
        self._serving: asyncio.Task[None]
        self._refresher: SSLCertRefresher | None = None

    def attach(self, llm: AsyncLLM) -> None:
        """Serve this engine."""
        self._llm = llm

    async def open(self, listener: socket.socket, settings: ServerSettings) -> str:
        """Serve on a bound socket; returns the address.

        Raises:
            Exception: whatever vLLM raises where its server cannot start.
        """
        flags = self._flags
        # vLLM's own check leaves some paths open; it is for its key alone, which ours replace.
        flags.api_key = [""] if settings.api_keys else None
        tasks = await self._llm.get_supported_tasks()
        app = build_app(flags, tasks, self._llm.model_config)
        await init_app_state(self._llm, app.state, flags, tasks)
        config = uvicorn.Config(
            KeyCheck(app, settings.api_keys) if settings.api_keys else app,
            log_level=flags.uvicorn_log_level,
            access_log=not flags.disable_uvicorn_access_log,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
            **_log_options(flags),
            **_tls_options(settings.tls),
        )
        config.h11_max_incomplete_event_size = flags.h11_max_incomplete_event_size
        config.load()
        self._server = app.state.server = _Server(config)
        address = address_of(listener)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        up = asyncio.ensure_future(self._server.up.wait())
        await asyncio.wait((self._serving, up), return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._serving.done():
            await self._serving
            raise RuntimeError("it ended at once")
        if settings.tls is not None:
            self._refresher = _refresher(config, settings.tls)
        _log.info("serving HTTP", address=address, tls=settings.tls is not None)
        if not (is_loopback(settings.http_host) or settings.authenticates):
            _log.warning("anyone who can reach the address can use the engine", address=address)
        return address

    async def close(self) -> None:
        """Stop listening; what is left of the answers is cut off after a moment."""
        if self._refresher is not None:
            self._refresher.stop()
        if self._server is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving])


class _Server(NoSignalServer):
    """Tells when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self.up.set()


def _log_options(flags: argparse.Namespace) -> dict[str, Any]:
    config = get_uvicorn_log_config(flags)
    return {} if config is None else {"log_config": config}


def _tls_options(files: TlsFiles | None) -> dict[str, Any]:
    if files is None:
        return {}
    options: dict[str, Any] = {"ssl_certfile": files.certificate, "ssl_keyfile": files.key}
    if files.client_ca is not None:
        options |= {"ssl_ca_certs": files.client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def _refresher(config: uvicorn.Config, files: TlsFiles) -> SSLCertRefresher:
    assert config.ssl is not None
    ca = None if files.client_ca is None else str(files.client_ca)
    return SSLCertRefresher(config.ssl, str(files.key), str(files.certificate), ca)

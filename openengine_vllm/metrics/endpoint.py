"""The HTTP endpoint of the metrics: GET /metrics and nothing else, one request a connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus

import structlog
from prometheus_client import REGISTRY

from openengine_vllm.binding import address_of, bind_tcp
from openengine_vllm.hosts import is_loopback
from openengine_vllm.metrics.exposition import CONTENT_TYPE, exposition
from openengine_vllm.metrics.server_metrics import ServerMetrics

_log = structlog.get_logger(__name__)

PATH = "/metrics"
MOST_CONNECTIONS = 16
"""At once; more are closed."""
MOST_HEAD_BYTES = 16 * 1024
"""Of a request with its headers."""
_SECONDS = 10.0
"""For a request and its answer."""
_PLAIN = "text/plain; charset=utf-8"


@contextlib.asynccontextmanager
async def served_metrics(metrics: ServerMetrics, host: str, port: int) -> AsyncIterator[str]:
    """Show the server's metrics and vLLM's until the context ends; gives the address.

    Raises:
        BindError: the address cannot be served.
    """
    listener = bind_tcp(host, port, "metrics")
    address = address_of(listener)
    endpoint = MetricsEndpoint(lambda: exposition(REGISTRY, metrics.registry))
    await endpoint.start(listener)
    _log.info("metrics", url=f"http://{address}{PATH}")
    if not is_loopback(host):
        _log.warning("anyone who can reach the address can read the metrics", address=address)
    sampling = asyncio.ensure_future(metrics.watch_loop())
    try:
        yield address
    finally:
        sampling.cancel()
        endpoint.close()


class MetricsEndpoint:
    """Serves the metrics' text over HTTP/1.1, on the running event loop.

    Args:
        text: makes it.
    """

    def __init__(self, text: Callable[[], Awaitable[bytes]]) -> None:
        self._text = text
        self._one_at_a_time = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        """Serve on a bound socket."""
        self._server = await asyncio.start_server(
            self._connected, sock=listener, limit=MOST_HEAD_BYTES
        )

    def close(self) -> None:
        """Stop at once, also in the middle of an answer."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        try:
            if task is None or len(self._connections) >= MOST_CONNECTIONS:
                return
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                async with asyncio.timeout(_SECONDS):
                    writer.write(await self._answer(reader))
                    await writer.drain()
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        words = head.partition(b"\r\n")[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response(HTTPStatus.BAD_REQUEST)
        method, target, _ = words
        if target.partition(b"?")[0] != PATH.encode():
            return _response(HTTPStatus.NOT_FOUND)
        if method not in (b"GET", b"HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, more="Allow: GET, HEAD\r\n")
        try:
            async with self._one_at_a_time:
                text = await self._text()
        except Exception as error:
            _log.exception("metrics failed", error=type(error).__name__)
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR)
        return _response(HTTPStatus.OK, text, CONTENT_TYPE, with_body=method == b"GET")


def _response(
    status: HTTPStatus,
    body: bytes | None = None,
    content_type: str = _PLAIN,
    *,
    more: str = "",
    with_body: bool = True,
) -> bytes:
    if body is None:
        body = f"{status.phrase}\n".encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n"
    )
    return head.encode() + (body if with_body else b"")

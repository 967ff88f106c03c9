"""A TCP connection that a test can break the way networks do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

_CHUNK = 65536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Line:
    """Carries one connection to ``target`` until it is cut or muted.

    Args:
        target: ``host:port``, where it leads.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._far = (host, int(port))
        self._writers: list[asyncio.StreamWriter] = []
        self._connected = asyncio.Event()
        self._muted = False
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[str]:
        """The address to dial instead of the target."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            yield f"{host}:{port}"
        finally:
            server.close()
            self._reset()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def cut(self) -> None:
        """Reset the connection in both directions, once there is one."""
        await self._connected.wait()
        self._reset()

    def mute(self) -> None:
        """Lose whatever either side sends from now on; both still believe in the connection."""
        self._muted = True

    def _reset(self) -> None:
        for writer in self._writers:
            end: socket.socket | None = writer.transport.get_extra_info("socket")
            if end is not None and not writer.transport.is_closing():
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writers:
            writer.transport.abort()
            return
        self._writers.append(writer)
        far_reader, far_writer = await asyncio.open_connection(*self._far)
        self._writers.append(far_writer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.ensure_future(self._pump(source, sink))
            self._tasks.add(task)
        self._connected.set()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(_CHUNK):
                if not self._muted:
                    sink.write(data)
                    await sink.drain()
        sink.close()

"""Waiting for a ZMQ socket in an event loop, and reading all that it has at one go."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import zmq


class Receiver:
    """A socket whose messages are read in the running loop; closes it at the end.

    Args:
        socket: used by nobody else for reading.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._file = int(socket.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._readable = asyncio.Event()
        self._loop.add_reader(self._file, self._readable.set)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket, and drop what it still had to send."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._file)
            self.socket.close(linger=0)

    def receive_now(self) -> list[bytes] | None:
        """The frames of the next message; None when there is none."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    async def receive(self) -> list[bytes]:
        """The frames of the next message; waits for one."""
        while (frames := self.receive_now()) is None:
            # The descriptor tells of changes only: look again after it was read.
            self._readable.clear()
            if (frames := self.receive_now()) is not None:
                return frames
            await self._readable.wait()
        return frames

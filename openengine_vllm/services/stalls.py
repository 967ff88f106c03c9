"""Ends streams whose client holds them open and does not read.

gRPC buffers some megabytes for a client and then lets a write wait for ever. One task looks
at all waiting writes once in a while, so that a write itself costs next to nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from openengine_vllm.services.handlers import Context

if TYPE_CHECKING:
    from openengine_vllm.metrics.server_metrics import ServerMetrics, StreamCells

_LOOKS_PER_TIMEOUT = 10
_LONGEST_PAUSE_SECONDS = 1.0
SLOW_SECONDS = 1.0
"""A client that has one write wait for longer is slow."""


class StallWatch:
    """Watches the writes of all streams.

    Args:
        timeout: seconds that one write may wait for its client.
        metrics: counts what is written, if anybody does.
    """

    def __init__(self, timeout: float, metrics: ServerMetrics | None = None) -> None:
        self._timeout = timeout
        self._metrics = metrics
        self._writers: set[StreamWriter] = set()

    @property
    def slow(self) -> int:
        """Streams whose client has not taken a message for more than a second."""
        latest = asyncio.get_running_loop().time() - SLOW_SECONDS
        return sum(
            writer.waiting_since is not None and writer.waiting_since < latest
            for writer in self._writers
        )

    def open(self, context: Context, rpc: str) -> StreamWriter:
        """A writer for the calling task's stream of this RPC; it has to be closed."""
        writer = (
            StreamWriter(context, self._writers)
            if self._metrics is None
            else CountingWriter(context, self._writers, self._metrics.stream(rpc))
        )
        self._writers.add(writer)
        return writer

    async def run(self) -> None:
        """Look for stalled writes until cancelled."""
        loop = asyncio.get_running_loop()
        pause = min(_LONGEST_PAUSE_SECONDS, max(self._timeout / _LOOKS_PER_TIMEOUT, 0.01))
        while True:
            await asyncio.sleep(pause)
            latest = loop.time() - self._timeout
            for writer in tuple(self._writers):
                if writer.waiting_since is not None and writer.waiting_since < latest:
                    writer.give_up()


class StreamWriter:
    """Writes one stream's messages in order.

    When the client does not read, the task that writes is cancelled and :attr:`stalled` tells
    it from a cancellation by the client.
    """

    __slots__ = ("_context", "_loop", "_task", "_writers", "stalled", "waiting_since")

    def __init__(self, context: Context, writers: set[StreamWriter]) -> None:
        self._context = context
        self._writers = writers
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self.waiting_since: float | None = None
        self.stalled = False

    async def write(self, messages: Sequence[bytes]) -> None:
        """Send messages; waits while the client's buffers are full.

        Raises:
            CancelledError: the client has gone, or :attr:`stalled`.
        """
        for message in messages:
            self.waiting_since = self._loop.time()
            try:
                await self._context.write(message)
            except grpc.aio.InternalError:
                # A call that ends in the middle of a write fails the write; gRPC cancels the
                # task only after that.
                raise asyncio.CancelledError from None
        self.waiting_since = None

    def give_up(self) -> None:
        """Stop waiting for the client."""
        self.stalled = True
        self.waiting_since = None
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """The stream needs no watching any more."""
        self.waiting_since = None
        self._writers.discard(self)


class CountingWriter(StreamWriter):
    """The same, for metrics."""

    __slots__ = ("_cells", "_last")

    def __init__(self, context: Context, writers: set[StreamWriter], cells: StreamCells) -> None:
        super().__init__(context, writers)
        self._cells = cells
        self._last: float | None = None

    def write(self, messages: Sequence[bytes]) -> Coroutine[Any, Any, None]:
        # No coroutine of its own: this runs for every token.
        now = self._loop.time()
        cells, last, self._last = self._cells, self._last, now
        cells.messages.value += len(messages)
        if last is not None and cells.between is not None:
            cells.between.observe(now - last)
        return StreamWriter.write(self, messages)

    def give_up(self) -> None:
        self._cells.stalled.value += 1
        super().give_up()

"""Keeps requests apart that must not meet in one batch of the engine.

On vLLM's V1 model runner a request for the scores of explicit token ids overwrites the ranked
candidates of every other request in its batch. So requests of either kind run together, the two
kinds in turns, first come first served: none waits longer than for those that came before it.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque


class BatchKind(enum.Enum):
    """The kinds that must not meet."""

    RANKED = "ranked candidates"
    LISTED = "explicit token ids"


class BatchGate:
    """Admits one kind at a time; used from one event loop."""

    def __init__(self) -> None:
        self._running: BatchKind | None = None
        self._count = 0
        self._waiting: deque[tuple[BatchKind, asyncio.Future[None]]] = deque()

    async def enter(self, kind: BatchKind) -> None:
        """Wait until a request of this kind may run; each needs one :meth:`leave`."""
        if not self._waiting and self._may_run(kind):
            self._admit(kind)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (kind, turn)
        self._waiting.append(place)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave()
            elif place in self._waiting:
                self._waiting.remove(place)
                self._let_in()
            raise

    def leave(self) -> None:
        """A request that entered has left the engine."""
        self._count -= 1
        if not self._count:
            self._running = None
            self._let_in()

    def _may_run(self, kind: BatchKind) -> bool:
        return self._running is None or self._running is kind

    def _admit(self, kind: BatchKind) -> None:
        self._running = kind
        self._count += 1

    def _let_in(self) -> None:
        while self._waiting and self._may_run(self._waiting[0][0]):
            kind, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._admit(kind)
                turn.set_result(None)

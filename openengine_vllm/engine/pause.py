"""Lets the event loop run between the parts of a long piece of work."""

from __future__ import annotations

import asyncio
import time

_LONGEST_SECONDS = 0.005


class Pause:
    """Measures a piece of work from when it is made."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def if_due(self) -> None:
        """Let others run if the work has kept the event loop for some milliseconds."""
        if time.perf_counter() - self._since > _LONGEST_SECONDS:
            await asyncio.sleep(0)
            self._since = time.perf_counter()

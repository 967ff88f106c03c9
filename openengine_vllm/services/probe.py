"""The inference probe: one minimal engine request, shared by all who ask meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from openengine_vllm.protocol import errors

if TYPE_CHECKING:
    from openengine_vllm.engine.runtime import Engine


class InferenceProbe:
    """Runs at most one probe at a time.

    Args:
        timeout: seconds after which an engine that answers nobody counts as hung.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._running: asyncio.Task[str | None] | None = None

    async def run(self, engine: Engine) -> str | None:
        """What is wrong with the engine, or None when it answered."""
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(self._probe(engine))
        return await asyncio.shield(self._running)

    async def _probe(self, engine: Engine) -> str | None:
        before = engine.progress
        try:
            async with asyncio.timeout(self._timeout):
                await engine.probe()
        except TimeoutError:
            if engine.progress != before:  # it answers others: the probe waits in its queue
                return None
            return f"the engine did not answer within {self._timeout:g} s"
        except errors.OpenEngineError as error:
            return error.message
        return None

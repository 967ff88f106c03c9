"""Generate: validate, admit, have the engine accept, and stream what it makes."""

from __future__ import annotations

import asyncio

from openengine_vllm.engine.requests import plan_generation
from openengine_vllm.engine.stream import GenerationStream
from openengine_vllm.lifecycle import Lifecycle
from openengine_vllm.limits import RequestLimits
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.registry import RequestRegistry
from openengine_vllm.services.handlers import Context
from openengine_vllm.services.stalls import StallWatch


class GenerateService:
    """The Generate RPC."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        registry: RequestRegistry,
        limits: RequestLimits,
        stalls: StallWatch,
    ) -> None:
        self._lifecycle = lifecycle
        self._registry = registry
        self._limits = limits
        self._stalls = stalls

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Serve one request to its end; the engine's part stops with the client's interest."""
        engine = self._lifecycle.accepting.engine
        plan = plan_generation(request, engine.facts, self._limits)
        entry = self._registry.admit(plan.request_id, plan.sequences)
        try:
            stream = await engine.submit(plan)
        except BaseException:
            self._registry.forget(entry)
            raise
        entry.on_end(stream.end)
        try:
            await self._send(stream, context)
        finally:
            stream.close()
            self._registry.close(entry)

    async def _send(self, stream: GenerationStream, context: Context) -> None:
        writer = self._stalls.open(context)
        try:
            while messages := await stream.next():
                await writer.write(messages)
        except asyncio.CancelledError:
            if not writer.stalled:
                raise
            raise errors.overloaded("the client did not read its stream for too long") from None
        finally:
            writer.close()

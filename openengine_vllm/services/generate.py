"""Generate: validate, admit, have the engine accept, and stream what it makes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from openengine_vllm.engine.requests import GenerationPlan, PreparedRequest, plan_generation
from openengine_vllm.engine.stream import GenerationStream
from openengine_vllm.lifecycle import Lifecycle
from openengine_vllm.limits import RequestLimits
from openengine_vllm.protocol import errors, split
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.call_metadata import (
    TOLD_RANK_KEY,
    add_to_generate,
    read_call_metadata,
)
from openengine_vllm.protocol.revision import OPENENGINE, Revision
from openengine_vllm.protocol.trace_context import read_trace_context
from openengine_vllm.registry import EndReason, Entry, RequestRegistry
from openengine_vllm.services.handlers import Context
from openengine_vllm.services.request_record import RequestRecord
from openengine_vllm.services.stalls import StallWatch

if TYPE_CHECKING:
    from openengine_vllm.engine.runtime import Engine
    from openengine_vllm.metrics.server_metrics import ServerMetrics


class GenerateService:
    """The Generate RPC, of either revision."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        registry: RequestRegistry,
        limits: RequestLimits,
        stalls: StallWatch,
        metrics: ServerMetrics | None = None,
    ) -> None:
        self._lifecycle = lifecycle
        self._registry = registry
        self._limits = limits
        self._stalls = stalls
        self._metrics = metrics

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Serve one request to its end; the engine's part stops with the client's interest."""
        await self.serve(request, context, OPENENGINE)

    async def serve(
        self,
        request: pb.GenerateRequest,
        context: Context,
        revision: Revision,
        extra: split.Struct | None = None,
    ) -> None:
        """The same for a request that came in this revision.

        Args:
            extra: parameters of vLLM's own, where the revision has a place for them.
        """
        metadata = tuple(context.invocation_metadata() or ())
        caller = read_trace_context(metadata)
        with RequestRecord(
            f"{revision.services[0]}/Generate",
            request.request_id,
            request.model,
            request.metadata,
            caller,
            self._metrics,
        ) as record:
            engine = self._lifecycle.accepting.engine
            record.trace(engine.tracer)
            call = read_call_metadata(metadata)
            record.came_with(call)
            add_to_generate(request, call)
            plan = plan_generation(
                request,
                engine.facts,
                self._limits,
                extra,
                detailed_errors=revision.detailed_errors,
            )
            record.planned(plan, request.model or engine.facts.served_names[0])
            await self._run(engine, plan, record, context)

    async def _run(
        self, engine: Engine, plan: GenerationPlan, record: RequestRecord, context: Context
    ) -> None:
        entry = self._registry.admit(plan.request_id, plan.sequences)
        try:
            prepared = await engine.prepare(plan)
            stream = await self._accept(engine, prepared, record, entry)
        except BaseException:
            self._registry.forget(entry)
            raise
        record.accepted(stream)
        entry.on_end(stream.end)
        try:
            if plan.data_parallel_rank is not None:
                rank = str(plan.data_parallel_rank)
                await context.send_initial_metadata(((TOLD_RANK_KEY, rank),))
            await self._send(stream, record, context)
        finally:
            stream.close()
            self._registry.close(entry)

    async def _accept(
        self, engine: Engine, prepared: PreparedRequest, record: RequestRecord, entry: Entry
    ) -> GenerationStream:
        """Wait until the engine has accepted the request or the request is told to end."""
        submission = asyncio.ensure_future(engine.submit(prepared, record.trace_headers))

        def give_up(_: EndReason) -> None:
            submission.cancel()

        entry.on_end(give_up)
        try:
            return await submission
        except asyncio.CancelledError:
            # The client may leave in the very turn of the loop in which the engine accepts.
            if submission.done() and not submission.cancelled() and not submission.exception():
                submission.result().close()
            if entry.end_reason is None:
                raise
            return engine.unstarted(prepared)

    async def _send(
        self, stream: GenerationStream, record: RequestRecord, context: Context
    ) -> None:
        writer = self._stalls.open(context, "Generate")
        try:
            first = await stream.next()
            record.answered()
            await writer.write(first)
            while messages := await stream.next():
                await writer.write(messages)
        except asyncio.CancelledError:
            if not writer.stalled:
                raise
            raise errors.overloaded("the client did not read its stream for too long") from None
        finally:
            writer.close()

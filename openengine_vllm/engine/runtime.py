"""The running engine as the services see it: submit, probe, tell whether it lives, stop.

No vLLM type passes this module upwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import structlog
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from openengine_vllm.engine.decode import Detokenizer
from openengine_vllm.engine.facts import ModelFacts
from openengine_vllm.engine.gate import BatchGate
from openengine_vllm.engine.guide_checker import CheckedGuide, GuideChecker
from openengine_vllm.engine.guide_params import CheckedSamplingParams, guide_params
from openengine_vllm.engine.guided import Guide
from openengine_vllm.engine.information import InformationReader
from openengine_vllm.engine.kv_events import tell_of_resets
from openengine_vllm.engine.outputs import SequenceOutput
from openengine_vllm.engine.pause import Pause
from openengine_vllm.engine.reasoning import reasoning_counter
from openengine_vllm.engine.requests import (
    GenerationPlan,
    PreparedRequest,
    check_prompt_length,
)
from openengine_vllm.engine.scores import PendingScores, keep_arrays
from openengine_vllm.engine.sharing import SharedEntrance
from openengine_vllm.engine.stats import Demand, EngineStats, Load
from openengine_vllm.engine.stream import GenerationStream, RunningSequence
from openengine_vllm.engine.token_information import check_prompt_information
from openengine_vllm.engine.waiting_room import Leave, WaitingRoom
from openengine_vllm.protocol import errors
from openengine_vllm.protocol.generation_encoding import GenerationEncoder
from openengine_vllm.registry import EndReason, RequestRegistry

if TYPE_CHECKING:
    from vllm.inputs import EngineInput
    from vllm.v1.engine.async_llm import AsyncLLM

    from openengine_vllm.engine.tracing import Tracer

_log = structlog.get_logger(__name__)


class Engine:
    """One live ``AsyncLLM``, used from the event loop that first calls it.

    Args:
        detokenizer: of the engine's tokenizer.
        guides: compiles guides beforehand.
        most_bytes: of one event of a stream.
        stats: what the schedulers say.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        facts: ModelFacts,
        detokenizer: Detokenizer,
        guides: GuideChecker,
        most_bytes: int,
        stats: EngineStats,
    ) -> None:
        self._llm = llm
        self._add_request = llm.add_request
        self._guides = guides
        self.facts = facts
        self._most_bytes = most_bytes
        self._serial = itertools.count()
        self._detokenizer = detokenizer
        self._room = WaitingRoom(None if llm.vllm_config.use_v2_model_runner else BatchGate())
        self._worker = ThreadPoolExecutor(1, "encode")
        self._count_reasoning = reasoning_counter(llm)
        self.tracer = _tracer(llm)
        """Starts requests' spans; None where the operator has not asked for traces."""
        self.stats = stats
        """What the schedulers say, step by step."""
        self._progress = stats.progress
        self._background: set[asyncio.Task[None]] = set()

    @property
    def dead(self) -> bool:
        """Whether the engine's processes or its output handling have died."""
        return bool(self._llm.errored)

    @property
    def progress(self) -> int:
        """A number that changes whenever the engine answers any request."""
        return self.stats.steps

    def unfinished(self) -> int:
        """Requests that vLLM's frontend still tracks."""
        return self._llm.get_num_unfinished_requests()

    def share(self, registry: RequestRegistry, accepting: Callable[[], object]) -> None:
        """Let in the requests of others, of vLLM's own server, that use the engine directly.

        Args:
            registry: they count as live requests there.
            accepting: raises OpenEngineError while no new work is taken.
        """
        SharedEntrance(self._llm, self._room, registry, accepting, self._settle_backend)

    def tell_of_resets(self, begin: Callable[[], Callable[[], None]]) -> None:
        """Have resets of the prefix cache told; as the function of this name."""
        tell_of_resets(self._llm, begin)

    def load(self) -> Load:
        """How busy the engine is now."""
        running, waiting = 0, self._room.tokens
        for state in self._llm.output_processor.request_states.values():
            generated = 0 if state.detokenizer is None else state.detokenizer.num_output_tokens()
            if generated:
                running += state.prompt_len + generated
            else:
                waiting += state.prompt_len
        return self.stats.load(Demand(self.unfinished(), self._room.sequences, running, waiting))

    async def prepare(self, plan: GenerationPlan) -> PreparedRequest:
        """Tokenize the prompt, and check what its tokens decide.

        Raises:
            OpenEngineError: with the path of the field at fault.
        """
        prompt = await self._render(plan)
        prompt_ids: list[int] = prompt["prompt_token_ids"]
        path = "prompt" if plan.prompt_ids is None else "token_ids.ids"
        check_prompt_length(len(prompt_ids), plan.min_tokens, path, self.facts)
        check_prompt_information(plan.information, prompt_ids, self.facts, self._most_bytes)
        return PreparedRequest(plan, prompt, prompt_ids)

    async def submit(
        self, request: PreparedRequest, trace_headers: Mapping[str, str] | None = None
    ) -> GenerationStream:
        """Have the engine accept a request; ``trace_headers`` name its span's parent.

        It waits for the request's guide to compile, and for requests that it must not meet.

        Raises:
            OpenEngineError: the engine refuses it or is dead; nothing is left behind then.
        """
        plan = request.plan
        with self._room.waiting(plan.sequences, len(request.prompt_ids)):
            guide = None if plan.guide is None else await self._guides.check(plan.guide)
            leave = await self._room.enter(plan.information.batch_kind)
        try:
            return await self._begin(request, guide, trace_headers, leave)
        except BaseException:
            leave()
            raise

    async def _begin(
        self,
        request: PreparedRequest,
        guide: CheckedGuide | None,
        trace_headers: Mapping[str, str] | None,
        leave: Leave,
    ) -> GenerationStream:
        plan = request.plan
        serial = next(self._serial)
        ids = [f"{plan.request_id}/{serial}.{index}" for index in range(plan.sequences)]
        stream: GenerationStream | None = None

        def on_overflow() -> None:
            if stream is not None:
                stream.end(EndReason.SLOW_CLIENT)

        pending = PendingScores(on_overflow)
        pause = Pause()
        sequences: list[RunningSequence] = []
        try:
            for index, engine_id in enumerate(ids):
                # vLLM checks and serialises the whole prompt for each of them.
                await pause.if_due()
                sequences.append(
                    await self._start(request, index, engine_id, guide, trace_headers, pending)
                )
        except BaseException as error:
            self.abort(ids)
            if isinstance(error, Exception):
                raise self._refusal(error) from error
            raise

        stream = self._stream(request, sequences, leave)
        if pending.overflowed:
            on_overflow()
        return stream

    def unstarted(self, request: PreparedRequest) -> GenerationStream:
        """The stream of a request that is told to end while :meth:`submit` waits."""
        plan = request.plan
        sequences = [
            RunningSequence(
                index,
                f"unstarted/{plan.request_id}",
                RequestOutputCollector(RequestOutputKind.DELTA, ""),
                SequenceOutput(self._detokenizer.decoder(()), {}, plan.rules),
            )
            for index in range(plan.sequences)
        ]
        return self._stream(request, sequences, lambda: None)

    def _stream(
        self,
        request: PreparedRequest,
        sequences: Sequence[RunningSequence],
        leave: Leave,
    ) -> GenerationStream:
        plan, prompt_ids = request.plan, request.prompt_ids
        encoder = GenerationEncoder(
            plan.request_id, self._most_bytes, detailed_errors=plan.detailed_errors
        )
        reader = InformationReader(plan.information, self.facts.pieces)
        return GenerationStream(
            sequences,
            encoder,
            information=reader,
            prompt_tokens=len(prompt_ids),
            prompt_event=(
                lambda scores: encoder.prompt(
                    reader.prompt_records(prompt_ids, scores, self._detokenizer)
                )
            )
            if plan.information.prompt
            else None,
            reports_cache=self.facts.prefix_caching,
            abort=self.abort,
            on_close=leave,
            progress=self._progress,
            worker=self._worker,
            count_reasoning=None
            if self._count_reasoning is None
            else partial(self._count_reasoning, prompt_ids),
        )

    def abort(self, engine_ids: Sequence[str]) -> None:
        """Drop requests from the engine, in the background; unknown ids are ignored."""
        task = asyncio.get_running_loop().create_task(self._abort(list(engine_ids)))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def probe(self) -> None:
        """Have the engine do the least work that proves that it answers.

        Raises:
            OpenEngineError: the engine is dead or refused.
        """
        await self._ask(
            SamplingParams(max_tokens=1, temperature=0, detokenize=False)
            if self.facts.generates
            else await self._pooling_params()
        )

    async def _settle_backend(self) -> None:
        """Have the engine compile a guide of ours before any of others.

        vLLM's engine compiles all guides with the backend of its first, and its own server
        chooses one for each: with `auto`, guides that we have seen compile could then fail.
        """
        if self.facts.guide_backend == "auto":
            with contextlib.suppress(errors.OpenEngineError):
                guide = await self._guides.check(Guide("choice", ("0",)))
                await self._ask(
                    CheckedSamplingParams(
                        max_tokens=1,
                        temperature=0,
                        detokenize=False,
                        structured_outputs=guide_params(guide),
                    )
                )

    async def _ask(self, params: SamplingParams | PoolingParams) -> None:
        engine_id = f"probe/{next(self._serial)}"
        try:
            (prompt,) = await self._llm.renderer.render_cmpl_async(
                [parse_model_prompt(self._llm.model_config, {"prompt_token_ids": [0]})]
            )
            collector = await self._add_request(engine_id, prompt, params)
            await collector.get()
        except BaseException as error:
            self.abort([engine_id])
            if isinstance(error, Exception):
                raise self._refusal(error) from error
            raise

    async def _pooling_params(self) -> PoolingParams:
        tasks = await self._llm.get_supported_tasks()
        return PoolingParams(task=self._llm.model_config.get_pooling_task(tasks))

    def release(self) -> None:
        """End what was started beside the engine, and leave it alone."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._guides.close()

    def shutdown(self) -> None:
        """Stop the engine's processes. Blocks for some seconds."""
        self.release()
        self._llm.shutdown()
        if self.tracer is not None:
            self.tracer.flush()

    async def _abort(self, engine_ids: list[str]) -> None:
        try:
            await self._llm.abort(engine_ids)
        except EngineDeadError:
            return

    async def _render(self, plan: GenerationPlan) -> dict[str, Any]:
        raw: dict[str, Any] = (
            {"prompt": plan.prompt}
            if plan.prompt_ids is None
            else {"prompt_token_ids": plan.prompt_ids}
        )
        if plan.cache_salt:
            raw["cache_salt"] = plan.cache_salt
        renderer = self._llm.renderer
        tokenizing = None
        if plan.truncate_prompt_tokens is not None:
            # As vLLM does it: it takes no text that is longer than the context otherwise.
            tokenizing = renderer.default_cmpl_tok_params.with_kwargs(
                truncate_prompt_tokens=plan.truncate_prompt_tokens, truncation_side="left"
            )
        try:
            (prompt,) = await renderer.render_cmpl_async(
                [parse_model_prompt(self._llm.model_config, raw)], tokenizing
            )
        except (VLLMClientError, ValueError) as error:
            path = "prompt" if plan.prompt_ids is None else "token_ids.ids"
            raise errors.invalid_argument(path, f"{path}: {error}") from error
        return cast("dict[str, Any]", prompt)

    async def _start(
        self,
        request: PreparedRequest,
        index: int,
        engine_id: str,
        guide: CheckedGuide | None,
        trace_headers: Mapping[str, str] | None,
        pending: PendingScores,
    ) -> RunningSequence:
        plan = request.plan
        collector = await self._add_request(
            engine_id,
            cast("EngineInput", dict(request.prompt)),
            self._sampling_params(request, index, guide),
            priority=-plan.priority,
            data_parallel_rank=plan.data_parallel_rank,
            trace_headers=trace_headers,
        )
        if plan.information.outputs or plan.information.prompt:
            keep_arrays(self._llm, collector.request_id, pending)
        special = self._detokenizer.special_tokens
        decoder = self._detokenizer.decoder(
            request.prompt_ids, special=not plan.skip_special_tokens
        )
        output = SequenceOutput(decoder, special, plan.rules)
        return RunningSequence(index, engine_id, collector, output)

    def _sampling_params(
        self, request: PreparedRequest, index: int, guide: CheckedGuide | None
    ) -> SamplingParams:
        plan = request.plan
        room = self.facts.max_model_len - len(request.prompt_ids)
        return CheckedSamplingParams(
            **plan.sampling,
            **plan.information.engine_options(index),
            structured_outputs=None if guide is None else guide_params(guide),
            seed=plan.seed_for(index),
            max_tokens=room if plan.max_tokens is None else min(room, plan.max_tokens),
            skip_reading_prefix_cache=True if plan.bypass_prefix_cache else None,
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
            skip_clone=True,
        )

    def _refusal(self, error: Exception) -> errors.OpenEngineError:
        if isinstance(error, errors.OpenEngineError):
            return error
        if self.dead or isinstance(error, EngineDeadError):
            return errors.engine_dead()
        if isinstance(error, VLLMClientError):
            return errors.invalid_argument("", str(error))
        if getattr(error, "http_status", None) == 503:
            return errors.overloaded(str(error))
        _log.error("engine refused a request", error=type(error).__name__, exc_info=error)
        return errors.internal()


def _tracer(llm: AsyncLLM) -> Tracer | None:
    if not llm.vllm_config.observability_config.otlp_traces_endpoint:
        return None
    from openengine_vllm.engine.tracing import Tracer

    return Tracer()

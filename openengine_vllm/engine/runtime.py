"""The running engine as the services see it: submit, probe, tell whether it lives, stop.

No vLLM type passes this module upwards.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import structlog
from transformers import TokenizersBackend
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from openengine_vllm.engine.decode import Detokenizer, FastDetokenizer
from openengine_vllm.engine.facts import ModelFacts
from openengine_vllm.engine.guide_checker import CheckedGuide, GuideChecker
from openengine_vllm.engine.guide_params import CheckedSamplingParams, guide_params
from openengine_vllm.engine.outputs import SequenceOutput
from openengine_vllm.engine.requests import GenerationPlan, check_prompt_length
from openengine_vllm.engine.slow_decode import SlowDetokenizer
from openengine_vllm.engine.stream import GenerationStream, Progress, RunningSequence
from openengine_vllm.protocol import errors
from openengine_vllm.protocol.generation_encoding import GenerationEncoder

if TYPE_CHECKING:
    from vllm.inputs import EngineInput
    from vllm.v1.engine.async_llm import AsyncLLM

_log = structlog.get_logger(__name__)


class Engine:
    """One live ``AsyncLLM``, used from the event loop that first calls it."""

    def __init__(self, llm: AsyncLLM, facts: ModelFacts, guides: GuideChecker) -> None:
        self._llm = llm
        self._guides = guides
        self.facts = facts
        self._serial = itertools.count()
        self._detokenizer = _detokenizer(llm)
        self._progress = Progress()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def dead(self) -> bool:
        """Whether the engine's processes or its output handling have died."""
        return bool(self._llm.errored)

    @property
    def progress(self) -> int:
        """A number that changes whenever the engine answers any request."""
        return self._progress.outputs

    def unfinished(self) -> int:
        """Requests that vLLM's frontend still tracks."""
        return self._llm.get_num_unfinished_requests()

    async def submit(self, plan: GenerationPlan) -> GenerationStream:
        """Have the engine accept a request.

        Raises:
            OpenEngineError: the engine refuses it or is dead; nothing is left behind then.
        """
        guide = None if plan.guide is None else await self._guides.check(plan.guide)
        prompt, prompt_ids = await self._render(plan)
        path = "prompt" if plan.prompt_ids is None else "token_ids.ids"
        check_prompt_length(len(prompt_ids), plan.min_tokens, path, self.facts)
        serial = next(self._serial)
        ids = [f"{plan.request_id}/{serial}.{index}" for index in range(plan.sequences)]
        try:
            sequences = [
                await self._start(plan, prompt, prompt_ids, index, engine_id, guide)
                for index, engine_id in enumerate(ids)
            ]
        except BaseException as error:
            self.abort(ids)
            if isinstance(error, Exception):
                raise self._refusal(error) from error
            raise
        return GenerationStream(
            sequences,
            GenerationEncoder(plan.request_id),
            prompt_tokens=len(prompt_ids),
            reports_cache=self.facts.prefix_caching,
            abort=self.abort,
            progress=self._progress,
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
        engine_id = f"probe/{next(self._serial)}"
        params = (
            SamplingParams(max_tokens=1, temperature=0, detokenize=False)
            if self.facts.generates
            else await self._pooling_params()
        )
        try:
            (prompt,) = await self._llm.renderer.render_cmpl_async(
                [parse_model_prompt(self._llm.model_config, {"prompt_token_ids": [0]})]
            )
            collector = await self._llm.add_request(engine_id, prompt, params)
            await collector.get()
        except BaseException as error:
            self.abort([engine_id])
            if isinstance(error, Exception):
                raise self._refusal(error) from error
            raise

    async def _pooling_params(self) -> PoolingParams:
        tasks = await self._llm.get_supported_tasks()
        return PoolingParams(task=self._llm.model_config.get_pooling_task(tasks))

    def shutdown(self) -> None:
        """Stop the engine's processes. Blocks for some seconds."""
        self._guides.close()
        self._llm.shutdown()

    async def _abort(self, engine_ids: list[str]) -> None:
        try:
            await self._llm.abort(engine_ids)
        except EngineDeadError:
            return

    async def _render(self, plan: GenerationPlan) -> tuple[dict[str, Any], list[int]]:
        raw: dict[str, Any] = (
            {"prompt": plan.prompt}
            if plan.prompt_ids is None
            else {"prompt_token_ids": plan.prompt_ids}
        )
        if plan.cache_salt:
            raw["cache_salt"] = plan.cache_salt
        renderer = self._llm.renderer
        try:
            (prompt,) = await renderer.render_cmpl_async(
                [parse_model_prompt(self._llm.model_config, raw)]
            )
        except (VLLMClientError, ValueError) as error:
            path = "prompt" if plan.prompt_ids is None else "token_ids.ids"
            raise errors.invalid_argument(path, f"{path}: {error}") from error
        return prompt, prompt["prompt_token_ids"]

    async def _start(
        self,
        plan: GenerationPlan,
        prompt: dict[str, Any],
        prompt_ids: list[int],
        index: int,
        engine_id: str,
        guide: CheckedGuide | None,
    ) -> RunningSequence:
        collector = await self._llm.add_request(
            engine_id,
            cast("EngineInput", dict(prompt)),
            self._sampling_params(plan, index, len(prompt_ids), guide),
            priority=-plan.priority,
            data_parallel_rank=plan.data_parallel_rank,
        )
        output = SequenceOutput(
            self._detokenizer.decoder(prompt_ids), self._detokenizer.special_tokens, plan.rules
        )
        return RunningSequence(index, engine_id, collector, output)

    def _sampling_params(
        self, plan: GenerationPlan, index: int, prompt_tokens: int, guide: CheckedGuide | None
    ) -> SamplingParams:
        room = self.facts.max_model_len - prompt_tokens
        return CheckedSamplingParams(
            **plan.sampling,
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


class _NoText:
    """Stands in where the engine runs without a tokenizer: tokens have ids and no text."""

    special_tokens: Mapping[int, str] = MappingProxyType({})

    def decoder(self, prompt_ids: Sequence[int]) -> _NoText:
        return self

    def step(self, token_id: int) -> str:
        return ""


def _detokenizer(llm: AsyncLLM) -> Detokenizer:
    tokenizer = llm.renderer.tokenizer
    if tokenizer is None:
        return _NoText()
    if isinstance(tokenizer, TokenizersBackend):
        return FastDetokenizer(tokenizer._tokenizer)
    return SlowDetokenizer(tokenizer)

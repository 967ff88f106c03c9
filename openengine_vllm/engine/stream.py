"""A Generate request that the engine has accepted: its outputs, merged into one stream.

Each output sequence is an engine request of its own. That is what vLLM does inside for n > 1
as well; doing it here lets each sequence end by itself when a stop text is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

import structlog

from openengine_vllm.engine.information import InformationReader
from openengine_vllm.engine.outputs import (
    Finish,
    SequenceOutput,
    Step,
    StopKind,
    StopMatch,
    Token,
)
from openengine_vllm.engine.stats import Progress
from openengine_vllm.engine.wakeup import WakeUp
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.generation_encoding import GenerationEncoder
from openengine_vllm.registry import EndReason

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from openengine_vllm.engine.scores import PromptScores, ScoreRows

_log = structlog.get_logger(__name__)

_FINISH = {
    "stop": Finish.STOP,
    "length": Finish.LENGTH,
    "abort": Finish.ABORT,
    "repetition": Finish.LENGTH,
}
_REASONS = {
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.ABORT: pb.FINISH_REASON_CANCELLED,
}


_Event: TypeAlias = bytes | Callable[[], list[bytes]]
"""Serialised, or what takes too long to be serialised on the event loop."""
_MOST_SCORES_ON_LOOP = 1000
"""About half a millisecond of encoding."""


@dataclass(frozen=True, slots=True)
class StreamSummary:
    """What a request has come to so far, without its content."""

    prompt_tokens: int
    completion_tokens: int
    """Over all outputs."""
    cached_tokens: int | None
    """Of the prompt; None without prefix caching."""
    reasoning_tokens: int | None
    finish_reasons: tuple[str, ...]
    """By output: ``stop``, ``length``, ``cancelled``, or ``-`` for one that has not finished."""
    error: errors.OpenEngineError | None
    """What the stream has failed with."""


@dataclass(slots=True, eq=False)
class RunningSequence:
    """One output of the request while it runs."""

    index: int
    engine_id: str
    collector: RequestOutputCollector
    output: SequenceOutput
    finish: Finish | None = None
    token_ids: list[int] | None = None
    """All that the engine generated, where reasoning tokens are counted."""

    def take(self) -> RequestOutput | None:
        """What the engine has made since the last call, merged.

        Raises:
            OpenEngineError: the engine is gone; vLLM leaves its exception here.
        """
        try:
            return cast("RequestOutput | None", self.collector.get_nowait())
        except Exception as error:
            raise errors.engine_dead() from error


class GenerationStream:
    """The events of one accepted request, as serialised GenerateResponse messages.

    Args:
        sequences: one an output, already accepted by the engine.
        encoder: serialises the events.
        information: makes the records of tokens that have scores.
        prompt_tokens: length of the prompt.
        prompt_event: makes the prompt event of the engine's scores, when one was asked for.
        reports_cache: whether usage tells cached prompt tokens (prefix caching is on).
        abort: tells the engine to drop requests, by engine id; returns at once.
        on_close: runs once, when the engine has been told to drop what is left of the request.
        progress: counts the engine's answers.
        worker: runs what would keep the event loop for too long.
        count_reasoning: counts the reasoning tokens of all outputs together; None where usage
            does not tell them.
    """

    def __init__(
        self,
        sequences: Sequence[RunningSequence],
        encoder: GenerationEncoder,
        *,
        information: InformationReader,
        prompt_tokens: int,
        prompt_event: Callable[[PromptScores | None], bytes] | None = None,
        reports_cache: bool,
        abort: Callable[[Sequence[str]], None],
        on_close: Callable[[], None] | None = None,
        progress: Progress,
        worker: Executor,
        count_reasoning: Callable[[Sequence[Sequence[int]]], int | None] | None = None,
    ) -> None:
        self._all = tuple(sequences)
        self._live = list(sequences)
        self._encoder = encoder
        self._information = information
        self._prompt_tokens = prompt_tokens
        self._prompt_event = prompt_event
        self._reports_cache = reports_cache
        self._abort = abort
        self._on_close = on_close
        self._progress = progress
        self._worker = worker
        self._early: list[_Event] = []
        self._has_unencoded = False
        self._count_reasoning = count_reasoning
        self._cached_tokens = 0
        self._reasoning_tokens: int | None = None
        self._error: errors.OpenEngineError | None = None
        self._end_reason: EndReason | None = None
        self._wake = WakeUp()
        self._wake.set()
        for sequence in sequences:
            sequence.collector.ready = cast("asyncio.Event", self._wake)
            if count_reasoning is not None:
                sequence.token_ids = []

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far, over all outputs."""
        return sum(sequence.output.generated for sequence in self._all)

    @property
    def summary(self) -> StreamSummary:
        """What the request has come to so far."""
        return StreamSummary(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self.generated_tokens,
            cached_tokens=self._cached_tokens if self._reports_cache else None,
            reasoning_tokens=self._reasoning_tokens,
            finish_reasons=tuple(_finish_name(sequence.finish) for sequence in self._all),
            error=self._error,
        )

    def end(self, reason: EndReason) -> None:
        """Have the engine stop now, and :meth:`next` give the last events.

        Returns at once, also when nobody takes events because the client does not read.
        """
        if self._end_reason is None:
            self._end_reason = reason
        self._abort([sequence.engine_id for sequence in self._live])
        self._leave()
        self._wake.set()

    def close(self) -> None:
        """Drop whatever still runs in the engine. Safe to call at any time, any number of times."""
        if self._live:
            self._abort([sequence.engine_id for sequence in self._live])
            self._live.clear()
        self._leave()

    def _leave(self) -> None:
        if self._on_close is not None:
            self._on_close()
            self._on_close = None

    async def next(self) -> list[bytes]:
        """Wait for the next events; an empty list means that the stream has ended."""
        while self._live:
            await self._wake.wait()
            self._wake.clear()
            events = self._collect()
            if self._early and not self._live:
                events, self._early = [*self._early, *events], []
            if not events:
                continue
            if self._has_unencoded:
                return await self._encoded(events)
            return cast("list[bytes]", events)
        return []

    async def _encoded(self, events: list[_Event]) -> list[bytes]:
        self._has_unencoded = False
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._worker, _encode, events)
        except Exception as error:
            _log.exception("stream failed", error=type(error).__name__)
            failed: list[_Event] = []
            self._fail(errors.internal(), failed)
            return cast("list[bytes]", failed)

    def _collect(self) -> list[_Event]:
        # All outputs are taken before anything is awaited: taking one clears the wake-up.
        messages: list[_Event] = []
        try:
            for sequence in tuple(self._live):
                output = sequence.take()
                if output is not None:
                    self._add(sequence, output, messages)
        except errors.OpenEngineError as error:
            self._fail(error, messages)
        except Exception as error:
            _log.exception("stream failed", error=type(error).__name__)
            self._fail(errors.internal(), messages)
        if self._end_reason is not None and self._live:
            self._end_early(self._end_reason, messages)
        if not self._live:
            self.close()
        return messages

    def _add(
        self, sequence: RunningSequence, output: RequestOutput, messages: list[_Event]
    ) -> None:
        completion = output.outputs[0]
        if sequence.index == 0:
            if output.num_cached_tokens:
                self._cached_tokens = output.num_cached_tokens
            # An abort that overtook the engine's first answer brings no scores of the prompt.
            if self._prompt_event is not None and completion.token_ids:
                self._begin(output, messages)
        reason = completion.finish_reason
        if reason is None:
            finish = None
        elif (finish := _FINISH.get(reason)) is None:
            raise errors.internal(f"the engine ended the request with {reason!r}")
        elif finish is Finish.ABORT:
            if self._end_reason is None:
                raise errors.engine_dead("the engine aborted the request")
            finish = None
        if sequence.token_ids is not None:
            sequence.token_ids += completion.token_ids
        self._progress.tokens += len(completion.token_ids)
        scores = None
        if completion.logprobs is not None:
            scores = cast("ScoreRows", completion.logprobs).take()
        step = sequence.output.feed(completion.token_ids, finish, scores)
        if step.finish is not None and finish is None:
            self._abort([sequence.engine_id])
        self._emit(sequence, step, messages)

    def _begin(self, output: RequestOutput, messages: list[_Event]) -> None:
        scores = cast("PromptScores | None", output.prompt_logprobs)
        prompt_event, self._prompt_event = self._prompt_event, None
        assert prompt_event is not None
        self._has_unencoded = True
        messages += [lambda: [prompt_event(scores)], *self._early]
        self._early.clear()

    def _emit(self, sequence: RunningSequence, step: Step, messages: list[_Event]) -> None:
        if self._prompt_event is not None:
            messages = self._early
        if step.tokens:
            self._emit_tokens(sequence.index, step, messages)
        if step.finish is None:
            return
        self._live.remove(sequence)
        sequence.finish = step.finish
        messages.append(
            self._encoder.finished(
                sequence.index,
                _REASONS[step.finish],
                None if step.stop_match is None else _stop_match(step.stop_match),
                None if self._live else self._usage(),
            )
        )

    def _emit_tokens(self, index: int, step: Step, messages: list[_Event]) -> None:
        tokens = step.tokens
        first = tokens[0]
        if len(tokens) == 1 and first.score is None:
            messages.append(self._encoder.token(index, first.token_id, first.text, step.text))
            return
        encode = partial(self._token_events, index, tokens)
        scores = sum(len(token.score.token_ids) for token in tokens if token.score is not None)
        if scores > _MOST_SCORES_ON_LOOP:
            self._has_unencoded = True
            messages.append(encode)
        else:
            messages += encode()

    def _token_events(self, index: int, tokens: Sequence[Token]) -> list[bytes]:
        return self._encoder.tokens(index, map(self._information.record, tokens))

    def _end_early(self, reason: EndReason, messages: list[_Event]) -> None:
        if reason is EndReason.ABORTED:
            for sequence in tuple(self._live):
                self._emit(sequence, sequence.output.end(Finish.ABORT), messages)
            return
        self._fail(_END_ERRORS[reason](), messages)

    def _fail(self, error: errors.OpenEngineError, messages: list[_Event]) -> None:
        self.close()
        self._error = error
        messages.append(self._encoder.error(error, self._usage()))

    def _usage(self) -> pb.Usage:
        completion_tokens = self.generated_tokens
        usage = pb.Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self._prompt_tokens + completion_tokens,
        )
        if self._reports_cache:
            usage.cached_prompt_tokens = self._cached_tokens
        if self._count_reasoning is not None:
            outputs = [(s.token_ids or [])[: s.output.generated] for s in self._all]
            self._reasoning_tokens = self._count_reasoning(outputs)
            if self._reasoning_tokens is not None:
                usage.reasoning_tokens = self._reasoning_tokens
        return usage


_END_ERRORS: dict[EndReason, Callable[[], errors.OpenEngineError]] = {
    EndReason.DRAINED: errors.draining,
    EndReason.ENGINE_DEAD: errors.engine_dead,
    EndReason.SLOW_CLIENT: partial(
        errors.overloaded, "the client reads too slowly for the scores that it asked for"
    ),
}


def _encode(events: list[_Event]) -> list[bytes]:
    encoded: list[bytes] = []
    for event in events:
        if isinstance(event, bytes):
            encoded.append(event)
        else:
            encoded += event()
    return encoded


def _finish_name(finish: Finish | None) -> str:
    if finish is None:
        return "-"
    return "cancelled" if finish is Finish.ABORT else finish.value


def _stop_match(match: StopMatch) -> pb.StopMatch:
    if match.kind is StopKind.TEXT:
        return pb.StopMatch(stop_text=str(match.value))
    if match.kind is StopKind.TOKEN:
        return pb.StopMatch(stop_token_id=int(match.value))
    return pb.StopMatch(eos_token_id=int(match.value))

"""A whole Generate stream, put together by a reader that trusts nobody.

Whatever a test is about, the stream that it reads has to keep the contract's rules, so every
one of them is asserted here, on every stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from openengine_vllm.protocol import v1 as pb


@dataclass
class Output:
    """One output of a request."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """`TokenInfo.token`, one a token."""
    records: list[pb.TokenInfo] = field(default_factory=list)
    """The tokens as they came."""
    text: str = ""
    deltas: list[pb.TokenOutput] = field(default_factory=list)
    finish: str | None = None
    """`STOP`, `LENGTH` or `CANCELLED`."""
    stop_match: tuple[str, str | int] | None = None
    """The kind of match and its value."""


@dataclass
class Generation:
    """All that a request gave."""

    outputs: list[Output]
    prompt: pb.PromptOutput | None = None
    usage: pb.Usage | None = None
    error: pb.EngineError | None = None
    """The terminal error, for a request that failed after it was accepted."""

    @property
    def only(self) -> Output:
        """The output of a request with one."""
        [output] = self.outputs
        return output


async def gather(
    responses: AsyncIterable[pb.GenerateResponse],
    request: pb.GenerateRequest,
    *,
    reasoning: bool = False,
) -> Generation:
    """Read a stream to its end; ``reasoning`` says that the server has a reasoning parser.

    Raises:
        AssertionError: the stream breaks a rule of the contract.
    """
    given = request.sampling.HasField("num_sequences")
    generation = Generation([Output() for _ in range(request.sampling.num_sequences or 1)])
    assert not given or len(generation.outputs) == request.sampling.num_sequences
    ended = False
    async for response in responses:
        assert not ended, f"an event after the terminal one: {response}"
        assert response.request_id == request.request_id
        ended = _take(response, generation, request.response)
        assert response.HasField("usage") == ended, "usage goes with the last response alone"
    assert ended, "the stream closed without a terminal event"
    _check_usage(generation, reasoning)
    return generation


def _take(
    response: pb.GenerateResponse, generation: Generation, wanted: pb.ResponseOptions
) -> bool:
    """Add an event; true for the terminal one."""
    if response.HasField("usage"):
        generation.usage = response.usage
    match response.WhichOneof("event"):
        case "token":
            _take_token(response.token, generation, wanted)
            return False
        case "prompt":
            _take_prompt(response.prompt, generation, wanted)
            return False
        case "finished":
            _take_finished(response.finished, generation)
            return all(output.finish is not None for output in generation.outputs)
        case "error":
            generation.error = response.error
            assert response.error.code != pb.ERROR_CODE_UNSPECIFIED
            return True
        case other:
            raise AssertionError(f"an aggregated engine sent the event {other}")


def _take_prompt(
    event: pb.PromptOutput, generation: Generation, wanted: pb.ResponseOptions
) -> None:
    assert wanted.return_prompt_logprobs or wanted.HasField("prompt_candidates")
    assert generation.prompt is None, "a second prompt event"
    assert not any(output.deltas or output.finish for output in generation.outputs)
    generation.prompt = event
    for position, token in enumerate(event.tokens, wanted.prompt_logprob_start):
        scored = position > 0
        assert token.HasField("logprob") == token.HasField("rank") == scored
        _check_candidates(token, wanted.prompt_candidates, scored=scored)


def _check_candidates(
    token: pb.TokenInfo, wanted: pb.CandidateTokenSelection, *, scored: bool
) -> None:
    ids = [candidate.token_id for candidate in token.candidates]
    ranks = [candidate.rank for candidate in token.candidates if candidate.HasField("rank")]
    kind = wanted.WhichOneof("selection")
    if kind is None or not scored:
        assert not ids
    elif kind == "token_ids":
        assert [token_id for token_id in wanted.token_ids.ids if token_id in ids] == ids
    else:
        assert len(set(ids)) == len(ids)
        assert ranks == list(range(1, len(ids) + 1))
        assert kind != "top_n" or len(ids) <= wanted.top_n
        logprobs = [candidate.logprob for candidate in token.candidates]
        assert logprobs == sorted(logprobs, reverse=True)
        if token.token_id in ids:
            same = token.candidates[ids.index(token.token_id)]
            assert same.logprob == token.logprob


def _take_token(event: pb.TokenOutput, generation: Generation, wanted: pb.ResponseOptions) -> None:
    assert event.HasField("output_index")
    output = generation.outputs[event.output_index]
    assert output.finish is None, f"output {event.output_index} went on after its end"
    assert event.tokens or event.text, "an event with neither a token nor text"
    output.deltas.append(event)
    output.text += event.text
    for token in event.tokens:
        scored = wanted.return_output_logprobs or wanted.HasField("output_candidates")
        assert token.HasField("logprob") == token.HasField("rank") == scored
        _check_candidates(token, wanted.output_candidates, scored=scored)
        output.records.append(token)
        output.token_ids.append(token.token_id)
        output.pieces.append(token.token)


def _take_finished(event: pb.GenerationFinished, generation: Generation) -> None:
    assert event.HasField("output_index")
    output = generation.outputs[event.output_index]
    assert output.finish is None, f"output {event.output_index} finished twice"
    assert event.reason != pb.FINISH_REASON_UNSPECIFIED
    output.finish = pb.FinishReason.Name(event.reason).removeprefix("FINISH_REASON_")
    assert event.HasField("stop_match") == (output.finish == "STOP")
    kind = event.stop_match.WhichOneof("match")
    assert (kind is not None) == (output.finish == "STOP")
    if kind is not None:
        output.stop_match = (kind, getattr(event.stop_match, kind))


def _check_usage(generation: Generation, reasoning: bool) -> None:
    usage = generation.usage
    assert usage is not None
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens >= sum(len(output.token_ids) for output in generation.outputs)
    assert usage.cached_prompt_tokens <= usage.prompt_tokens
    assert usage.HasField("reasoning_tokens") == reasoning, "told with a reasoning parser alone"
    assert usage.reasoning_tokens <= usage.completion_tokens

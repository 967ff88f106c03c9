"""What a Generate stream means, put together: text as it comes, and whole completions.

The contract streams records of tokens for several outputs at once. Both readers here follow
its rules, so a stream that breaks them is an error and never a short answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError


class RequestFailed(OpenEngineError):
    """An error of a request that had been accepted: the last event of its stream.

    `usage` is what it cost up to then, where the server says so. A plain `OpenEngineError`
    means that the request was rejected, or that the connection broke.
    """

    usage: pb.Usage | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one output, and the tokens that it consists of."""

    index: int
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputFinished:
    """The end of one output; the last one of a request has the usage of all of them."""

    index: int
    reason: pb.FinishReason.ValueType
    stop_match: pb.StopMatch | None
    usage: pb.Usage | None

    @property
    def reason_name(self) -> str:
        """`stop`, `length` or `cancelled`."""
        return reason_name(self.reason)


@dataclass(slots=True)
class Output:
    """One of the sequences of a completion."""

    index: int
    text: str = ""
    tokens: list[pb.TokenInfo] = field(default_factory=list)
    finish_reason: pb.FinishReason.ValueType | None = None
    message: str = ""
    stop_match: pb.StopMatch | None = None

    @property
    def token_ids(self) -> list[int]:
        """The ids of the tokens that were generated."""
        return [token.token_id for token in self.tokens]

    @property
    def reason_name(self) -> str:
        """`stop`, `length` or `cancelled`."""
        return "" if self.finish_reason is None else reason_name(self.finish_reason)


@dataclass(slots=True)
class Completion:
    """Everything that a Generate request gave."""

    request_id: str
    outputs: list[Output] = field(default_factory=list)
    prompt: list[pb.TokenInfo] = field(default_factory=list)
    """The prompt's tokens, if the request asked for them."""
    kv_session: pb.KvSessionRef | None = None
    """What a prefill engine hands to a decode engine."""
    usage: pb.Usage | None = None

    @property
    def text(self) -> str:
        """The text of the only output. Raises ValueError when there are others."""
        [output] = self.outputs
        return output.text


class Collector:
    """Adds up the responses to one request with `sequences` outputs."""

    def __init__(self, request_id: str, sequences: int) -> None:
        self._completion = Completion(request_id, [Output(index) for index in range(sequences)])

    @classmethod
    def for_request(cls, request: pb.GenerateRequest) -> Self:
        """A collector for a request's own number of outputs."""
        given = request.sampling.HasField("num_sequences")
        return cls(request.request_id, request.sampling.num_sequences if given else 1)

    def add(self, response: pb.GenerateResponse) -> None:
        """Takes the next response. Raises OpenEngineError for one that can't be next."""
        completion = self._completion
        match response.WhichOneof("event"):
            case "prompt":
                completion.prompt.extend(response.prompt.tokens)
            case "token":
                output = self._open_output(response.token.output_index)
                output.text += response.token.text
                output.tokens.extend(response.token.tokens)
            case "finished":
                output = self._open_output(response.finished.output_index)
                output.finish_reason = response.finished.reason
                output.message = response.finished.message
                output.stop_match = _stop_match(response.finished)
            case "prefill_ready":
                completion.kv_session = response.prefill_ready.kv_session
                completion.outputs.clear()
        if response.HasField("usage"):
            completion.usage = response.usage

    def result(self) -> Completion:
        """The completion. Raises OpenEngineError when the stream ended before an output did."""
        for output in self._completion.outputs:
            if output.finish_reason is None:
                raise _broken(f"the stream ended before output {output.index} did")
        return self._completion

    def _open_output(self, index: int) -> Output:
        if index >= len(self._completion.outputs):
            raise _broken(f"the server sent output {index}, which was not asked for")
        output = self._completion.outputs[index]
        if output.finish_reason is not None:
            raise _broken(f"the server went on with output {index} after its end")
        return output


def text_items(response: pb.GenerateResponse) -> Iterator[TextDelta | OutputFinished]:
    """The text or the end that one response holds, if any."""
    if response.HasField("token"):
        token = response.token
        ids = tuple(info.token_id for info in token.tokens)
        yield TextDelta(token.output_index, token.text, ids)
    elif response.HasField("finished"):
        finished = response.finished
        usage = response.usage if response.HasField("usage") else None
        yield OutputFinished(finished.output_index, finished.reason, _stop_match(finished), usage)


def reason_name(reason: pb.FinishReason.ValueType) -> str:
    """`stop`, `length` or `cancelled`; a number that this revision doesn't know stays one."""
    if reason in pb.FinishReason.values():
        return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
    return str(reason)


def _stop_match(finished: pb.GenerationFinished) -> pb.StopMatch | None:
    return finished.stop_match if finished.HasField("stop_match") else None


def _broken(message: str) -> OpenEngineError:
    return OpenEngineError(pb.ERROR_CODE_INTERNAL, message)

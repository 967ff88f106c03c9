"""Every request that the server has to turn away, as data: what is wrong with it, and what the
answer has to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from openengine_vllm.protocol import v1 as pb
from tests.support.models import VOCAB_SIZE

CONTEXT = 2048
LARGEST_UINT32 = 2**32 - 1

Change = Callable[[pb.GenerateRequest], object]


@dataclass(frozen=True)
class Rejection:
    """A change that makes a good request bad, and the answer to it.

    Attributes:
        field: the path of the field at fault.
        says: what is allowed, as a regular expression over the message.
    """

    name: str
    change: Change
    field: str | None
    says: str
    code: pb.ErrorCode.ValueType = pb.ERROR_CODE_INVALID_ARGUMENT
    status: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT


def good_request(request_id: str) -> pb.GenerateRequest:
    """A small request that succeeds."""
    return pb.GenerateRequest(
        request_id=request_id,
        model="tiny",
        token_ids=pb.TokenIds(ids=[20, 30, 40]),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingOptions(max_tokens=1),
    )


def unknown_field(number: int) -> bytes:
    """A field of a later revision on the wire: a varint under this number."""
    assert number < 2**11
    key = number << 3
    return bytes([key & 0x7F | 0x80, key >> 7, 1])


def _request_id(name: str, request_id: str) -> Rejection:
    return Rejection(
        f"request-id-{name}",
        lambda r: setattr(r, "request_id", request_id),
        "request_id",
        r"1 to 256 printable characters",
    )


def _number(name: str, value: float, allowed: str) -> Rejection:
    def change(request: pb.GenerateRequest) -> None:
        setattr(request.sampling, name, value)

    return Rejection(f"{name}={value}", change, f"sampling.{name}", allowed)


def _numbers(name: str, allowed: str, *values: float) -> list[Rejection]:
    not_finite = () if name == "top_k" else (math.nan, math.inf, -math.inf)
    return [_number(name, value, allowed) for value in (*values, *not_finite)]


def _ids(*ids: int) -> Change:
    return lambda r: r.token_ids.CopyFrom(pb.TokenIds(ids=ids))


def _stops(*conditions: pb.StopCondition) -> Change:
    return lambda r: r.stopping.conditions.extend(conditions)


def _merge(message: pb.GenerateRequest) -> Change:
    return lambda r: r.MergeFrom(message)


_VOCABULARY = f"0 to {VOCAB_SIZE - 1}"

_IDENTITY = [
    _request_id("missing", ""),
    _request_id("257-characters", "x" * 257),
    _request_id("newline", "a\nb"),
    _request_id("nul", "a\0b"),
    _request_id("invisible", "a\u200bb"),
    _request_id("lone-joiner", "\u2028"),
    Rejection(
        "model-unknown",
        lambda r: setattr(r, "model", "other"),
        "model",
        "'other'",
        pb.ERROR_CODE_MODEL_NOT_FOUND,
        grpc.StatusCode.NOT_FOUND,
    ),
    Rejection(
        "model-other-case",
        lambda r: setattr(r, "model", "Tiny"),
        "model",
        "'Tiny'",
        pb.ERROR_CODE_MODEL_NOT_FOUND,
        grpc.StatusCode.NOT_FOUND,
    ),
]

_INPUT = [
    Rejection("input-missing", lambda r: r.ClearField("token_ids"), "input", "prompt or token_ids"),
    Rejection("prompt-empty", lambda r: setattr(r, "prompt", ""), "prompt", "empty"),
    Rejection("ids-empty", _ids(), "token_ids.ids", "at least one"),
    Rejection("id-at-vocabulary", _ids(5, VOCAB_SIZE), "token_ids.ids", _VOCABULARY),
    Rejection("id-largest", _ids(LARGEST_UINT32, 5), "token_ids.ids", _VOCABULARY),
    Rejection("ids-fill-context", _ids(*[9] * CONTEXT), "token_ids.ids", f"{CONTEXT} tokens"),
    Rejection("ids-over-context", _ids(*[9] * 3 * CONTEXT), "token_ids.ids", f"{CONTEXT} tokens"),
    Rejection(
        "prompt-over-context",
        lambda r: setattr(r, "prompt", "word salad " * CONTEXT),
        "prompt",
        f"{CONTEXT} tokens",
    ),
    Rejection(
        "prompt-far-over-context",
        lambda r: setattr(r, "prompt", "\U0001f98a" * 400_000),
        "prompt",
        f"{CONTEXT} tokens",
    ),
]

_SAMPLING = [
    *_numbers("temperature", "0 to 2", -0.1, -1e-300, 2.0001),
    *_numbers("top_p", "above 0 and up to 1", 0.0, -0.5, 1.0001),
    *_numbers("top_k", "-1 or 0", -2, -(2**31)),
    *_numbers("min_p", "0 to 1", -0.1, 1.0001),
    *_numbers("frequency_penalty", "-2 to 2", -2.1, 2.1),
    *_numbers("presence_penalty", "-2 to 2", -2.1, 2.1),
    *_numbers("repetition_penalty", "above 0", 0.0, -1.0),
    _number("num_sequences", 0, "1 to 128"),
    _number("num_sequences", 129, "1 to 128"),
    _number("num_sequences", LARGEST_UINT32, "1 to 128"),
    Rejection(
        "num_sequences-greedy",
        lambda r: setattr(r.sampling, "num_sequences", 2),
        "sampling.num_sequences",
        "1 when temperature is 0",
    ),
]

_STOPPING = [
    Rejection(
        "max_tokens=0",
        lambda r: setattr(r.stopping, "max_tokens", 0),
        "stopping.max_tokens",
        "at least 1",
    ),
    Rejection(
        "min_tokens>max_tokens",
        lambda r: setattr(r.stopping, "min_tokens", 2),
        "stopping.min_tokens",
        r"max_tokens \(1\)",
    ),
    Rejection(
        "min_tokens>context",
        _merge(
            pb.GenerateRequest(
                stopping=pb.StoppingOptions(max_tokens=LARGEST_UINT32, min_tokens=CONTEXT)
            )
        ),
        "stopping.min_tokens",
        f"{CONTEXT - 1}",
    ),
    Rejection(
        "min_tokens>room",
        _merge(
            pb.GenerateRequest(
                stopping=pb.StoppingOptions(max_tokens=CONTEXT, min_tokens=CONTEXT - 2)
            )
        ),
        "stopping.min_tokens",
        f"{CONTEXT - 3} tokens",
    ),
    Rejection(
        "stops-257",
        _stops(*[pb.StopCondition(stop_token_id=9)] * 257),
        "stopping.conditions",
        "256",
    ),
    Rejection(
        "stop-bytes",
        _stops(*[pb.StopCondition(stop_text="ä" * 64)] * 129),
        "stopping.conditions",
        "16384",
    ),
    Rejection(
        "stop-text-empty",
        _stops(pb.StopCondition(stop_text="end"), pb.StopCondition(stop_text="")),
        "stopping.conditions[1].stop_text",
        "empty",
    ),
    Rejection(
        "stop-unset", _stops(pb.StopCondition()), "stopping.conditions[0]", "stop_text or stop_to"
    ),
    Rejection(
        "stop-id-at-vocabulary",
        _stops(pb.StopCondition(stop_token_id=VOCAB_SIZE)),
        "stopping.conditions[0].stop_token_id",
        _VOCABULARY,
    ),
]

_KV = [
    Rejection(
        "kv-session",
        lambda r: setattr(r.kv.session, "session_id", "s"),
        "kv.session",
        "AGGREGATED",
        pb.ERROR_CODE_ROLE_MISMATCH,
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    Rejection(
        "kv-session-empty",
        lambda r: r.kv.session.SetInParent(),
        "kv.session",
        "AGGREGATED",
        pb.ERROR_CODE_ROLE_MISMATCH,
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    Rejection(
        "kv-unknown-field", lambda r: r.kv.MergeFromString(unknown_field(99)), "kv", "revision"
    ),
    Rejection(
        "data_parallel_rank",
        lambda r: setattr(r.kv, "data_parallel_rank", 1),
        "kv.data_parallel_rank",
        "serves 0",
    ),
    Rejection(
        "data_parallel_rank-largest",
        lambda r: setattr(r.kv, "data_parallel_rank", LARGEST_UINT32),
        "kv.data_parallel_rank",
        "serves 0",
    ),
    Rejection(
        "cache_salt", lambda r: setattr(r.kv, "cache_salt", "ä" * 513), "kv.cache_salt", "1024"
    ),
]

_METADATA = [
    Rejection(
        "metadata-entries",
        lambda r: r.metadata.update({str(number): "" for number in range(65)}),
        "metadata",
        "64",
    ),
    Rejection(
        "metadata-bytes", lambda r: r.metadata.update({"k": "ä" * 8192}), "metadata", "16384"
    ),
]


def _unsupported(name: str, change: Change, field: str) -> Rejection:
    return Rejection(name, change, field, field, pb.ERROR_CODE_UNSUPPORTED_FEATURE)


def _candidates(
    direction: str, selection: pb.CandidateTokenSelection, field: str, allowed: str
) -> Rejection:
    value = " ".join(str(selection).split())[-20:]
    return Rejection(
        f"{direction}_candidates-{value or 'nothing'}",
        lambda r: getattr(r.response, f"{direction}_candidates").CopyFrom(selection),
        f"response.{direction}_candidates{field}",
        allowed,
    )


_Selection = pb.CandidateTokenSelection

_RESPONSE = [
    *(
        _candidates(direction, selection, field, allowed)
        for direction in ("prompt", "output")
        for selection, field, allowed in (
            (_Selection(), "", "top_n, token_ids or all"),
            (_Selection(top_n=0), ".top_n", "1 to 20"),
            (_Selection(top_n=21), ".top_n", "1 to 20"),
            (_Selection(top_n=2**32 - 1), ".top_n", "1 to 20"),
        )
    ),
    *(
        _candidates("output", _Selection(token_ids=pb.TokenIds(ids=ids)), ".token_ids.ids", allowed)
        for ids, allowed in (
            ([], "1 to 128"),
            (range(129), "1 to 128"),
            ([VOCAB_SIZE], str(VOCAB_SIZE - 1)),
            ([5, 2**32 - 1], str(VOCAB_SIZE - 1)),
        )
    ),
    Rejection(
        "prompt_logprob_start-behind-the-prompt",
        lambda r: r.response.MergeFrom(
            pb.ResponseOptions(return_prompt_logprobs=True, prompt_logprob_start=2**32 - 1)
        ),
        "response.prompt_logprob_start",
        "0 to ",
    ),
]


def _no_candidates(direction: str, selection: pb.CandidateTokenSelection) -> Rejection:
    kind = selection.WhichOneof("selection")
    return _unsupported(
        f"{direction}-{kind}",
        lambda r: getattr(r.response, f"{direction}_candidates").CopyFrom(selection),
        f"response.{direction}_candidates.{kind}",
    )


UNSUPPORTED = [
    _no_candidates("prompt", _Selection(token_ids=pb.TokenIds(ids=[1, 2]))),
    _no_candidates("prompt", _Selection(all=pb.AllCandidates())),
    _no_candidates("output", _Selection(all=pb.AllCandidates())),
    _unsupported(
        "guided-backend",
        lambda r: r.guided.MergeFrom(pb.GuidedDecoding(regex="a", backend="guidance")),
        "guided.backend",
    ),
    _unsupported(
        "media",
        lambda r: r.media.add(modality=pb.MODALITY_IMAGE, raw_bytes=b"\x89PNG"),
        "media",
    ),
    _unsupported("media-empty", lambda r: r.media.add(), "media"),
    _unsupported("lora_name", lambda r: setattr(r, "lora_name", "adapter"), "lora_name"),
    _unsupported("priority", lambda r: setattr(r, "priority", 1), "priority"),
    _unsupported("priority-lowest", lambda r: setattr(r, "priority", -(2**31)), "priority"),
]
"""Options of the contract that this server does not have."""

REJECTIONS = [
    *_IDENTITY,
    *_INPUT,
    *_SAMPLING,
    *_STOPPING,
    *_KV,
    *_METADATA,
    *_RESPONSE,
    *UNSUPPORTED,
]
"""All of them; names are unique."""

"""What a hostile client sends, as data: requests that are far too large, and numbers at the ends
of their ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from openengine_vllm.protocol import v1 as pb
from tests.engine.rejections import good_request

MIB = 1024 * 1024


@dataclass(frozen=True)
class Flood:
    """Requests that come all at once, and what is said to each."""

    name: str
    data: bytes
    count: int
    field: str | None
    code: pb.ErrorCode.ValueType = pb.ERROR_CODE_INVALID_ARGUMENT

    def messages(self) -> Iterator[bytes]:
        """The requests; those that can be read have ids of their own."""
        for number in range(self.count):
            own = pb.GenerateRequest(request_id=f"{self.name}-{number}").SerializeToString()
            yield self.data if self.field in (None, "request_id") else self.data + own


def _flood(
    name: str,
    field: str,
    message: pb.GenerateRequest,
    code: pb.ErrorCode.ValueType = pb.ERROR_CODE_INVALID_ARGUMENT,
    count: int = 10,
) -> Flood:
    request = good_request(name)
    request.MergeFrom(message)
    return Flood(name, request.SerializeToString(), count, field, code)


def _stops(texts: Sequence[str]) -> pb.GenerateRequest:
    conditions = [pb.StopCondition(stop_text=text) for text in texts]
    return pb.GenerateRequest(stopping=pb.StoppingOptions(conditions=conditions))


def _ids(count: int) -> pb.TokenIds:
    return pb.TokenIds(ids=[20 + number % 1000 for number in range(count)])


LARGE = "x" * MIB
"""A text of a mebibyte."""


def floods() -> Iterator[Flood]:
    yield _flood("stop-texts", "stopping.conditions", _stops([f"{n} " * 9 for n in range(5000)]))
    yield _flood("stop-text", "stopping.conditions", _stops([LARGE]))
    yield _flood("request-id", "request_id", pb.GenerateRequest(request_id=LARGE))
    yield _flood("model", "model", pb.GenerateRequest(model=LARGE), pb.ERROR_CODE_MODEL_NOT_FOUND)
    yield _flood(
        "lora-name",
        "lora_name",
        pb.GenerateRequest(lora_name=LARGE),
        pb.ERROR_CODE_UNSUPPORTED_FEATURE,
    )
    yield _flood(
        "media",
        "media",
        pb.GenerateRequest(media=[pb.MediaItem(raw_bytes=b"\xff" * 4 * MIB)]),
        pb.ERROR_CODE_UNSUPPORTED_FEATURE,
    )
    yield _flood("metadata-value", "metadata", pb.GenerateRequest(metadata={"k": LARGE}))
    yield _flood(
        "metadata-entries",
        "metadata",
        pb.GenerateRequest(metadata={str(n): "" for n in range(100_000)}),
    )
    salt = pb.KvOptions(cache_salt=LARGE)
    yield _flood("cache-salt", "kv.cache_salt", pb.GenerateRequest(kv=salt))
    yield _flood("token-ids", "token_ids.ids", pb.GenerateRequest(token_ids=_ids(1_000_000)))
    yield _flood("words", "prompt", pb.GenerateRequest(prompt="word " * (4 * MIB // 5)))
    yield _flood("one-word", "prompt", pb.GenerateRequest(prompt="a" * 4 * MIB))
    candidates = pb.CandidateTokenSelection(token_ids=_ids(1_000_000))
    yield _flood(
        "candidates",
        "response.output_candidates.token_ids.ids",
        pb.GenerateRequest(response=pb.ResponseOptions(output_candidates=candidates)),
    )
    choice = pb.ChoiceConstraint(choices=map(str, range(100_000)))
    for guide, field in (
        (pb.GuidedDecoding(json_schema='{"items":' * 25_000), "guided.json_schema"),
        (pb.GuidedDecoding(structural_tag="[" * 250_000), "guided.structural_tag"),
        (pb.GuidedDecoding(regex="(" * MIB), "guided.regex"),
        (pb.GuidedDecoding(choice=choice), "guided.choice.choices"),
    ):
        yield _flood(field, field, pb.GenerateRequest(guided=guide))
    tiny = pb.GenerateRequest(sampling=pb.SamplingParams(top_p=2.0))
    yield _flood("tiny", "sampling.top_p", tiny, count=10_000)
    yield Flood("nested", _nested_lists(10_000), 100, None)
    yield Flood("garbage", b"\xff" * 4 * MIB, 10, None)


def _nested_lists(depth: int) -> bytes:
    """A request whose `kv.session.attributes_struct` holds lists in lists, past all reason."""
    way = [
        pb.GenerateRequest.DESCRIPTOR.fields_by_name["kv"],
        pb.KvOptions.DESCRIPTOR.fields_by_name["session"],
        pb.KvSessionRef.DESCRIPTOR.fields_by_name["attributes_struct"],
        pb.Struct.DESCRIPTOR.fields_by_name["fields"],
        pb.Struct.FieldsEntry.DESCRIPTOR.fields_by_name["value"],
        *(
            pb.Value.DESCRIPTOR.fields_by_name["list_value"],
            pb.ListValue.DESCRIPTOR.fields_by_name["values"],
        )
        * depth,
    ]
    data = b""
    for field in reversed(way):
        data = _varint(field.number << 3 | 2) + _varint(len(data)) + data
    return data


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


_FLOATS = (
    *(math.nan, math.inf, -math.inf, -0.0, 5e-324, -5e-324, 1e-45, 2.0**-126),
    *(-3.4e38, 3.4e38, -1.7e308, 1.7e308),
)
_EXTREMES: dict[int, tuple[float, ...]] = {
    FieldDescriptor.TYPE_INT32: (-(2**31), -1, 0, 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_DOUBLE: _FLOATS,
    FieldDescriptor.TYPE_FLOAT: _FLOATS[:10],
    FieldDescriptor.TYPE_BOOL: (False, True),
}


@dataclass(frozen=True)
class Number:
    """A number of a request, at an end of its range.

    Attributes:
        part: the message of the request that it is in; empty for the request itself.
    """

    part: str
    name: str
    value: float

    @property
    def path(self) -> str:
        """The path of the field."""
        return f"{self.part}.{self.name}" if self.part else self.name

    def set_in(self, request: pb.GenerateRequest) -> None:
        """Give the field this value."""
        setattr(getattr(request, self.part) if self.part else request, self.name, self.value)


def numbers() -> Iterator[list[Number]]:
    """The values to try of every number that a request has outside lists and choices."""
    for part in ("", "sampling", "stopping", "response", "kv"):
        request = pb.GenerateRequest()
        message: Message = getattr(request, part) if part else request
        for field in message.DESCRIPTOR.fields:
            if field.type in _EXTREMES and not field.is_repeated:
                yield [Number(part, field.name, value) for value in _EXTREMES[field.type]]

"""GenerateResponse messages as bytes, with all that does not change in a stream done once.

A streamed token costs one small message, so this is the hottest code of the server: building
a token's message from generated classes takes longer than decoding its text. TokenOutput is
therefore put together from serialised parts, most of them kept from earlier tokens; the rest
uses the generated classes. Both revisions of the schema give these events the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from google.protobuf.descriptor import FieldDescriptor

from openengine_vllm.protocol import v1 as pb

_LENGTH_DELIMITED = 2
_KEPT = 1 << 16
"""Events of a single token whose encoding is kept: some 20 MB at the most."""
_LONGEST_KEPT = 64
"""Characters of the text of a kept event."""


class TokenRecord(Protocol):
    """What a TokenInfo is made from."""

    @property
    def token_id(self) -> int: ...
    @property
    def text(self) -> str: ...


class GenerationEncoder:
    """Serialises the events of one Generate stream."""

    __slots__ = ("_prefix", "_request_id")

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._prefix = pb.GenerateResponse(request_id=request_id).SerializeToString()

    def token(self, index: int, tokens: Sequence[TokenRecord], text: str) -> bytes:
        """A TokenOutput event."""
        if len(tokens) == 1 and len(text) <= _LONGEST_KEPT:
            return self._prefix + _single(index, tokens[0].token_id, tokens[0].text, text)
        records = b"".join([_token_info(token.token_id, token.text) for token in tokens])
        return self._prefix + _token_event(index, records, text)

    def finished(
        self,
        index: int,
        reason: pb.FinishReason.ValueType,
        stop_match: pb.StopMatch | None,
        usage: pb.Usage | None,
    ) -> bytes:
        """A GenerationFinished event; ``usage`` goes with the last one of the stream."""
        return pb.GenerateResponse(
            request_id=self._request_id,
            finished=pb.GenerationFinished(
                output_index=index, reason=reason, stop_match=stop_match
            ),
            usage=usage,
        ).SerializeToString()

    def error(self, error: pb.EngineError, usage: pb.Usage | None) -> bytes:
        """The terminal EngineError event."""
        return pb.GenerateResponse(
            request_id=self._request_id, error=error, usage=usage
        ).SerializeToString()


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _SHORT_VARINTS[value]
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_SHORT_VARINTS = tuple(bytes((value,)) for value in range(0x80))


def _tag(field: FieldDescriptor) -> bytes:
    return _varint(field.number << 3 | _LENGTH_DELIMITED)


_TOKEN_TAG = _tag(pb.GenerateResponse.DESCRIPTOR.fields_by_name["token"])
_RECORD_TAG = _tag(pb.TokenOutput.DESCRIPTOR.fields_by_name["tokens"])


@lru_cache(maxsize=_KEPT)
def _single(index: int, token_id: int, piece: str, text: str) -> bytes:
    return _token_event(index, _token_info(token_id, piece), text)


def _token_event(index: int, records: bytes, text: str) -> bytes:
    rest = pb.TokenOutput(output_index=index, text=text).SerializeToString()
    return _TOKEN_TAG + _varint(len(rest) + len(records)) + rest + records


def _token_info(token_id: int, piece: str) -> bytes:
    record = pb.TokenInfo(token_id=token_id, token=piece).SerializeToString()
    return _RECORD_TAG + _varint(len(record)) + record

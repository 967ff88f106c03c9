"""GenerateResponse messages as bytes, with all that does not change in a stream done once.

A streamed token costs one small message, so this is the hottest code of the server: building
a token's message from generated classes takes longer than decoding its text. TokenOutput is
therefore put together from serialised parts, most of them kept from earlier tokens; the rest
uses the generated classes. Both revisions of the schema give these events the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from google.protobuf.descriptor import FieldDescriptor

from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError, to_proto

_LENGTH_DELIMITED = 2
_KEPT = 1 << 16
"""Events of a single token whose encoding is kept: some 20 MB at the most."""
_LONGEST_KEPT = 64
"""Characters of the text of a kept event."""
_EVENT_OVERHEAD = 64
"""Bytes of a TokenOutput event besides its request id, records and text."""


class GenerationEncoder:
    """Serialises the events of one Generate stream.

    Args:
        most_bytes: of one event; a single record that passes them goes by itself.
        detailed_errors: whether an EngineError tells all there is to tell.
    """

    __slots__ = ("_detailed_errors", "_most_bytes", "_prefix", "_request_id")

    def __init__(self, request_id: str, most_bytes: int, *, detailed_errors: bool = True) -> None:
        self._request_id = request_id
        self._detailed_errors = detailed_errors
        self._most_bytes = most_bytes
        self._prefix = pb.GenerateResponse(request_id=request_id).SerializeToString()

    def token(self, index: int, token_id: int, piece: str, text: str) -> bytes:
        """A TokenOutput event of one token without scores; ``text`` is what the token adds."""
        if len(piece) <= _LONGEST_KEPT:
            return self._prefix + _single(index, token_id, piece, text)
        return self._prefix + _token_event(index, _framed(token_info(token_id, piece)), text)

    def tokens(self, index: int, records: Iterable[tuple[bytes, str]]) -> list[bytes]:
        """TokenOutput events of many tokens, as few as the limit on their size allows.

        Args:
            records: serialised TokenInfo messages, each with the text that its token adds.
        """
        events: list[bytes] = []
        parts: list[bytes] = []
        texts: list[str] = []
        room = allowed = self._most_bytes - len(self._prefix) - _EVENT_OVERHEAD
        for record, text in records:
            part = _framed(record)
            size = len(part) + len(text.encode())
            if size > room and parts:
                events.append(self._prefix + _token_event(index, b"".join(parts), "".join(texts)))
                parts, texts, room = [], [], allowed
            parts.append(part)
            texts.append(text)
            room -= size
        if parts:
            events.append(self._prefix + _token_event(index, b"".join(parts), "".join(texts)))
        return events

    def prompt(self, records: Iterable[bytes]) -> bytes:
        """The PromptOutput event, of serialised TokenInfo messages."""
        framed = b"".join([_framed(record, _PROMPT_RECORD_TAG) for record in records])
        return self._prefix + _PROMPT_TAG + _varint(len(framed)) + framed

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

    def error(self, error: OpenEngineError, usage: pb.Usage | None) -> bytes:
        """The terminal EngineError event."""
        told = to_proto(error, detailed=self._detailed_errors)
        return pb.GenerateResponse(
            request_id=self._request_id, error=told, usage=usage
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
_PROMPT_TAG = _tag(pb.GenerateResponse.DESCRIPTOR.fields_by_name["prompt"])
_PROMPT_RECORD_TAG = _tag(pb.PromptOutput.DESCRIPTOR.fields_by_name["tokens"])


def token_info(token_id: int, text: str) -> bytes:
    """A TokenInfo without scores, serialised."""
    return pb.TokenInfo(token_id=token_id, token=text).SerializeToString()


@lru_cache(maxsize=_KEPT)
def _single(index: int, token_id: int, piece: str, text: str) -> bytes:
    return _token_event(index, _framed(token_info(token_id, piece)), text)


def _token_event(index: int, records: bytes, text: str) -> bytes:
    rest = pb.TokenOutput(output_index=index, text=text).SerializeToString()
    return _TOKEN_TAG + _varint(len(rest) + len(records)) + rest + records


def _framed(record: bytes, tag: bytes = _RECORD_TAG) -> bytes:
    return tag + _varint(len(record)) + record

"""The contract's batches as bytes, put together from parts that are serialised once.

A block's part serves in the live batch and in every snapshot that has the block, so nothing is
built as a message of its own. Field numbers come from the schema's descriptors.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

from google.protobuf.message import Message

from openengine_vllm.kv_events.decode import Hash
from openengine_vllm.protocol import v1 as pb

_VARINT, _BYTES = 0, 2
_MAX_KEPT_VARINT = 2**19
_MAX_KEY_DEPTH = 8
_MAX_KEYS_BYTES = 64 * 1024
_UINT64 = 2**64 - 1

Place: TypeAlias = tuple[pb.StorageMedium.ValueType, int]
"""Medium and group."""

_MEDIA = {
    "GPU": pb.STORAGE_MEDIUM_GPU,
    "CPU": pb.STORAGE_MEDIUM_CPU_PINNED,
    "CPU_PINNED": pb.STORAGE_MEDIUM_CPU_PINNED,
    "DISK": pb.STORAGE_MEDIUM_DISK,
    "STORAGE": pb.STORAGE_MEDIUM_DISK,
}


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


class _Varints(dict[int, bytes]):
    """The varint of each number; those of token ids and of lengths come again and again."""

    def __missing__(self, number: int) -> bytes:
        result = _varint(number)
        if number < _MAX_KEPT_VARINT:
            self[number] = result
        return result


varint: Final = _Varints().__getitem__
"""A number from 0 to 2**64 - 1 as protobuf writes it."""


def _tag(message: type[Message], field: str, kind: int) -> bytes:
    return varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | kind)


_RESPONSE_BATCH = _tag(pb.SubscribeKvEventsResponse, "batch", _BYTES)
_BATCH_SEQUENCE = _tag(pb.KvEventBatch, "sequence_number", _VARINT)
_BATCH_TIME = _tag(pb.KvEventBatch, "timestamp_unix_nanos", _VARINT)
_BATCH_RANK = _tag(pb.KvEventBatch, "data_parallel_rank", _VARINT)
_BATCH_EVENT = _tag(pb.KvEventBatch, "events", _BYTES)
_EVENT_STORED = _tag(pb.KvEvent, "block_stored", _BYTES)
_EVENT_REMOVED = _tag(pb.KvEvent, "block_removed", _BYTES)
_STORED_HASH = _tag(pb.BlockStored, "block_hashes", _BYTES)
_STORED_PARENT = _tag(pb.BlockStored, "parent_block_hash", _BYTES)
_STORED_TOKENS = _tag(pb.BlockStored, "token_ids", _BYTES)
_STORED_KEYS = _tag(pb.BlockStored, "extra_keys", _BYTES)
_REMOVED_HASH = _tag(pb.BlockRemoved, "block_hashes", _BYTES)
_HASH_VALUE = _tag(pb.KvBlockHash, "value", _BYTES)
_HASH_ENCODING = _tag(pb.KvBlockHash, "encoding", _BYTES)


def _delimited(tag: bytes, data: bytes) -> bytes:
    return tag + varint(len(data)) + data


_INT64_HEAD = _HASH_VALUE + varint(8)
_INT64_TAIL = _delimited(_HASH_ENCODING, b"int64")
_INT64_HEAD = varint(len(_INT64_HEAD) + 8 + len(_INT64_TAIL)) + _INT64_HEAD
_BYTES_TAIL = _delimited(_HASH_ENCODING, b"bytes")

ALL_BLOCKS_CLEARED: Final = _delimited(
    _BATCH_EVENT, pb.KvEvent(all_blocks_cleared=pb.AllBlocksCleared()).SerializeToString()
)
"""The event that empties a rank, as part of a batch."""


def medium(name: str | None) -> pb.StorageMedium.ValueType:
    """Where blocks lie, in the contract's terms."""
    if name is None:
        return pb.STORAGE_MEDIUM_UNSPECIFIED
    return _MEDIA.get(name.upper(), pb.STORAGE_MEDIUM_EXTERNAL)


def block_hash(value: Hash) -> bytes:
    """A KvBlockHash with its length in front, ready for any field of that type.

    Both ways to write an integer of 64 bits, with and without a sign, give the same.
    """
    if isinstance(value, int):
        return _INT64_HEAD + (value & _UINT64).to_bytes(8, "big") + _INT64_TAIL
    encoded = _delimited(_HASH_VALUE, value) + _BYTES_TAIL
    return varint(len(encoded)) + encoded


def tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids, packed; parts may be joined."""
    return b"".join(map(varint, token_ids))


@lru_cache(1024)
def common_fields(
    block_size: int,
    lora_id: int | None,
    lora_name: str | None,
    medium_name: str | None,
    group: int | None,
    kind: str | None,
    window: int | None,
) -> tuple[Place, bytes]:
    """Where all blocks of a stored event lie, and the fields that they share."""
    place = medium(medium_name), group or 0
    fields = pb.BlockStored(
        block_size=block_size,
        lora_id=lora_id or 0,
        lora_name=lora_name or "",
        medium=place[0],
        group_idx=place[1],
        kv_cache_spec_kind=kind or "",
        kv_cache_spec_sliding_window=window or 0,
    )
    return place, fields.SerializeToString()


@lru_cache(1024)
def _removed_fields(where: pb.StorageMedium.ValueType, group: int) -> bytes:
    return pb.BlockRemoved(medium=where, group_idx=group).SerializeToString()


def stored(
    hashes: Sequence[bytes], parent: bytes | None, packed: bytes, common: bytes, keys: bytes
) -> bytes:
    """A chain of stored blocks as part of a batch.

    Args:
        hashes: of the blocks, by :func:`block_hash`.
        parent: of the first block, likewise; None where a sequence begins.
        packed: by :func:`tokens`.
        common: by :func:`common_fields`.
        keys: joined results of :func:`extra_keys`.
    """
    front = _STORED_HASH + _STORED_HASH.join(hashes)
    if parent is not None:
        front += _STORED_PARENT + parent
    front += _STORED_TOKENS + varint(len(packed))
    size = len(front) + len(packed) + len(common) + len(keys)
    head = _EVENT_STORED + varint(size)
    return b"".join((_BATCH_EVENT, varint(len(head) + size), head, front, packed, common, keys))


def parent_of(event: bytes) -> bytes:
    """What :func:`stored` was given as parent, together with one hash; empty for none."""
    start = _behind_varint(event, len(_BATCH_EVENT))
    start = _behind_varint(event, start + len(_EVENT_STORED))
    start += len(_STORED_HASH)
    start += 1 + event[start]
    if not event.startswith(_STORED_PARENT, start):
        return b""
    start += len(_STORED_PARENT)
    return event[start : start + 1 + event[start]]


def removed(hashes: Sequence[bytes], where: pb.StorageMedium.ValueType, group: int) -> bytes:
    """Removed blocks as part of a batch; hashes by :func:`block_hash`."""
    fields = _REMOVED_HASH + _REMOVED_HASH.join(hashes) + _removed_fields(where, group)
    return _delimited(_BATCH_EVENT, _delimited(_EVENT_REMOVED, fields))


def extra_keys(values: Sequence[Any] | None) -> bytes:
    """One block's extra keys as part of a stored event; an empty tuple for none.

    Raises:
        ValueError: values that no JSON can stand for, nested too deep, or too large.
    """
    if not values:
        return _NO_KEYS
    texts = tuple(map(_json, values))
    if sum(map(len, texts)) > _MAX_KEYS_BYTES:
        raise ValueError("too large")
    return _key_tuple(texts)


@lru_cache(256)
def _key_tuple(values: tuple[str, ...]) -> bytes:
    return _delimited(_STORED_KEYS, pb.OpaqueKeyTuple(values=values).SerializeToString())


_NO_KEYS = _key_tuple(())


def _json(value: Any) -> str:
    return json.dumps(_plain(value, 0), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _plain(value: Any, depth: int) -> Any:
    if depth > _MAX_KEY_DEPTH:
        raise ValueError("nested too deep")
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes):
        return {"b64": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    raise ValueError(f"a {type(value).__name__} among extra keys")


def batch(number: int, time_ns: int, rank: int, events: Sequence[bytes]) -> bytes:
    """A KvEventBatch."""
    # Its number never comes again: the table would keep half a million of them.
    return (
        _BATCH_SEQUENCE
        + _varint(number)
        + _BATCH_TIME
        + _varint(time_ns)
        + _BATCH_RANK
        + varint(rank)
        + b"".join(events)
    )


def response(batch_bytes: bytes) -> bytes:
    """A SubscribeKvEventsResponse that holds a batch."""
    return _RESPONSE_BATCH + varint(len(batch_bytes)) + batch_bytes


def batch_of(response_bytes: bytes) -> bytes:
    """The batch inside of what :func:`response` has made."""
    return response_bytes[_behind_varint(response_bytes, len(_RESPONSE_BATCH)) :]


def _behind_varint(data: bytes, start: int) -> int:
    while data[start] > 0x7F:
        start += 1
    return start + 1

"""vLLM's msgpack batches, checked and typed.

What arrives is untrusted. The payload's size is bounded first; every length in it is held
against the bytes that are there, before anything is allocated for it. One event that is wrong
does not spoil its batch: it is left out and counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
"""Largest batch that is looked at."""
MAX_EVENTS = 65_536
"""Most events in one batch."""
MAX_HASH_BYTES = 64
"""Longest block hash."""
MAX_BLOCK_SIZE = 65_536
"""Most tokens in a block."""
MAX_NAME_LENGTH = 1024
"""Longest adapter name, medium and kind of attention, in characters."""

_MAX_TIME_SECONDS = 2**63 / 1e9
_NANOS = 1_000_000_000

_Uint32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_SIZE)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)]
Hash: TypeAlias = int | bytes
"""A block's hash: an integer of 64 bits, or bytes."""
_Hash: TypeAlias = int | Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_HASH_BYTES)]
_ExtraKeys: TypeAlias = list[list[Any] | None] | None


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """A chain of blocks that can be reused from now on."""

    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[_Uint32]
    block_size: _Size
    lora_id: _Int64 | None = None
    medium: _Name | None = None
    lora_name: _Name | None = None
    extra_keys: _ExtraKeys = None
    group_idx: _Uint32 | None = None
    kv_cache_spec_kind: _Name | None = None
    kv_cache_spec_sliding_window: _Uint32 | None = None


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """Copies of blocks that are gone."""

    block_hashes: list[_Hash]
    medium: _Name | None = None
    group_idx: _Uint32 | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The rank's cache is empty."""


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[_Uint32]
    block_size: _Size
    lora_id: _Int64 | None = None
    medium: _Name | None = None
    lora_name: _Name | None = None
    extra_keys: _ExtraKeys = None
    group_idx: _Uint32 | None = None
    kv_cache_spec_kind: _Name | None = None
    kv_cache_spec_sliding_window: _Uint32 | None = None


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[_Hash]
    medium: _Name | None = None
    group_idx: _Uint32 | None = None


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
STORED = (BlockStored, _StoredArray)
REMOVED = (BlockRemoved, _RemovedArray)
KINDS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


class _Maps(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class _Arrays(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


class _Loose(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _MapKind(msgspec.Struct):
    type: str


class _ArrayKind(msgspec.Struct, array_like=True):
    type: str


_read_maps = msgspec.msgpack.Decoder(_Maps).decode
_read_arrays = msgspec.msgpack.Decoder(_Arrays).decode
_read_loose = msgspec.msgpack.Decoder(_Loose).decode
_read_map = msgspec.msgpack.Decoder(Event).decode
_read_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode
_read_map_kind = msgspec.msgpack.Decoder(_MapKind).decode
_read_array_kind = msgspec.msgpack.Decoder(_ArrayKind).decode


class UndecodableError(Exception):
    """The payload is no batch of events."""


@dataclass(slots=True)
class Batch:
    """What one scheduler step did to the cache, as far as it can be understood."""

    time_ns: int
    """Nanoseconds since 1970; 0 for a time that cannot be."""
    rank: int | None
    """The data-parallel rank that the publisher names."""
    events: list[Any]
    """Instances of :data:`STORED` and :data:`REMOVED`; whatever else is a clear."""
    malformed: int = 0
    """Events left out because they are not what they say."""
    unknown: int = 0
    """Events left out because their kind is not known here."""


def decode(payload: bytes) -> Batch:
    """Read one batch, in the layout of any supported vLLM.

    Raises:
        UndecodableError: too large, not msgpack, nested too deep, or no batch.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise UndecodableError(f"{len(payload)} bytes, over {MAX_PAYLOAD_BYTES}")
    try:
        batch = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise UndecodableError(f"{type(error).__name__}: {str(error)[:100]}") from None
    if len(batch.events) > MAX_EVENTS:
        raise UndecodableError(f"{len(batch.events)} events, over {MAX_EVENTS}")
    _leave_out_inconsistent(batch)
    return batch


def _decode(payload: bytes) -> Batch:
    read: _Maps | _Arrays
    try:
        read = _read_maps(payload)
    except msgspec.ValidationError:
        try:
            read = _read_arrays(payload)
        except msgspec.ValidationError:
            return _decode_each(payload)
    return Batch(_nanos(read.ts), read.data_parallel_rank, read.events)


def _decode_each(payload: bytes) -> Batch:
    read = _read_loose(payload)
    batch = Batch(_nanos(read.ts), read.data_parallel_rank, [])
    if len(read.events) > MAX_EVENTS:
        raise UndecodableError(f"{len(read.events)} events, over {MAX_EVENTS}")
    for raw in read.events:
        is_array = _is_array(memoryview(raw)[0])
        try:
            batch.events.append(_read_array(raw) if is_array else _read_map(raw))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if _has_unknown_kind(raw, is_array):
                batch.unknown += 1
            else:
                batch.malformed += 1
    return batch


def _is_array(first: int) -> bool:
    return first in (0xDC, 0xDD) or 0x90 <= first <= 0x9F


def _has_unknown_kind(raw: msgspec.Raw, is_array: bool) -> bool:
    try:
        kind = _read_array_kind(raw).type if is_array else _read_map_kind(raw).type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return kind not in KINDS


def _leave_out_inconsistent(batch: Batch) -> None:
    wrong = [
        index
        for index, event in enumerate(batch.events)
        if isinstance(event, STORED) and not _is_consistent(event)
    ]
    for index in reversed(wrong):
        del batch.events[index]
    batch.malformed += len(wrong)


def _is_consistent(event: Any) -> bool:
    blocks = len(event.block_hashes)
    keys = event.extra_keys
    return len(event.token_ids) == blocks * event.block_size and (
        keys is None or len(keys) == blocks
    )


def _nanos(seconds: float) -> int:
    if not (math.isfinite(seconds) and 0 <= seconds < _MAX_TIME_SECONDS):
        return 0
    # In two parts: a product of this size would be off by up to 128 ns.
    whole = int(seconds)
    return whole * _NANOS + round((seconds - whole) * _NANOS)

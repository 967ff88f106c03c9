"""Batches of all layouts, and what is no batch."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

from openengine_vllm.kv_events.decode import (
    MAX_EVENTS,
    MAX_HASH_BYTES,
    MAX_PAYLOAD_BYTES,
    UndecodableError,
    decode,
)
from tests.support.kv_messages import CLEARED, payload, removed, stored

FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)


def as_array(event: dict[str, Any], length: int | None = None) -> list[Any]:
    """An event as older publishers wrote it, with this many fields."""
    fields = FIELDS if event["type"] == "BlockStored" else ("block_hashes", "medium", "group_idx")
    values = [] if event is CLEARED else [event.get(field) for field in fields]
    return [event["type"], *values[:length]]


STORED = stored([7, 2**64 - 1], parent=5, lora_id=3, lora_name="ad", extra_keys=[["ad"], ["ad"]])


def values(event: Any) -> list[Any]:
    return [getattr(event, field) for field in FIELDS]


def test_both_layouts_say_the_same() -> None:
    maps = decode(payload(STORED, removed([1]), CLEARED, ts=1700000000.25, rank=3))
    arrays = decode(payload(as_array(STORED), as_array(removed([1])), as_array(CLEARED), rank=3))
    mixed = decode(payload(as_array(STORED), removed([1]), CLEARED))
    assert maps.time_ns == 1700000000_250000000
    assert maps.rank == arrays.rank == 3
    assert values(maps.events[0]) == values(arrays.events[0]) == values(mixed.events[0])
    for batch in (maps, arrays, mixed):
        assert [len(getattr(event, "block_hashes", ())) for event in batch.events] == [2, 1, 0]
        assert (batch.malformed, batch.unknown) == (0, 0)


@pytest.mark.parametrize("length", range(4, len(FIELDS)))
def test_fewer_trailing_fields(length: int) -> None:
    [event] = decode(payload(as_array(STORED, length))).events
    assert values(event)[:length] == values(decode(payload(STORED)).events[0])[:length]
    assert values(event)[length:] == [None] * (len(FIELDS) - length)
    fields = {key: STORED[key] for key in ("type", *FIELDS[:length])}
    [same] = decode(payload(fields)).events
    assert values(same) == values(event)


def test_more_trailing_fields() -> None:
    [array] = decode(payload([*as_array(STORED), "LOCAL", None, {"more": 1}])).events
    [mapped] = decode(payload({**STORED, "locality": "LOCAL", "future": [1, {"x": b"y"}]})).events
    assert values(array) == values(mapped) == values(decode(payload(STORED)).events[0])
    whole = msgspec.msgpack.encode([1.0, [STORED], 0, "future"])
    assert len(decode(whole).events) == 1
    assert decode(msgspec.msgpack.encode([1.0, []])).rank is None


def test_hashes_may_be_bytes() -> None:
    [event] = decode(payload(stored([b"a" * 32], parent=b"b" * 32))).events
    assert event.block_hashes == [b"a" * 32]
    assert event.parent_block_hash == b"b" * 32


@pytest.mark.parametrize(
    "wrong",
    [
        stored([1], tokens=[1, 2, 3]),
        stored([1, 2], tokens=[1, 2, 3, 4]),
        stored([1], extra_keys=[]),
        stored([1], tokens=[1, 2, 3, -1]),
        stored([1], tokens=[1, 2, 3, 2**32]),
        stored([1], tokens=[1, 2, 3, True]),
        stored([1.5], tokens=[1, 2, 3, 4]),  # type: ignore[list-item]
        stored([b"x" * (MAX_HASH_BYTES + 1)]),
        stored([1], block_size=0),
        stored([1], block_size=2**40),
        stored([1], group_idx=-1),
        stored([1], lora_id=2**63),
        stored([1], lora_name="x" * 2000),
        {"type": "BlockStored"},
        {"type": 5},
        {},
        ["BlockStored", [1]],
        [],
        5,
        None,
        "BlockRemoved",
        removed(["x"]),  # type: ignore[list-item]
    ],
)
def test_a_malformed_event_is_left_out_alone(wrong: Any) -> None:
    batch = decode(payload(stored([1]), wrong, removed([2])))
    assert (len(batch.events), batch.malformed, batch.unknown) == (2, 1, 0)


def test_unknown_kinds_are_counted_apart() -> None:
    batch = decode(payload(stored([1]), {"type": "Future", "x": 1}, ["Other", 1], CLEARED))
    assert (len(batch.events), batch.malformed, batch.unknown) == (2, 0, 2)


@pytest.mark.parametrize("ts", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_time_that_cannot_be(ts: float) -> None:
    assert decode(payload(CLEARED, ts=ts)).time_ns == 0


@pytest.mark.parametrize(
    "rubbish",
    [
        b"",
        b"\x00",
        b"rubbish",
        pickle.dumps([1.0, [], 0]),
        payload(stored([1]))[:-1],
        payload(stored([1])) + b"\x00",
        b"\x91" * 10_000_000,
        b"\x81\xa1x" * 3_000_000,
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\xdd\x0f\xff\xff\xff" * 1000,
        msgspec.msgpack.encode({"ts": 1.0, "events": []}),
        msgspec.msgpack.encode([1.0, {}, 0]),
        msgspec.msgpack.encode([1.0, [CLEARED] * (MAX_EVENTS + 1), 0]),
        msgspec.msgpack.encode([1.0, [5] * (MAX_EVENTS + 1), 0]),
        msgspec.msgpack.encode([1.0, [], "0"]),
        bytes(MAX_PAYLOAD_BYTES + 1),
    ],
    ids=lambda data: f"{data[:6].hex()}-{len(data)}",
)
def test_no_batch(rubbish: bytes) -> None:
    with pytest.raises(UndecodableError):
        decode(rubbish)


def test_nesting_inside_of_an_event_spoils_only_the_event() -> None:
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    batch = decode(payload(stored([1], extra_keys=[[deep]]), CLEARED))
    assert len(batch.events) + batch.malformed == 2


def test_extension_types_are_no_integers() -> None:
    batch = decode(payload(stored([msgspec.msgpack.Ext(5, b"x")], tokens=[1, 2, 3, 4]), CLEARED))  # type: ignore[list-item]
    assert (len(batch.events), batch.malformed) == (1, 1)

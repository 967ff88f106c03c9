"""The mirror: what a reader that keeps a set has after its events, for any batches."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openengine_vllm.kv_events import wire
from openengine_vllm.kv_events.decode import decode
from openengine_vllm.kv_events.feed import Snapshot
from openengine_vllm.kv_events.mirror import Mirror, parents_first
from openengine_vllm.protocol import v1 as pb
from tests.support.kv_messages import (
    CLEARED,
    BlockSet,
    block_set,
    large,
    parse,
    payload,
    removed,
    stored,
    tokens_of,
)

GPU, CPU = pb.STORAGE_MEDIUM_GPU, pb.STORAGE_MEDIUM_CPU_PINNED


def apply(mirror: Mirror, *events: Any) -> list[pb.KvEvent]:
    changes = mirror.apply(decode(payload(*events)).events)
    return list(parse(wire.response(wire.batch(1, 2, 3, changes))).events)


def snapshot(mirror: Mirror) -> list[pb.KvEventBatch]:
    return [parse(data) for data in Snapshot(0, 9, 1, mirror).responses() if data is not None]


def live(mirror: Mirror, medium: int, group: int = 0) -> set[int]:
    """The hashes of one medium and group."""
    blocks = mirror.blocks().get((medium, group), {})  # type: ignore[arg-type]
    return {int.from_bytes(block[3:11], "big") for block in blocks}


def order(mirror: Mirror) -> list[int]:
    """The hashes of the only group as a snapshot has them."""
    [group] = mirror.blocks().values()
    events = [event for event in parents_first(group) if event is not None]
    assert group == {}
    return [
        int.from_bytes(event.block_stored.block_hashes[0].value, "big")
        for event in parse(wire.response(wire.batch(1, 2, 3, events))).events
    ]


def int64(value: int) -> pb.KvBlockHash:
    return pb.KvBlockHash(value=value.to_bytes(8, "big"), encoding="int64")


def test_a_chain_with_all_its_fields() -> None:
    mirror = Mirror()
    apply(mirror, stored([5], group_idx=1))
    [event] = apply(
        mirror,
        stored(
            [2**63 + 1, 7],
            parent=5,
            lora_id=9,
            lora_name="adapter",
            extra_keys=[["adapter", "salt"], [["image", 4], b"\x00\xff"]],
            group_idx=1,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=128,
        ),
    )
    assert event == pb.KvEvent(
        block_stored=pb.BlockStored(
            block_hashes=[int64(2**63 + 1), int64(7)],
            parent_block_hash=int64(5),
            token_ids=tokens_of(2**63 + 1) + tokens_of(7),
            block_size=4,
            lora_id=9,
            lora_name="adapter",
            medium=GPU,
            extra_keys=[
                pb.OpaqueKeyTuple(values=['"adapter"', '"salt"']),
                pb.OpaqueKeyTuple(values=['["image",4]', '{"b64":"AP8="}']),
            ],
            group_idx=1,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=128,
        )
    )


def test_nothing_is_made_up() -> None:
    event = {"type": "BlockStored", "block_hashes": [b"h" * 32], "token_ids": [0, 1, 2, 3]}
    [change] = apply(Mirror(), {**event, "parent_block_hash": None, "block_size": 4})
    assert change.block_stored == pb.BlockStored(
        block_hashes=[pb.KvBlockHash(value=b"h" * 32, encoding="bytes")],
        token_ids=[0, 1, 2, 3],
        block_size=4,
    )


@pytest.mark.parametrize(
    ("name", "medium"),
    [
        (None, pb.STORAGE_MEDIUM_UNSPECIFIED),
        ("GPU", GPU),
        ("CPU", CPU),
        ("cpu", CPU),
        ("DISK", pb.STORAGE_MEDIUM_DISK),
        ("STORAGE", pb.STORAGE_MEDIUM_DISK),
        ("elsewhere", pb.STORAGE_MEDIUM_EXTERNAL),
    ],
)
def test_media(name: str | None, medium: int) -> None:
    mirror = Mirror()
    [event] = apply(mirror, stored([1], medium=name))
    assert event.block_stored.medium == medium
    [event] = apply(mirror, removed([1], medium=name))
    assert event.block_removed == pb.BlockRemoved(block_hashes=[int64(1)], medium=medium)  # type: ignore[arg-type]
    assert len(mirror) == 0


def test_copies_are_counted() -> None:
    mirror = Mirror()
    assert len(apply(mirror, stored([1, 2]))) == 1
    assert apply(mirror, stored([1, 2])) == []
    assert apply(mirror, removed([2])) == []
    assert live(mirror, GPU) == {1, 2}
    [event] = apply(mirror, removed([2]), removed([1]))
    assert event.block_removed.block_hashes == [int64(2)]
    assert live(mirror, GPU) == {1}


def test_a_chain_that_is_live_in_part_goes_out_in_runs() -> None:
    mirror = Mirror()
    apply(mirror, stored([8]), stored([1, 2, 3, 4]), removed([4]))
    apply(mirror, removed([1]))
    events = apply(mirror, stored([9, 1, 2, 5, 6], parent=8))
    assert [
        (
            [int.from_bytes(block.value, "big") for block in event.block_stored.block_hashes],
            int.from_bytes(event.block_stored.parent_block_hash.value, "big"),
            list(event.block_stored.token_ids),
        )
        for event in events
    ] == [
        ([9, 1], 8, tokens_of(9) + tokens_of(1)),
        ([5, 6], 2, tokens_of(5) + tokens_of(6)),
    ]


def test_media_and_groups_are_apart() -> None:
    mirror = Mirror()
    apply(mirror, stored([1]), stored([1], medium="CPU"), stored([1], group_idx=1))
    assert len(mirror) == 3
    assert len(apply(mirror, removed([1], medium="CPU"))) == 1
    assert live(mirror, GPU) == live(mirror, GPU, 1) == {1}
    assert live(mirror, CPU) == set()


def test_a_negative_hash_is_its_unsigned_twin() -> None:
    mirror = Mirror()
    apply(mirror, stored([-1], tokens=[1, 2, 3, 4]))
    assert live(mirror, GPU) == {2**64 - 1}
    assert len(apply(mirror, removed([2**64 - 1]))) == 1


def test_removals_of_what_is_not_there_are_counted() -> None:
    mirror = Mirror()
    assert apply(mirror, removed([1, 2])) == []
    assert mirror.unknown_removals == 2


def test_a_clear_empties_everything() -> None:
    mirror = Mirror()
    apply(mirror, stored([1]), stored([1]))
    events = apply(mirror, CLEARED, stored([1]))
    assert [event.WhichOneof("event") for event in events] == [
        "all_blocks_cleared",
        "block_stored",
    ]
    assert len(apply(mirror, removed([1]))) == 1


@pytest.mark.parametrize(
    "value", [{"a": 1}, [[[[[[[[[[1]]]]]]]]]], float("nan"), "x" * 100_000], ids=type
)
def test_extra_keys_that_cannot_be_passed_on(value: Any) -> None:
    mirror = Mirror()
    assert apply(mirror, stored([1], extra_keys=[[value]])) == []
    assert mirror.malformed == 1
    assert len(mirror) == 0


def test_different_keys_never_look_alike() -> None:
    values = ["1", 1, b"1", [1], ["1"], None, '{"b64":"MQ=="}', True]
    texts = {wire.extra_keys([value]) for value in values}
    assert len(texts) == len(values)
    assert wire.extra_keys([]) == wire.extra_keys(None)


def test_a_snapshot_of_nothing_is_one_batch() -> None:
    [batch] = snapshot(Mirror())
    assert batch == pb.KvEventBatch(sequence_number=9, timestamp_unix_nanos=1)


def test_parents_come_first_also_where_they_were_stored_again() -> None:
    mirror = Mirror()
    apply(mirror, stored([1, 2, 3]), stored([4], parent=3), removed([1]), removed([2]))
    apply(mirror, stored([1, 2]))
    reader = BlockSet()
    assert order(mirror) == [1, 2, 3, 4]
    for batch in snapshot(mirror):
        reader.apply(batch)
    assert len(reader.blocks) == 4


def test_a_block_whose_parent_is_lost_is_left_out_and_all_behind_it() -> None:
    mirror = Mirror()
    assert apply(mirror, stored([6, 7], parent=77), stored([8], parent=7)) == []
    assert (len(mirror), mirror.orphans) == (0, 3)
    assert apply(mirror, removed([8])) == []
    assert len(apply(mirror, stored([77]), stored([6, 7], parent=77))) == 2
    assert order(mirror) == [77, 6, 7]


def test_other_kinds_of_attention_keep_the_end_of_a_sequence_alone() -> None:
    mirror = Mirror()
    apply(mirror, stored([6], parent=77, kv_cache_spec_kind="sliding_window"))
    assert (len(mirror), mirror.orphans) == (1, 0)


def test_the_parent_may_lie_in_another_medium() -> None:
    mirror = Mirror()
    apply(mirror, stored([1]), stored([2], parent=1, medium="CPU"))
    assert (len(mirror), mirror.orphans) == (2, 0)


def test_large_events_go_out_in_pieces() -> None:
    mirror, reader = Mirror(), BlockSet()
    values = range(1, 3001)
    pieces = mirror.apply(decode(payload(large(3000))).events)
    assert len(pieces) > 2
    assert max(map(len, pieces)) < 256 * 1024
    reader.apply(parse(wire.response(wire.batch(1, 2, 3, pieces))))
    assert len(reader.blocks) == len(values)
    gone = mirror.apply(decode(payload(removed(values))).events)
    assert len(gone) > 2
    reader.apply(parse(wire.response(wire.batch(1, 2, 3, gone))))
    assert not reader.blocks


def test_parents_that_go_round_in_circles() -> None:
    mirror = Mirror()
    apply(mirror, stored([1, 2, 3]), removed([1]), stored([1], parent=2))
    assert sorted(order(mirror)) == [1, 2, 3]


def test_a_long_chain_that_is_out_of_order_leaves_turns_to_others() -> None:
    mirror = Mirror()
    apply(mirror, stored(range(20_000)))
    for value in reversed(range(19_999)):
        apply(mirror, removed([value]), stored([value], parent=value - 1 if value else None))
    [group] = mirror.blocks().values()
    steps = list(parents_first(group))
    assert steps[:4] == [None] * 4
    assert steps.count(None) == 4
    assert order(mirror) == list(range(20_000))


@pytest.mark.parametrize("value", [7, -7, 2**64 - 1, b"h", b"h" * 64], ids=repr)
def test_parents_are_read_back(value: int | bytes) -> None:
    block = wire.block_hash(value)
    for size in (1, 30, 50, 60, 127, 5000, 200_000):
        packed = wire.tokens([1] * size)
        for hashed in (7, b"h" * 64):
            hashes = (wire.block_hash(hashed),)
            assert wire.parent_of(wire.stored(hashes, block, packed, b"", b"")) == block
            assert wire.parent_of(wire.stored(hashes, None, packed, b"", b"")) == b""


def test_a_large_snapshot_stays_under_a_mebibyte_a_batch() -> None:
    mirror = Mirror()
    for start in range(0, 20_000, 100):
        apply(mirror, stored(range(start, start + 100)))
    batches = snapshot(mirror)
    assert len(batches) > 1
    assert all(batch.ByteSize() < 2**20 for batch in batches)
    assert {batch.sequence_number for batch in batches} == {9}
    assert len(block_set(batches).blocks) == 20_000


def test_a_snapshot_stays_as_it_is_while_the_mirror_goes_on() -> None:
    mirror = Mirror()
    apply(mirror, stored([1, 2]))
    responses = Snapshot(0, 1, 1, mirror)
    apply(mirror, CLEARED, stored([3]))
    batches = [parse(data) for data in responses.responses() if data is not None]
    assert {key[2][-1] for key in block_set(batches).blocks} == {1, 2}


def test_memory_goes_with_the_blocks() -> None:
    mirror = Mirror()
    for start in range(0, 2000, 50):
        apply(mirror, stored(range(start, start + 50), tokens=range(50 * 4)))
    [group] = mirror.blocks().values()
    assert max(sys.getsizeof(block) + sys.getsizeof(group[block]) for block in group) < 250
    apply(mirror, *(removed([value]) for value in range(2000)))
    assert len(mirror) == 0


def test_the_collector_has_no_blocks_to_walk() -> None:
    """With hundreds of thousands of them it would stop the event loop for long."""
    mirror = Mirror()
    for value in range(5000):
        apply(mirror, stored([value], parent=value - 1, extra_keys=[["salt"]]))
    before = {id(tracked) for tracked in gc.get_objects()}
    for value in range(5000, 10_000):
        apply(mirror, stored([value], parent=value - 1, extra_keys=[["salt"]]))
    assert sum(id(tracked) not in before for tracked in gc.get_objects()) < 500


hashes = st.integers(0, 7)
events = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.lists(hashes, max_size=4), st.none() | hashes),
        st.tuples(st.just("remove"), st.lists(hashes, max_size=3), st.none()),
        st.tuples(st.just("clear"), st.none(), st.none()),
    ),
    max_size=6,
)


@given(st.lists(st.tuples(events, st.sampled_from(["GPU", "CPU"])), max_size=12), st.integers(0))
def test_a_reader_that_joins_with_a_snapshot_has_what_the_first_one_has(
    batches: list[tuple[list[tuple[str, Any, Any]], str]], joins: int
) -> None:
    mirror, copies = Mirror(), dict[tuple[str, int], int]()
    first, late = BlockSet(), BlockSet()
    first.strict = late.strict = False
    join_at = joins % (len(batches) + 1)
    for number, (script, medium) in enumerate(batches):
        if number == join_at:
            for batch in snapshot(mirror):
                late.apply(batch)
        sent: list[Any] = []
        for kind, of, parent in script:
            if kind == "store":
                sent.append(stored(of, parent=parent, medium=medium))
                for value in of:
                    known = any(copies.get((place, parent)) for place in ("GPU", "CPU"))
                    if parent is None or known or copies.get((medium, value)):
                        copies[medium, value] = copies.get((medium, value), 0) + 1
                    parent = value
            elif kind == "remove":
                sent.append(removed(of, medium=medium))
                for value in of:
                    copies[medium, value] = max(copies.get((medium, value), 0) - 1, 0)
            else:
                sent.append(CLEARED)
                copies.clear()
        batch = pb.KvEventBatch(events=apply(mirror, *sent))
        first.apply(batch)
        if number >= join_at:
            late.apply(batch)
    media = {"GPU": GPU, "CPU": CPU}
    assert set(first.blocks) == {
        (media[medium], 0, value.to_bytes(8, "big"))
        for (medium, value), count in copies.items()
        if count
    }
    if join_at == len(batches):
        for batch in snapshot(mirror):
            late.apply(batch)
    assert late.blocks == first.blocks

"""KV events in the form of the split revision: exactly the blocks that its clients can tell."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from openengine_vllm.kv_events.feed import RankFeed
from openengine_vllm.protocol import v1 as pb
from tests.support.kv_messages import CLEARED, BlockSet, parse, payload, removed, stored

DIGEST = bytes(range(24)) + (2**64 - 5).to_bytes(8, "big")


def fed(*batches: list[Any]) -> RankFeed:
    feed = RankFeed(0, 1000, 1 << 30)
    for number, events in enumerate(batches):
        feed.live(number, payload(*events))
    return feed


def plain(feed: RankFeed) -> list[pb.KvEventBatch]:
    """All batches in that form."""
    responses = feed.log.read(0, 1000)
    return [parse(feed.plain.batch(number, data)) for number, data in enumerate(responses)]


def hashes(event: pb.KvEvent) -> list[bytes]:
    kind = event.WhichOneof("event")
    assert kind in ("block_stored", "block_removed")
    blocks = getattr(event, kind).block_hashes
    assert all(block.encoding == "decimal_int64" for block in blocks)
    return [block.value for block in blocks]


def test_hashes_are_signed_decimal_numbers() -> None:
    [batch] = plain(fed([stored([2**64 - 1]), stored([7, 2**63], parent=2**64 - 1), removed([7])]))
    _, first, second = batch.events
    assert hashes(first) == [b"7", b"-9223372036854775808"]
    assert first.block_stored.parent_block_hash.value == b"-1"
    assert hashes(second) == [b"7"]


def test_digests_are_folded_to_their_last_bytes() -> None:
    [batch] = plain(fed([stored([DIGEST])]))
    assert hashes(batch.events[0]) == [b"-5"]


def test_what_has_no_place_is_left_out() -> None:
    [batch] = plain(
        fed(
            [
                stored([1], medium="CPU"),
                stored([2], group_idx=1, kv_cache_spec_kind="sliding_window"),
                stored([3], kv_cache_spec_sliding_window=9),
                removed([1], medium="CPU"),
                removed([2], group_idx=1),
            ]
        )
    )
    [event] = batch.events
    assert hashes(event) == [b"3"]
    block = event.block_stored
    assert (block.kv_cache_spec_kind, block.kv_cache_spec_sliding_window) == ("", 0)
    assert not block.extra_keys
    assert len(block.token_ids) == block.block_size


def test_the_first_group_of_full_attention_is_told() -> None:
    [batch] = plain(
        fed(
            [
                stored([1], group_idx=0, kv_cache_spec_kind="sliding_window"),
                stored([1], group_idx=2),
                stored([1], group_idx=1),
                removed([1], group_idx=1),
            ]
        )
    )
    assert [hashes(event) for event in batch.events] == [[b"1"], [b"1"]]
    assert batch.events[0].block_stored.group_idx == 1


def test_a_salted_chain_is_left_out_from_its_salt_on() -> None:
    feed = fed(
        [stored([1, 2], extra_keys=[None, None])],
        [stored([3, 4], parent=2, extra_keys=[["salt"], None])],
        [stored([5], parent=4)],
        [removed([5]), removed([2, 4])],
        [stored([6, 7, 8], extra_keys=[None, ["image", 3], None])],
    )
    batches = plain(feed)
    told = [[hashes(event) for event in batch.events] for batch in batches]
    assert told == [[[b"1", b"2"]], [], [], [[b"2"]], [[b"6"]]]
    assert [batch.sequence_number for batch in batches] == [0, 1, 2, 3, 4]
    assert len(batches[4].events[0].block_stored.token_ids) == 4


def test_an_adapter_s_own_key_leaves_nothing_out() -> None:
    adapter: Any = {"lora_name": "a", "lora_id": 3}
    [batch] = plain(
        fed(
            [
                stored([1], extra_keys=[["a"]], **adapter),
                stored([2], extra_keys=[["a", "salt"]], **adapter),
            ]
        )
    )
    [event] = batch.events
    assert hashes(event) == [b"1"]
    assert (event.block_stored.lora_name, event.block_stored.lora_id) == ("a", 3)


def test_a_block_is_forgotten_with_its_key() -> None:
    feed = fed(
        [stored([1], extra_keys=[["salt"]])],
        [CLEARED],
        [stored([1], extra_keys=[None])],
    )
    assert hashes(plain(feed)[2].events[0]) == [b"1"]


CHAIN = st.tuples(
    st.integers(0, 3), st.integers(1, 4), st.sampled_from([None, ["salt"]]), st.booleans()
)


@given(st.lists(CHAIN, max_size=25), st.integers(0, 25))
def test_a_snapshot_and_what_follows_are_what_an_observer_has(
    steps: list[tuple[int, int, Any, bool]], join: int
) -> None:
    """Chains come and go; whoever joins with a snapshot has the same set as from the start."""
    feed = RankFeed(0, 1000, 1 << 30)
    joined: BlockSet | None = None
    observer = BlockSet()
    live: dict[tuple[int, bool], int] = {}
    for number, (root, length, key, drop) in enumerate(steps):
        chain = (root, key is not None)
        base = 1000 * root + (500 if key else 0)
        events: list[Any] = []
        if drop and live.get(chain):
            events.append(removed([base + index for index in reversed(range(live.pop(chain)))]))
        elif chain not in live:
            events.append(
                stored(
                    [base + index for index in range(length)],
                    extra_keys=[key, *[None] * (length - 1)],
                )
            )
            live[chain] = length
        feed.live(number, payload(*events))
        batch = parse(feed.plain.batch(number, feed.log.read(number, 1)[0]))
        observer.apply(batch)
        if joined is not None:
            joined.apply(batch)
        if number == join:
            joined = BlockSet()
            snapshot = feed.snapshot()
            assert snapshot is not None
            for response in snapshot.responses():
                if response is not None:
                    joined.apply(parse(feed.plain.reduced(response, snapshot.keyed)))
    told = {int(key[2]) for key in observer.blocks}
    assert told == {
        1000 * root + index
        for (root, salted), length in live.items()
        if not salted
        for index in range(length)
    }
    if joined is not None:
        assert joined.blocks == observer.blocks

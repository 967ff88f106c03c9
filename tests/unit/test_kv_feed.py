"""Sequence numbers: order, gaps, repeats and restarts, as one rank's feed sees them."""

from __future__ import annotations

import sys
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from openengine_vllm.kv_events import wire
from openengine_vllm.kv_events.feed import RankFeed
from openengine_vllm.protocol import v1 as pb
from tests.support.kv_messages import CLEARED, BlockSet, large, parse, payload, removed, stored


class Publisher:
    """What a publisher has sent, with a replay buffer."""

    def __init__(self, buffer: int = 100, epoch: int = 0) -> None:
        self.sent: dict[int, bytes] = {}
        self.buffer = buffer
        self.epoch = epoch

    def send(self, *events: Any) -> tuple[int, bytes]:
        number = len(self.sent)
        self.sent[number] = payload(*events, ts=1e6 * self.epoch + number)
        return number, self.sent[number]

    def blocks(self, count: int) -> list[tuple[int, bytes]]:
        """Batches with one block each; its hash tells epoch and number."""
        return [self.send(stored([1000 * self.epoch + len(self.sent)])) for _ in range(count)]

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        kept = sorted(self.sent)[-self.buffer :]
        return [(number, self.sent[number]) for number in kept if number >= start]


def answer(feed: RankFeed, publisher: Publisher) -> int:
    """Answer what the feed wants from the replay socket, until it wants no more."""
    rounds = 0
    while (start := feed.wants) is not None:
        rounds += 1
        assert rounds < 10
        feed.asking()
        for number, data in publisher.replay(start):
            feed.replayed(number, data)
        feed.replay_ended(complete=True)
    return rounds


def silence(feed: RankFeed) -> None:
    """The replay socket does not answer."""
    rounds = 0
    while feed.wants is not None:
        rounds += 1
        assert rounds < 10
        feed.asking()
        feed.replay_ended(complete=False)


def out(feed: RankFeed) -> list[tuple[int, list[int]]]:
    """Number and hashes of every batch; -1 for a clear, removed ones not told."""
    result = []
    for data in feed.log.read(feed.log.oldest, 10_000):
        batch = parse(data)
        assert batch.data_parallel_rank == feed.rank
        hashes: list[int] = []
        for event in batch.events:
            if event.HasField("all_blocks_cleared"):
                hashes.append(-1)
            for block in event.block_stored.block_hashes:
                hashes.append(int.from_bytes(block.value, "big"))
        result.append((batch.sequence_number, hashes))
    return result


def new_feed() -> RankFeed:
    return RankFeed(3, 1000, 10_000_000)


def live(feed: RankFeed, *batches: tuple[int, bytes]) -> None:
    for batch in batches:
        feed.live(*batch)


def test_numbers_are_the_publishers_own() -> None:
    feed, publisher = new_feed(), Publisher()
    live(feed, *publisher.blocks(3))
    live(feed, publisher.send())
    assert out(feed) == [(0, [0]), (1, [1]), (2, [2]), (3, [])]
    answer(feed, publisher)
    assert feed.counts.repeats == feed.counts.filled == 0
    assert len(out(feed)) == 4


def test_a_late_start_is_made_up_for_by_the_replay_socket() -> None:
    feed, publisher = new_feed(), Publisher()
    publisher.blocks(3)
    live(feed, *publisher.blocks(1))
    assert out(feed) == []
    answer(feed, publisher)
    assert out(feed) == [(n, [n]) for n in range(4)]
    assert feed.counts.filled == 4


def test_a_start_beyond_the_buffer_keeps_the_publishers_numbers() -> None:
    feed, publisher = new_feed(), Publisher(buffer=2)
    publisher.blocks(7)
    answer(feed, publisher)
    assert out(feed) == [(5, [-1, 5]), (6, [6])]


def test_a_start_without_replay() -> None:
    feed, publisher = new_feed(), Publisher()
    publisher.blocks(7)
    silence(feed)
    live(feed, *publisher.blocks(1))
    silence(feed)
    live(feed, *publisher.blocks(1))
    assert out(feed) == [(7, [-1, 7]), (8, [8])]


def test_a_publisher_that_has_said_nothing_yet() -> None:
    feed, publisher = new_feed(), Publisher()
    answer(feed, publisher)
    publisher.blocks(1)
    live(feed, *publisher.blocks(1))
    answer(feed, publisher)
    assert out(feed) == [(0, [0]), (1, [1])]


def test_a_gap_is_filled_while_live_batches_go_on() -> None:
    feed, publisher = new_feed(), Publisher()
    answer(feed, publisher)
    batches = publisher.blocks(8)
    live(feed, *batches[:2], *batches[5:6])
    feed.asking()
    replayed = publisher.replay(feed.wants or 0)
    for number, data in replayed[:3]:
        feed.replayed(number, data)
    live(feed, *batches[6:])
    for number, data in replayed[3:]:
        feed.replayed(number, data)
    feed.replay_ended(complete=True)
    assert out(feed) == [(n, [n]) for n in range(8)]
    assert (feed.counts.gaps, feed.counts.restarts, feed.wants) == (0, 0, None)


def test_batches_out_of_order_without_replay_in_time() -> None:
    feed, publisher = new_feed(), Publisher()
    answer(feed, publisher)
    zero, one, two, three = publisher.blocks(4)
    live(feed, zero, two, three, one)
    answer(feed, publisher)
    assert out(feed) == [(n, [n]) for n in range(4)]
    assert feed.counts.restarts == feed.counts.gaps == 0


def test_a_gap_that_cannot_be_filled_is_announced_and_late_batches_are_dropped() -> None:
    feed, publisher = new_feed(), Publisher()
    batches = publisher.blocks(7)
    live(feed, *batches[:2], batches[4])
    silence(feed)
    live(feed, batches[5], batches[2], batches[3], batches[6])
    silence(feed)
    assert out(feed) == [(0, [0]), (1, [1]), (2, [-1, 4]), (3, [5]), (4, [6])]
    assert (feed.counts.gaps, feed.counts.lost, feed.counts.late) == (1, 2, 2)
    assert feed.counts.restarts == 0


def test_a_replay_shorter_than_the_gap() -> None:
    feed, publisher = new_feed(), Publisher(buffer=3)
    batches = publisher.blocks(2)
    live(feed, *batches)
    answer(feed, publisher)
    publisher.blocks(6)
    live(feed, *publisher.blocks(1))
    answer(feed, publisher)
    assert out(feed) == [(0, [0]), (1, [1]), (2, [-1, 6]), (3, [7]), (4, [8])]
    assert feed.counts.lost == 4


def test_a_replay_with_holes_is_asked_for_again() -> None:
    feed, publisher = new_feed(), Publisher()
    batches = publisher.blocks(6)
    live(feed, batches[0], batches[5])
    feed.asking()
    for number in (0, 1, 3):
        feed.replayed(*batches[number])
    feed.replay_ended(complete=True)
    assert feed.wants == 1
    answer(feed, publisher)
    assert out(feed) == [(n, [n]) for n in range(6)]
    assert feed.counts.gaps == 0


def test_repeats_are_dropped() -> None:
    feed, publisher = new_feed(), Publisher()
    batches = publisher.blocks(3)
    live(feed, *batches, *batches, batches[1])
    assert out(feed) == [(n, [n]) for n in range(3)]
    assert (feed.counts.repeats, feed.counts.restarts) == (4, 0)


def test_a_restart_seen_by_its_first_number() -> None:
    feed, old, new = new_feed(), Publisher(), Publisher(epoch=1)
    live(feed, *old.blocks(3))
    answer(feed, old)
    live(feed, *new.blocks(2))
    answer(feed, new)
    live(feed, *new.blocks(1))
    assert out(feed)[3:] == [(3, [-1, 1000]), (4, [1001]), (5, [1002])]
    assert feed.counts.restarts == 1


def test_a_restart_seen_late_is_read_from_its_start() -> None:
    feed, old, new = new_feed(), Publisher(), Publisher(epoch=1)
    live(feed, *old.blocks(5))
    answer(feed, old)
    new.blocks(2)
    live(feed, *new.blocks(1))
    assert len(out(feed)) == 5
    answer(feed, new)
    assert out(feed)[5:] == [(5, [-1, 1000]), (6, [1001]), (7, [1002])]
    assert (feed.counts.restarts, feed.counts.gaps) == (1, 0)


def test_a_restart_that_has_overtaken_the_old_publisher() -> None:
    feed, old, new = new_feed(), Publisher(), Publisher(epoch=1)
    live(feed, *old.blocks(3))
    answer(feed, old)
    new.blocks(9)
    live(feed, *new.blocks(1))
    answer(feed, new)
    assert out(feed)[3:] == [(3, [-1, 1000]), *((3 + n, [1000 + n]) for n in range(1, 10))]
    assert (feed.counts.restarts, feed.counts.gaps) == (1, 0)


def test_a_restart_without_any_batch() -> None:
    feed, old, new = new_feed(), Publisher(), Publisher(epoch=1)
    live(feed, *old.blocks(3))
    answer(feed, old)
    feed.check()
    answer(feed, new)
    assert feed.counts.restarts == 1
    live(feed, *new.blocks(1))
    assert out(feed)[3:] == [(3, [-1]), (4, [1000])]


def test_a_batch_that_is_too_large_for_a_message_goes_on_as_several() -> None:
    feed, reader = new_feed(), BlockSet()
    feed.live(0, payload(large(4000)))
    feed.live(1, payload(stored([60_000])))
    batches = [parse(data) for data in feed.log.read(0, 1000)]
    assert len(batches) > 2
    assert [batch.sequence_number for batch in batches] == list(range(len(batches)))
    assert max(batch.ByteSize() for batch in batches) < 512 * 1024
    for batch in batches:
        reader.apply(batch)
    assert len(reader.blocks) == 4001


def test_a_restart_seen_while_a_replay_is_under_way() -> None:
    feed, old, new = new_feed(), Publisher(), Publisher(epoch=1)
    batches = old.blocks(6)
    live(feed, *batches[:3], batches[5])
    feed.asking()
    feed.replayed(*batches[2])
    new.blocks(2)
    live(feed, new.send(stored([1002])))
    assert feed.counts.restarts == 1
    feed.replay_ended(complete=False)
    answer(feed, new)
    assert out(feed)[3:] == [(3, [-1, 1000]), (4, [1001]), (5, [1002])]


def test_a_reconnect_to_the_same_publisher_changes_nothing() -> None:
    feed, publisher = new_feed(), Publisher()
    live(feed, *publisher.blocks(3))
    answer(feed, publisher)
    publisher.blocks(1)
    feed.check()
    answer(feed, publisher)
    assert out(feed) == [(n, [n]) for n in range(4)]
    assert (feed.counts.restarts, feed.counts.gaps) == (0, 0)


def test_an_unreadable_batch_is_taken_from_the_replay_socket() -> None:
    feed, publisher = new_feed(), Publisher()
    batches = publisher.blocks(4)
    live(feed, batches[0], (1, batches[1][1][:-3]), batches[2])
    answer(feed, publisher)
    live(feed, batches[3])
    assert out(feed) == [(n, [n]) for n in range(4)]
    assert (feed.counts.undecodable, feed.counts.gaps) == (1, 0)


def test_an_unreadable_batch_that_stays_so_is_a_gap() -> None:
    feed, publisher = new_feed(), Publisher()
    batches = publisher.blocks(1)
    publisher.sent[1] = b"rubbish"
    live(feed, *batches, (1, b"rubbish"))
    answer(feed, publisher)
    live(feed, *publisher.blocks(2))
    answer(feed, publisher)
    assert out(feed) == [(0, [0]), (1, [-1]), (2, [2]), (3, [3])]
    assert feed.counts.lost == 1


def test_what_waits_for_a_gap_is_bounded() -> None:
    feed, publisher = new_feed(), Publisher()
    answer(feed, publisher)
    live(feed, *publisher.blocks(1))
    data = payload(stored([5]))
    for number in range(2, 30_000):
        feed.live(number, data)
    assert len(feed._ahead) == 10_000
    assert feed.counts.overflowed == 19_998
    large = bytes(16 * 1024 * 1024)
    feed = new_feed()
    for number in range(1, 9):
        feed.live(number, large)
    assert feed._ahead_bytes <= 64 * 1024 * 1024
    silence(feed)
    assert (feed._ahead, feed._ahead_bytes) == ({}, 0)


def test_events_left_out_are_counted() -> None:
    feed = new_feed()
    feed.live(0, payload(stored([1]), {"type": "New"}, stored([2], tokens=[1]), ts=2.5, rank=9))
    assert out(feed) == [(0, [1])]
    assert (feed.counts.malformed_events, feed.counts.unknown_events) == (1, 1)


def test_a_reset_is_told_before_the_publisher_tells_it() -> None:
    feed, publisher = new_feed(), Publisher()
    live(feed, *publisher.blocks(2))
    assert feed.emptied(feed.mirror.next_clear, 5)
    assert (out(feed)[-1], len(feed.mirror)) == ((2, [-1]), 0)
    assert parse(feed.log.read(2, 1)[0]).timestamp_unix_nanos == 5
    live(feed, publisher.send(CLEARED, stored([7])), *publisher.blocks(1))
    assert out(feed)[3:] == [(3, [7]), (4, [3])]
    answer(feed, publisher)
    assert (len(out(feed)), feed.counts.restarts) == (5, 0)


def test_what_was_stored_before_a_reset_does_not_come_back() -> None:
    feed, publisher = new_feed(), Publisher()
    live(feed, *publisher.blocks(1))
    late = [*publisher.blocks(2), publisher.send(removed([0]), stored([8]), CLEARED, stored([9]))]
    assert feed.emptied(feed.mirror.next_clear, 0)
    live(feed, *late)
    assert out(feed) == [(0, [0]), (1, [-1]), (2, []), (3, []), (4, [9])]
    assert feed.mirror.unknown_removals == 0


def test_a_reset_that_the_publisher_has_told_already_changes_nothing() -> None:
    feed, publisher = new_feed(), Publisher()
    live(feed, *publisher.blocks(1))
    clear = feed.mirror.next_clear
    live(feed, publisher.send(CLEARED, stored([7])))
    assert not feed.emptied(clear, 0)
    assert out(feed) == [(0, [0]), (1, [-1, 7])]
    assert len(feed.mirror) == 1


def test_resets_one_after_the_other() -> None:
    feed, publisher = new_feed(), Publisher()
    live(feed, *publisher.blocks(1))
    for _ in range(2):
        assert feed.emptied(feed.mirror.next_clear, 0)
    live(feed, publisher.send(CLEARED, stored([7]), CLEARED, stored([8])), publisher.send(CLEARED))
    assert out(feed) == [(0, [0]), (1, [-1]), (2, [-1]), (3, [8]), (4, [-1])]


def test_a_reset_before_the_first_batch_has_come_makes_none() -> None:
    feed, publisher = new_feed(), Publisher()
    late = publisher.send(stored([1]))
    assert not feed.emptied(feed.mirror.next_clear, 0)
    live(feed, late, publisher.send(CLEARED, stored([2])))
    assert out(feed) == [(0, []), (1, [2])]


def test_batches_lost_around_a_reset_may_have_held_its_clear() -> None:
    feed, publisher = new_feed(), Publisher()
    live(feed, *publisher.blocks(1))
    assert feed.emptied(feed.mirror.next_clear, 0)
    publisher.send(CLEARED, stored([7]))
    live(feed, *publisher.blocks(1))
    silence(feed)
    live(feed, *publisher.blocks(1))
    assert out(feed)[2:] == [(2, [-1, 2]), (3, [3])]
    clear = feed.mirror.next_clear
    publisher.send(CLEARED)
    live(feed, *publisher.blocks(1))
    silence(feed)
    assert not feed.emptied(clear, 0)
    assert out(feed)[4:] == [(4, [-1, 5])]


@given(st.lists(st.sampled_from(["step", "deliver", "begin", "end", "refuse"]), max_size=60))
def test_whenever_resets_are_told_the_set_is_exact(script: list[str]) -> None:
    """Batches and the answers to resets overtake each other; one clear goes out for each reset."""
    feed, publisher, reader = new_feed(), Publisher(), BlockSet()
    live(feed, publisher.send())
    queued: list[Any] = []
    on_the_way: list[tuple[int, bytes]] = []
    # One block follows from the one before, as long as that is live.
    live_blocks: list[int] = []
    reset: int | None = None
    resets = clears = 0
    cursor = feed.log.cursor_at(0)
    assert cursor is not None
    for index, step in enumerate([*script, "end", "step", *["deliver"] * len(script), "deliver"]):
        is_empty = False
        if step == "step":
            queued.append(stored([index + 1], live_blocks[-1] if live_blocks else None))
            live_blocks.append(index + 1)
            on_the_way.append(publisher.send(*queued))
            queued = []
        elif step == "deliver" and on_the_way:
            live(feed, on_the_way.pop(0))
        elif step in ("begin", "refuse") and reset is None:
            clear = feed.mirror.next_clear
            if step == "begin":
                reset = clear
                resets += 1
                queued.append(CLEARED)
                live_blocks = []
        elif step == "end" and reset is not None:
            feed.emptied(reset, 0)
            reset, is_empty = None, not live_blocks
        for data in cursor.read(100):
            batch = parse(data)
            reader.apply(batch)
            clears += sum(event.HasField("all_blocks_cleared") for event in batch.events)
        if is_empty:
            assert not reader.blocks
    assert not on_the_way
    assert {key[2] for key in reader.blocks} == {n.to_bytes(8, "big") for n in live_blocks}
    assert clears == resets
    assert len(feed.log) == feed.log.next


def test_a_snapshot_is_of_one_number() -> None:
    feed = new_feed()
    assert feed.snapshot() is None
    feed.live(0, payload(stored([1, 2])))
    feed.live(1, payload(removed([2]), ts=2.5))
    snapshot = feed.snapshot()
    assert snapshot is not None
    feed.live(2, payload(CLEARED))
    [batch] = [parse(data) for data in snapshot.responses() if data]
    assert (batch.sequence_number, batch.timestamp_unix_nanos) == (1, 2_500_000_000)
    assert len(batch.events) == 1


def test_a_snapshot_lets_go_of_what_it_has_told() -> None:
    feed = new_feed()
    feed.live(0, payload(stored([1, 2]), stored([3], medium="CPU")))
    events = [event for group in feed.mirror.blocks().values() for event in group.values()]
    before = list(map(sys.getrefcount, events))
    snapshot = feed.snapshot()
    assert snapshot is not None
    assert list(map(sys.getrefcount, events)) == [count + 1 for count in before]
    assert len(list(snapshot.responses())) == 2
    assert list(map(sys.getrefcount, events)) == before


def test_numbers_of_batches_are_not_kept() -> None:
    feed, varint = new_feed(), cast(Any, wire.varint)
    for number in range(1000):
        feed.live(number, payload(stored([1]), removed([1]), ts=number))
        if number == 0:
            before = len(varint.__self__)
    assert len(varint.__self__) < before + 20


steps = st.lists(
    st.sampled_from(["send", "drop", "swap", "repeat", "truncate", "restart", "check", "silent"]),
    max_size=40,
)


@given(steps, st.integers(1, 5))
def test_whatever_happens_the_numbers_have_no_hole_and_the_set_ends_exact(
    script: list[str], buffer: int
) -> None:
    feed, publisher = new_feed(), Publisher(buffer)
    held: list[tuple[int, bytes]] = []
    epoch = 0
    for step in script:
        if step == "restart":
            epoch += 1
            publisher = Publisher(buffer, epoch)
            held = []
            continue
        if step == "check":
            feed.check()
            answer(feed, publisher)
            continue
        number = len(publisher.sent)
        old = [removed([1000 * epoch + number - 2])] if number > 1 else []
        batch = publisher.send(stored([1000 * epoch + number]), *old)
        if step == "swap":
            held.append(batch)
        elif step == "truncate":
            live(feed, (number, batch[1][:-1]))
        elif step != "drop":
            live(feed, batch, *held)
            held = []
            if step == "repeat":
                live(feed, batch)
        if step == "silent":
            silence(feed)
        else:
            answer(feed, publisher)
    for _ in range(2):
        number = len(publisher.sent)
        live(feed, publisher.send(CLEARED, stored([number])))
        answer(feed, publisher)
    reader = BlockSet()
    numbers = []
    for data in feed.log.read(feed.log.oldest, 10_000):
        batch_out = parse(data)
        numbers.append(batch_out.sequence_number)
        if len(numbers) > 1:
            assert numbers[-1] == numbers[-2] + 1
        reader.apply(batch_out)
    last = (len(publisher.sent) - 1).to_bytes(8, "big")
    assert set(reader.blocks) == {(pb.STORAGE_MEDIUM_GPU, 0, last)}

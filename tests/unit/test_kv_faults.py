"""What a publisher may do wrong, over real sockets, and what comes of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import msgspec
import pytest

from openengine_vllm.kv_events.decode import MAX_PAYLOAD_BYTES
from openengine_vllm.kv_events.source import Patience
from tests.support.calls import eventually
from tests.support.kv_messages import removed, stored
from tests.support.kv_publisher import ScriptedPublisher, publishers
from tests.unit.kv_service import KvService, Subscription, kv_service


async def joined(kv: KvService, publisher: ScriptedPublisher, batches: int = 2) -> Subscription:
    """A subscriber that has had some batches with one block each: 0, 1, ..."""
    await publisher.subscribed()
    subscription = await kv.subscribe(include_snapshot=True)
    for number in range(batches):
        publisher.publish(stored([number]))
    await subscription.read(batches)
    return subscription


def numbers(subscription: Subscription) -> list[int]:
    return [batch.sequence_number for batch in subscription.batches]


def kinds(subscription: Subscription) -> list[list[str | None]]:
    return [[event.WhichOneof("event") for event in batch.events] for batch in subscription.batches]


def hashes(subscription: Subscription) -> set[int]:
    return {int.from_bytes(key[2], "big") for key in subscription.set.blocks}


async def test_batches_published_before_anybody_listened() -> None:
    async with publishers() as [publisher]:
        for number in range(5):
            publisher.publish(stored([number]))
        async with kv_service([publisher.described()]) as kv:
            await eventually(lambda: kv.counts().batches == 5, "all are replayed")
            subscription = await kv.subscribe(include_snapshot=True)
            await subscription.read()
            assert hashes(subscription) == set(range(5))
            assert numbers(subscription) == [4]


async def test_dropped_batches_are_filled_in() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        subscription = await joined(kv, publisher)
        for number in range(2, 5):
            publisher.make(stored([number]))
        publisher.publish(stored([5]))
        await subscription.read_to(5)
        assert numbers(subscription) == list(range(6))
        assert hashes(subscription) == set(range(6))
        assert kv.counts().filled >= 3
        assert kv.counts().gaps == 0


async def test_a_batch_that_is_dropped_before_a_pause_is_asked_for() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        subscription = await joined(kv, publisher)
        publisher.make(stored([2]))
        await subscription.read_to(2)
        assert hashes(subscription) == {0, 1, 2}


@pytest.mark.parametrize("replay", [True, False])
async def test_reordered_batches(replay: bool) -> None:
    async with (
        publishers() as [publisher],
        kv_service([publisher.described(replay=replay)]) as kv,
    ):
        subscription = await joined(kv, publisher)
        two, three, four = (publisher.make(stored([number])) for number in (2, 3, 4))
        publisher.send(*four)
        if not replay:
            await eventually(lambda: kv.counts().gaps == 1, "the gap is given up")
        publisher.send(*two)
        publisher.send(*three)
        publisher.publish(stored([5]))
        last = 5 if replay else 3
        await subscription.read_to(last)
        assert numbers(subscription) == list(range(last + 1))
        if replay:
            assert hashes(subscription) == set(range(6))
        else:
            assert hashes(subscription) == {4, 5}
            assert kinds(subscription)[2] == ["all_blocks_cleared", "block_stored"]
            assert kv.counts().late == 2
        assert kv.counts().restarts == 0


async def test_duplicated_batches() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        subscription = await joined(kv, publisher)
        for number in (0, 1, 1):
            publisher.send(number, publisher.sent[number])
        publisher.publish(removed([0]))
        await subscription.read_to(2)
        assert hashes(subscription) == {1}
        assert (kv.counts().repeats, kv.counts().restarts) == (3, 0)


RUBBISH: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-4],
    "oversized": lambda data: data + bytes(MAX_PAYLOAD_BYTES),
    "nested": lambda data: b"\x91" * 10_000_000,
    "pickle": lambda data: pickle.dumps(data),
    "empty": lambda data: b"",
    "array bomb": lambda data: b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("kind", RUBBISH)
@pytest.mark.parametrize("heals", [True, False], ids=["replay has it", "replay has it not"])
async def test_a_payload_that_cannot_be_read(kind: str, heals: bool) -> None:
    # Nobody asks for a large payload again while it is on its way.
    patience = Patience(replay=20, replay_whole=20, silence=60)
    async with (
        publishers() as [publisher],
        kv_service([publisher.described()], patience=patience) as kv,
    ):
        subscription = await joined(kv, publisher)
        number, data = publisher.make(stored([2]))
        rubbish = RUBBISH[kind](data)
        if not heals:
            publisher.sent[number] = rubbish
        publisher.send(number, rubbish)
        publisher.publish(stored([3]))
        await subscription.read_to(3 if heals else 2)
        if heals:
            assert hashes(subscription) == {0, 1, 2, 3}
            assert numbers(subscription) == [0, 1, 2, 3]
        else:
            assert hashes(subscription) == {3}
            assert numbers(subscription) == [0, 1, 2]
            assert kinds(subscription)[2] == ["all_blocks_cleared", "block_stored"]
        assert kv.counts().undecodable > 0
        publisher.publish(stored([4]))
        await subscription.read()
        assert 4 in hashes(subscription)


async def test_messages_without_the_frames_of_one() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        subscription = await joined(kv, publisher)
        good = publisher.make(stored([2]))
        for frames in (
            (b"",),
            (b"", b""),
            (b"", b"\x00" * 7, good[1]),
            (b"", b"\xff" * 8, good[1]),
            (b"", b"\x00" * 8, good[1], b"more"),
            (b"x" * 100_000,),
        ):
            publisher.send_frames(*frames)
        publisher.send(*good)
        await subscription.read_to(2)
        assert hashes(subscription) == {0, 1, 2}
        assert kv.counts().rubbish == 6
        assert kv.counts().restarts == 0


async def test_malformed_and_unknown_events_inside_of_a_batch() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        subscription = await joined(kv, publisher)
        publisher.publish({"type": "New"}, stored([2]), stored([3], tokens=[1]), 5)
        await subscription.read_to(2)
        assert hashes(subscription) == {0, 1, 2}
        assert (kv.counts().malformed_events, kv.counts().unknown_events) == (2, 1)


@pytest.mark.parametrize("missed", [0, 1, 4], ids=lambda count: f"{count} missed")
async def test_a_restart_with_numbers_from_zero(missed: int) -> None:
    async with publishers() as made, kv_service([made[0].described()]) as kv:
        old = made[0]
        subscription = await joined(kv, old, 3)
        old.close()
        new = ScriptedPublisher(old._publisher.context, ports=old.ports)
        made.append(new)
        for number in range(missed):
            new.publish(stored([100 + number]))
        await new.subscribed()
        new.publish(stored([100 + missed]))
        await subscription.read_to(3 + missed)
        assert numbers(subscription) == list(range(4 + missed))
        assert kinds(subscription)[3] == ["all_blocks_cleared", "block_stored"]
        assert hashes(subscription) == {100 + number for number in range(missed + 1)}
        assert (kv.counts().restarts, kv.counts().gaps) == (1, 0)
        late = await kv.subscribe(include_snapshot=True)
        await late.read()
        assert late.set.blocks == subscription.set.blocks


async def test_a_restart_that_publishes_nothing() -> None:
    async with publishers() as made, kv_service([made[0].described()]) as kv:
        old = made[0]
        await joined(kv, old)
        old.close()
        made.append(ScriptedPublisher(old._publisher.context, ports=old.ports))
        await eventually(lambda: kv.counts().restarts == 1, "the restart is seen")


async def test_a_silent_replay_socket() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        subscription = await joined(kv, publisher)
        publisher.silent = True
        publisher.make(stored([2]))
        publisher.publish(stored([3]))
        publisher.publish(stored([4]))
        await subscription.read_to(3)
        assert kinds(subscription)[2] == ["all_blocks_cleared", "block_stored"]
        assert hashes(subscription) == {3, 4}
        assert (kv.counts().gaps, kv.counts().lost) == (1, 1)
        publisher.silent = False
        publisher.make(stored([5]))
        publisher.publish(stored([6]))
        await subscription.read_to(5)
        assert hashes(subscription) == {3, 4, 5, 6}


async def test_a_replay_that_does_not_end() -> None:
    """What it has brought goes out at once."""
    async with publishers() as [publisher]:
        publisher.never_ends = True
        publisher.publish(stored([0]))
        publisher.publish(stored([1]))
        patience = Patience(replay=60, replay_whole=60, silence=60)
        async with kv_service([publisher.described()], patience=patience) as kv:
            subscription = await kv.subscribe(include_snapshot=True)
            while hashes(subscription) != {0, 1}:
                await subscription.read()


async def test_a_replay_shorter_than_the_gap() -> None:
    async with publishers(buffer=3) as [publisher], kv_service([publisher.described()]) as kv:
        subscription = await joined(kv, publisher)
        for number in range(2, 8):
            publisher.make(stored([number]))
        publisher.publish(stored([8]))
        await subscription.read_to(4)
        assert kinds(subscription)[2] == ["all_blocks_cleared", "block_stored"]
        assert hashes(subscription) == {6, 7, 8}
        assert kv.counts().lost == 4


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("topic", ["", "kv@model"])
async def test_replay_frames_with_and_without_topic(bare: bool, topic: str) -> None:
    async with publishers(topic=topic) as [publisher], kv_service([publisher.described()]) as kv:
        subscription = await joined(kv, publisher)
        publisher.bare_frames = bare
        publisher.make(stored([2]))
        publisher.publish(stored([3]))
        await subscription.read_to(3)
        assert hashes(subscription) == {0, 1, 2, 3}


async def test_another_topic_is_not_for_us() -> None:
    async with publishers(topic="kv") as [publisher], kv_service([publisher.described()]) as kv:
        subscription = await joined(kv, publisher)
        publisher.send_frames(b"kv2", bytes(8), b"x")
        publisher.publish(stored([2]))
        await subscription.read_to(2)
        assert kv.counts().rubbish == 1


async def test_a_publisher_that_stalls() -> None:
    """Neither batches nor answers for many times the silence that makes the bridge ask."""
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        subscription = await joined(kv, publisher)
        publisher.silent = True
        asked = len(publisher.replays)
        await eventually(lambda: len(publisher.replays) >= asked + 4, "it is asked again")
        publisher.silent = False
        publisher.publish(stored([2]))
        await subscription.read_to(2)
        assert hashes(subscription) == {0, 1, 2}
        assert (kv.counts().gaps, kv.counts().restarts) == (0, 0)


async def test_rubbish_that_does_not_stop() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        subscription = await joined(kv, publisher)
        for number in range(2000):
            publisher.send(2 * number, msgspec.msgpack.encode([number, "rubbish"]))
        await eventually(lambda: kv.counts().gaps > 0, "it is given up")
        feed = kv.feed()
        await eventually(lambda: not feed._ahead and feed.wants is None, "all is worked off")
        await subscription.read_to(3)
        assert hashes(subscription) <= {0, 1}

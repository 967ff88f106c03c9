"""Many subscribers of one publisher at its full pace: none misses anything, none takes memory."""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import psutil
import pytest
from grpc import StatusCode, aio

from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub
from tests.support.calls import eventually
from tests.support.kv_bridge import connections, kv_bridge
from tests.support.kv_messages import BlockSet, parse, removed, stored
from tests.support.kv_publisher import ScriptedPublisher, publishers
from tests.support.sizes import sized
from tests.unit.kv_service import Subscription, kv_service
from tests.unit.test_runtime_events import SMALL_WINDOW

pytestmark = pytest.mark.timeout(sized(300, 3600))

SUBSCRIBERS = 20

JOIN_ROUNDS = sized(3, 50)
BATCHES_A_SECOND = 1000
LIVE = 1000
CHAIN = 8

BATCHES = sized(1500, 40_000)
EVENTS = 25
LARGE_BLOCK = 64
RETAINED = 200
"""Batches that the server keeps for its subscribers."""
ROOM_BYTES = 24 * 1024 * 1024
"""What a server may grow by once its log is full; what it sends to one subscriber is far more."""


def live_after(number: int) -> set[int]:
    """The blocks after the batch of this number, by :func:`join_events`."""
    return {
        value
        for value in range(max(0, number - LIVE - 2 * CHAIN), number + 1)
        if value // CHAIN * CHAIN + LIVE + CHAIN - 1 - value % CHAIN > number
    }


def join_events(number: int) -> list[Any]:
    """One block more, and of the oldest chain one less, from its tail to its head."""
    events = [stored([number], parent=number - 1 if number % CHAIN else None)]
    if number >= LIVE:
        events.append(removed([number - LIVE + CHAIN - 1 - 2 * (number % CHAIN)]))
    return events


class Pace:
    """Publishes so many batches a second as time goes by, whenever the loop has a turn."""

    def __init__(self, publisher: ScriptedPublisher) -> None:
        self._publisher = publisher
        self._first = publisher.next
        self._began = time.monotonic()
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            due = self._first + int((time.monotonic() - self._began) * BATCHES_A_SECOND)
            while self._publisher.next < due:
                self._publisher.publish(*join_events(self._publisher.next))
            await asyncio.sleep(0.001)

    async def stop(self) -> float:
        """End it; returns the batches a second there were."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return (self._publisher.next - self._first) / (time.monotonic() - self._began)


def values(blocks: BlockSet) -> set[int]:
    return {int.from_bytes(value, "big") for _, _, value in blocks.blocks}


async def join(stub: Any, delay: float) -> int:
    """Join at some time, with a snapshot, and stay for a while; returns the first live number."""
    await asyncio.sleep(delay)
    call = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(include_snapshot=True), timeout=60)
    reader = Subscription(call)
    [batch] = await reader.read()
    watermark = batch.sequence_number
    while True:
        before = values(reader.set)
        [batch] = await reader.read()
        if batch.sequence_number != watermark:
            break
    first = batch.sequence_number
    assert first == watermark + 1
    assert before == live_after(watermark)
    live = [first, *(batch.sequence_number for batch in await reader.read(30))]
    assert live == list(range(first, first + 31))
    assert values(reader.set) == live_after(live[-1])
    call.cancel()
    return first


async def test_joins_at_a_thousand_batches_a_second() -> None:
    delays = random.Random(5)
    async with (
        publishers() as [publisher],
        kv_bridge(*connections([publisher])) as (address, *_),
        aio.insecure_channel(address) as channel,
    ):
        stub: Any = OpenEngineStub(channel)
        await publisher.subscribed()
        pace = Pace(publisher)
        await eventually(lambda: publisher.next > LIVE + 2 * CHAIN, "blocks come and go")
        firsts: list[int] = []
        for _ in range(JOIN_ROUNDS):
            firsts += await asyncio.gather(
                *(join(stub, delays.uniform(0, 0.2)) for _ in range(SUBSCRIBERS))
            )
        rate = await pace.stop()
        print(f"{len(firsts)} joins, {len(set(firsts))} numbers, {rate:.0f} batches a second")
        assert len(set(firsts)) > JOIN_ROUNDS


def load_events(number: int) -> list[Any]:
    """Chains of large blocks; those of an earlier batch go at once."""
    chains = range(EVENTS * number, EVENTS * number + EVENTS - 1)
    gone = EVENTS * (number - 10)
    return [
        *(
            stored(
                range(CHAIN * chain, CHAIN * chain + CHAIN),
                tokens=[chain % 50_000 + 50_000] * (CHAIN * LARGE_BLOCK),
                block_size=LARGE_BLOCK,
            )
            for chain in chains
        ),
        removed(range(CHAIN * gone, CHAIN * (gone + EVENTS - 1)) if gone >= 0 else []),
    ]


class Reader:
    """A subscriber that takes batches as bytes, so that many of them keep up."""

    def __init__(self, channel: aio.Channel, moved: asyncio.Event) -> None:
        subscribe: Any = channel.unary_stream(
            f"/{pb.SERVICE.full_name}/SubscribeKvEvents",
            request_serializer=pb.SubscribeKvEventsRequest.SerializeToString,
        )
        self.call = subscribe(pb.SubscribeKvEventsRequest())
        self._moved = moved
        self.count = 0
        self.bytes = 0
        self.sum = 0
        """Of all bytes so far."""

    async def run(self, check: Callable[[pb.KvEventBatch], None] | None = None) -> None:
        """Read all batches of the test."""
        while self.count < BATCHES:
            data = await self.call.read()
            assert data is not aio.EOF
            if check is not None:
                check(parse(data))
            self.count += 1
            self.bytes += len(data)
            self.sum = zlib.crc32(data, self.sum)
            self._moved.set()
        self.call.cancel()


class Check:
    """Holds batches against what was published."""

    def __init__(self) -> None:
        self.next = 0

    def __call__(self, batch: pb.KvEventBatch) -> None:
        number, self.next = self.next, self.next + 1
        assert batch.sequence_number == number
        first = CHAIN * EVENTS * number
        count = CHAIN * (EVENTS - 1)
        *added, last = batch.events if number >= 10 else (*batch.events, pb.KvEvent())
        blocks = [block for event in added for block in event.block_stored.block_hashes]
        assert as_numbers(blocks) == list(range(first, first + count))
        gone = first - 10 * CHAIN * EVENTS
        assert as_numbers(last.block_removed.block_hashes) == (
            list(range(gone, gone + count)) if number >= 10 else []
        )


def as_numbers(blocks: Iterable[pb.KvBlockHash]) -> list[int]:
    return [int.from_bytes(block.value, "big") for block in blocks]


async def read_until_failure(call: Any) -> tuple[int, errors.OpenEngineError]:
    """How many batches there were, and the failure after them, in the stream or as its status."""
    count = 0
    try:
        async for response in call:
            if response.HasField("error"):
                assert await call.code() is StatusCode.OK
                return count, errors.from_proto(response.error)
            assert response.batch.sequence_number == count
            count += 1
    except aio.AioRpcError as error:
        return count, errors.from_rpc_error(error)
    raise AssertionError("the stream ended")


async def test_one_that_never_reads() -> None:
    """It fails, nobody else misses a batch, and the server does not keep what it has not read."""
    async with (
        publishers(buffer=1) as [publisher],
        kv_bridge(*connections([publisher]), "--kv-retain-batches", str(RETAINED)) as bridge,
        aio.insecure_channel(bridge.address, options=SMALL_WINDOW) as its_own,
        aio.insecure_channel(bridge.address) as channel,
    ):
        await publisher.subscribed()
        stuck: Any = OpenEngineStub(its_own).SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        await stuck.initial_metadata()
        moved = asyncio.Event()
        readers = [Reader(channel, moved) for _ in range(SUBSCRIBERS - 1)]
        for reader in readers:
            await reader.call.initial_metadata()
        server, memory = psutil.Process(bridge.pid), list[int]()
        async with asyncio.TaskGroup() as reading:
            for index, reader in enumerate(readers):
                reading.create_task(reader.run(None if index else Check()))
            for number in range(BATCHES):
                publisher.publish(*load_events(number))
                memory.append(server.memory_info().rss)
                while number - min(reader.count for reader in readers) > RETAINED // 2:
                    moved.clear()
                    await moved.wait()
        assert {(reader.count, reader.sum) for reader in readers} == {(BATCHES, readers[0].sum)}
        count, error = await read_until_failure(stuck)
        assert error.code == pb.ERROR_CODE_OVERLOADED
        assert error.retryable
        assert count < BATCHES - RETAINED
        full, most = memory[2 * RETAINED], max(memory)
        print(
            f"{EVENTS * BATCHES} events, {readers[0].bytes / 2**20:.0f} MiB, of which the one took "
            f"{count} batches; RSS {memory[0] / 2**20:.0f} MiB at first, {full / 2**20:.0f} with "
            f"a full log, {most / 2**20:.0f} at the most"
        )
        assert most - full < ROOM_BYTES < readers[0].bytes


async def test_what_has_piled_up_is_read_in_parts() -> None:
    """Whatever else runs in the loop gets its turns between them."""
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        await publisher.subscribed()
        tokens = [100_000] * (20 * 1024)
        for number in range(40):
            publisher.publish(stored([number], tokens=tokens, block_size=len(tokens)))
        assert len(publisher.sent[0]) > 64 * 1024
        # Long enough for all of them to arrive before the loop has its next turn.
        time.sleep(0.5)  # noqa: ASYNC251
        log = kv.feed().log
        turns = [0]
        while log.next < 40:
            turns.append(log.next)
            await asyncio.sleep(0)
        turns.append(log.next)
        assert max(after - before for before, after in pairwise(turns)) <= 2

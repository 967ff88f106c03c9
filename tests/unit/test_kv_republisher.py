"""Our own ZMQ sockets: the contract's batches live and replayed, as vLLM's protocol has it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import zmq

from openengine_vllm.kv_events.bridge import BridgeError, KvBridge
from openengine_vllm.kv_events.endpoints import TcpEndpoint, free_ports
from openengine_vllm.kv_events.receiver import Receiver
from openengine_vllm.kv_events.settings import BridgeSettings
from openengine_vllm.kv_events.source import END
from openengine_vllm.protocol import v1 as pb
from tests.support.calls import eventually
from tests.support.kv_messages import CLEARED, stored
from tests.support.kv_publisher import publishers
from tests.unit.kv_service import kv_service


@contextlib.asynccontextmanager
async def connected(
    kind: int, endpoint: TcpEndpoint, topic: bytes = b""
) -> AsyncIterator[Receiver]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(kind)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, topic)
    socket.connect(str(endpoint))
    try:
        with Receiver(socket) as receiver:
            yield receiver
    finally:
        context.destroy(linger=0)


async def replay(endpoint: TcpEndpoint, start: bytes) -> list[list[bytes]]:
    async with connected(zmq.DEALER, endpoint) as receiver, asyncio.timeout(20):
        receiver.socket.send_multipart([b"", start])
        messages = []
        while (frames := await receiver.receive())[2] != END:
            messages.append(frames)
        assert frames == [b"", b"", END, b""]
        return messages


async def test_live_batches_and_a_replay_of_what_was_missed() -> None:
    async with (
        publishers() as [publisher],
        kv_service([publisher.described()], zmq_topic="kv@1") as kv,
    ):
        republisher = kv.bridge.ranks[0].republisher
        subscription = await kv.subscribe()
        publisher.publish(stored([0]))
        await subscription.read()
        async with (
            connected(zmq.SUB, republisher.endpoint, b"kv@") as receiver,
            asyncio.timeout(20),
        ):
            live: list[list[bytes]] = []
            reading = asyncio.ensure_future(receiver.receive())
            while not reading.done():
                publisher.publish(stored([publisher.next]))
                await subscription.read()
                await asyncio.sleep(0)
            live.append(await reading)
            publisher.publish(stored([publisher.next]))
            await subscription.read()
            while int.from_bytes(live[-1][1], "big") < publisher.next - 1:
                live.append(await receiver.receive())
        for frames in live:
            topic, number, data = frames
            batch = pb.KvEventBatch.FromString(data)
            assert topic == b"kv@1"
            assert batch == subscription.batches[int.from_bytes(number, "big")]
        missed = await replay(republisher.replay_endpoint, (0).to_bytes(8, "big"))
        assert [pb.KvEventBatch.FromString(frames[3]) for frames in missed] == subscription.batches
        assert {frames[1] for frames in missed} == {b"kv@1"}
        last = publisher.next - 1
        assert [
            int.from_bytes(frames[2], "big")
            for frames in await replay(republisher.replay_endpoint, last.to_bytes(8, "big"))
        ] == [last]
        for start in (publisher.next.to_bytes(8, "big"), END):
            assert await replay(republisher.replay_endpoint, start) == []


async def test_a_replay_begins_with_the_oldest_that_is_kept() -> None:
    async with (
        publishers() as [publisher],
        kv_service([publisher.described()], retain_batches=3) as kv,
    ):
        for number in range(8):
            publisher.publish(stored([number]))
        await eventually(lambda: kv.feed().log.next == 8, "the bridge has the batches")
        endpoint = kv.bridge.ranks[0].republisher.replay_endpoint
        assert [
            int.from_bytes(frames[2], "big") for frames in await replay(endpoint, bytes(8))
        ] == [5, 6, 7]


async def test_requests_that_are_none_are_ignored() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        endpoint = kv.bridge.ranks[0].republisher.replay_endpoint
        async with connected(zmq.DEALER, endpoint) as receiver, asyncio.timeout(20):
            for frames in ([b"x"], [b"", b""], [b"", b"x" * 100], [b"", b"1", b"2"], [b"a", b"1"]):
                receiver.socket.send_multipart(frames)
            receiver.socket.send_multipart([b"", bytes(8)])
            assert await receiver.receive() == [b"", b"", END, b""]


async def test_numbers_do_not_begin_again_when_the_publisher_does() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        await publisher.subscribed()
        for number in range(3):
            publisher.publish(stored([number]))
        await eventually(lambda: kv.feed().log.next == 3, "the bridge has the batches")
        publisher.sent.clear()
        publisher.next = 0
        publisher.publish(stored([99], medium="CPU"))
        await eventually(lambda: kv.feed().log.next == 4, "the bridge has the batch")
        frames = await replay(kv.bridge.ranks[0].republisher.replay_endpoint, bytes(8))
        assert [int.from_bytes(message[2], "big") for message in frames] == [0, 1, 2, 3]


async def test_a_reset_is_told_at_once() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        republisher = kv.bridge.ranks[0].republisher
        subscription = await kv.subscribe()
        async with (
            connected(zmq.SUB, republisher.endpoint) as receiver,
            asyncio.timeout(20),
        ):
            reading = asyncio.ensure_future(receiver.receive())
            while not reading.done():
                publisher.publish(stored([publisher.next]))
                await subscription.read()
                await asyncio.sleep(0)
            last = await reading
            while int.from_bytes(last[1], "big") < publisher.next - 1:
                last = await receiver.receive()
            kv.bridge.emptying()()
            await subscription.read()
            publisher.publish(CLEARED, stored([publisher.next]))
            await subscription.read()
            live = [await receiver.receive() for _ in range(2)]
        batches = [pb.KvEventBatch.FromString(frames[2]) for frames in live]
        assert batches == subscription.batches[-2:]
        assert [int.from_bytes(frames[1], "big") for frames in live] == [
            publisher.next - 1,
            publisher.next,
        ]
        assert batches[0].events[0].HasField("all_blocks_cleared")
        missed = await replay(republisher.replay_endpoint, bytes(8))
        assert [pb.KvEventBatch.FromString(frames[3]) for frames in missed] == subscription.batches


async def test_ports_count_up_by_rank() -> None:
    async with publishers(3) as made:
        first = free_ports(3)
        replay_first = free_ports(3, taken=range(first, first + 3))
        described = [publisher.described() for publisher in made[1:]]
        async with kv_service(described, zmq_port=first, zmq_replay_port=replay_first) as kv:
            assert [
                (rank.republisher.endpoint.port, rank.republisher.replay_endpoint.port)
                for rank in kv.bridge.ranks.values()
            ] == [(first + 1, replay_first + 1), (first + 2, replay_first + 2)]
            bridge = KvBridge(BridgeSettings(zmq_port=first), described)
            with pytest.raises(BridgeError, match=f"127.0.0.1:{first + 1}"):
                bridge.start()

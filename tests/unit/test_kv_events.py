"""SubscribeKvEvents and GetKvEventSources over a real connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc import StatusCode, aio

from openengine_vllm.kv_events.source import Publisher
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import from_rpc_error
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub
from openengine_vllm.services.handlers import Handler
from openengine_vllm.services.kv_events import KvEventsService
from openengine_vllm.services.stalls import StallWatch
from tests.support.calls import eventually
from tests.support.kv_messages import CLEARED, removed, stored
from tests.support.kv_publisher import ScriptedPublisher, publishers
from tests.unit.kv_service import KvService, kv_service
from tests.unit.scripted_engine import serve_handlers
from tests.unit.test_runtime_events import SMALL_WINDOW

JOINS = 50
JOINERS = 20


async def publish(kv: KvService, publisher: ScriptedPublisher, count: int) -> None:
    """Batches with one new block each, until the bridge has them."""
    for _ in range(count):
        publisher.publish(stored([1000 * publisher.rank + publisher.next]))
    feed = kv.feed(publisher.rank)
    await eventually(lambda: feed.log.next >= publisher.next, "the bridge has the batches")


def numbers(batches: list[pb.KvEventBatch]) -> list[int]:
    return [batch.sequence_number for batch in batches]


async def rejection(kv: KvService, *ranks: int, **fields: Any) -> errors.OpenEngineError:
    request = pb.SubscribeKvEventsRequest(data_parallel_ranks=ranks, **fields)
    with pytest.raises(aio.AioRpcError) as caught:
        await kv.stub.SubscribeKvEvents(request, timeout=60).read()
    return from_rpc_error(caught.value)


async def test_from_now_on() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        await publish(kv, publisher, 3)
        subscription = await kv.subscribe()
        await publish(kv, publisher, 2)
        assert numbers(await subscription.read(2)) == [3, 4]


async def test_from_a_number_that_is_kept() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        await publish(kv, publisher, 5)
        for include_snapshot in (False, True):
            for start in range(1, 6):
                subscription = await kv.subscribe(
                    start_sequence_number=start, include_snapshot=include_snapshot
                )
                assert numbers(await subscription.read(5 - start)) == list(range(start, 5))


async def test_from_a_number_that_is_not_kept() -> None:
    async with (
        publishers() as [publisher],
        kv_service([publisher.described()], retain_batches=3) as kv,
    ):
        await publish(kv, publisher, 10)
        for start in (6, 11, 2**63):
            error = await rejection(kv, start_sequence_number=start)
            assert error.status is StatusCode.OUT_OF_RANGE
            assert error.code == pb.ERROR_CODE_INVALID_ARGUMENT
            assert error.details == {"field": "start_sequence_number", "oldest": 7, "newest": 9}
            subscription = await kv.subscribe(start_sequence_number=start, include_snapshot=True)
            [snapshot] = await subscription.read()
            assert snapshot.sequence_number == 9
            assert len(subscription.set.blocks) == 10
        at_the_end = await kv.subscribe(start_sequence_number=10)
        await publish(kv, publisher, 1)
        assert numbers(await at_the_end.read()) == [10]
        assert numbers(await subscription.read()) == [10]


async def test_before_the_first_batch() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        plain = await kv.subscribe()
        with_snapshot = await kv.subscribe(include_snapshot=True)
        error = await rejection(kv, start_sequence_number=1)
        assert error.status is StatusCode.OUT_OF_RANGE
        await publish(kv, publisher, 2)
        assert numbers(await plain.read(2)) == numbers(await with_snapshot.read(2)) == [0, 1]


async def test_an_empty_set_is_a_snapshot_of_one_batch() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        publisher.publish(stored([1]))
        publisher.publish(removed([1]))
        await publish(kv, publisher, 0)
        subscription = await kv.subscribe(include_snapshot=True)
        [batch] = await subscription.read()
        assert (batch.sequence_number, len(batch.events)) == (1, 0)


async def test_a_reset_is_told_at_once_and_everywhere() -> None:
    """On every rank, and to those who come later."""
    async with (
        publishers(2) as made,
        kv_service([publisher.described() for publisher in made]) as kv,
    ):
        subscription = await kv.subscribe(include_snapshot=True)
        for publisher in made:
            await publish(kv, publisher, 2)
        await subscription.read(4)
        kv.bridge.emptying()  # One that fails is not told.
        kv.bridge.emptying()()
        cleared = await subscription.read(2)
        assert [(b.data_parallel_rank, b.sequence_number) for b in cleared] == [(0, 2), (1, 2)]
        assert not subscription.set.blocks
        [snapshot] = await (await kv.subscribe(0, include_snapshot=True)).read()
        assert (snapshot.sequence_number, len(snapshot.events)) == (2, 0)
        made[1].publish(CLEARED, stored([8]))
        [batch] = await subscription.read()
        assert (batch.data_parallel_rank, batch.sequence_number, len(batch.events)) == (1, 3, 1)
        assert numbers(await (await kv.subscribe(1, start_sequence_number=1)).read(3)) == [1, 2, 3]
    kv.bridge.emptying()()  # HTTP may outlive the bridge.


async def test_all_subscribers_get_the_same_bytes() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        readers = [await kv.subscribe() for _ in range(3)]
        await publish(kv, publisher, 3)
        kept = kv.feed().log.read(0, 3)
        for reader in readers:
            batches = await reader.read(3)
            assert [pb.SubscribeKvEventsResponse.FromString(data).batch for data in kept] == batches


async def test_ranks_are_apart() -> None:
    async with publishers(2) as made:
        for publisher, rank in zip(made, (4, 5), strict=True):
            publisher.rank = rank
        async with kv_service([publisher.described() for publisher in made]) as kv:
            await publish(kv, made[0], 3)
            await publish(kv, made[1], 1)
            every = await kv.subscribe(include_snapshot=True)
            one = await kv.subscribe(5, 5, include_snapshot=True)
            assert [
                (batch.data_parallel_rank, batch.sequence_number) for batch in await every.read(2)
            ] == [(4, 2), (5, 0)]
            assert numbers(await one.read()) == [0]
            await publish(kv, made[1], 1)
            [batch] = await one.read()
            assert (batch.data_parallel_rank, batch.sequence_number) == (5, 1)
            error = await rejection(kv, 5, 6)
            assert error.status is StatusCode.INVALID_ARGUMENT
            assert error.field == "data_parallel_ranks[1]"
            with pytest.raises(aio.AioRpcError) as caught:
                await kv.stub.GetKvEventSources(
                    pb.GetKvEventSourcesRequest(data_parallel_ranks=[6]), timeout=60
                )
            assert from_rpc_error(caught.value).field == "data_parallel_ranks[0]"


async def test_the_end_of_the_server_is_a_clean_end() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        subscription = await kv.subscribe()
        await publish(kv, publisher, 2)
        kv.service.end()
        assert numbers([response.batch for response in await subscription.rest()]) == [0, 1]
        assert await subscription.call.code() is StatusCode.OK


async def test_the_death_of_the_engine_is_the_last_response() -> None:
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        subscription = await kv.subscribe()
        await publish(kv, publisher, 1)
        kv.service.end(errors.engine_dead())
        responses = await subscription.rest()
        assert [response.WhichOneof("event") for response in responses] == ["batch", "error"]
        assert responses[-1].error.code == pb.ERROR_CODE_INTERNAL
        assert await subscription.call.code() is StatusCode.OK


async def test_switched_off() -> None:
    service = KvEventsService(lambda: None, StallWatch(60))
    handlers: dict[str, Handler] = {
        "GetKvEventSources": service.sources,
        "SubscribeKvEvents": service.subscribe,
    }
    async with serve_handlers(handlers) as channel:
        stub: Any = OpenEngineStub(channel)
        request = pb.GetKvEventSourcesRequest(data_parallel_ranks=[0])
        assert not (await stub.GetKvEventSources(request, timeout=60)).sources
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(), timeout=60).read()
        error = from_rpc_error(caught.value)
        assert error.status is StatusCode.FAILED_PRECONDITION
        assert error.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE


async def test_a_subscriber_that_falls_behind_fails_alone() -> None:
    async with (
        publishers() as [publisher],
        kv_service([publisher.described()], retain_batches=200) as kv,
        aio.insecure_channel(kv.target, options=SMALL_WINDOW) as channel,
    ):
        slow: Any = OpenEngineStub(channel).SubscribeKvEvents(
            pb.SubscribeKvEventsRequest(), timeout=60
        )
        await slow.initial_metadata()
        fast = await kv.subscribe()
        sent = 0
        # Until what the slow one has not read is more than connection and log hold.
        while sent < 4000:
            for number in range(100):
                publisher.publish(stored(range(100_000 + sent, 100_000 + sent + 50)), number)
                sent += 1
            await fast.read(100)
        responses = [response async for response in slow]
        assert responses[-1].error.code == pb.ERROR_CODE_OVERLOADED
        assert responses[-1].error.retryable
        assert [response.batch.sequence_number for response in responses[:-1]] == list(
            range(len(responses) - 1)
        )
        assert len(responses) < sent
        assert await slow.code() is StatusCode.OK
        assert numbers(fast.batches) == list(range(sent))


async def test_a_subscriber_that_never_reads_is_dropped() -> None:
    async with (
        publishers() as [publisher],
        kv_service([publisher.described()], stall_timeout=0.5, retain_batches=100) as kv,
        aio.insecure_channel(kv.target, options=SMALL_WINDOW) as channel,
    ):
        stuck: Any = OpenEngineStub(channel).SubscribeKvEvents(
            pb.SubscribeKvEventsRequest(), timeout=60
        )
        await stuck.initial_metadata()
        assert len(kv.service._stalls._writers) == 1
        while kv.service._stalls._writers:
            for _ in range(100):
                publisher.publish(stored(range(50 * publisher.next, 50 * publisher.next + 50)))
            await asyncio.sleep(0.01)
        assert len(kv.feed().log) <= 100


async def test_joins_under_load_meet_the_stream_without_a_seam() -> None:
    """Batches come all the while; after a snapshot of number S the next one is S + 1."""
    async with publishers() as [publisher], kv_service([publisher.described()]) as kv:
        first = await kv.subscribe(include_snapshot=True)
        await publisher.subscribed()
        stop = asyncio.Event()

        async def run() -> None:
            while not stop.is_set():
                number = publisher.next
                events = [stored([number], parent=number - 1 if number % 8 else None)]
                if number >= 400:
                    # From the tail of a chain of eight to its head.
                    events.append(removed([number - 400 + 7 - 2 * (number % 8)]))
                publisher.publish(*events)
                await asyncio.sleep(0.001)

        running = asyncio.ensure_future(run())
        await first.read_to(500)
        for _ in range(JOINS // JOINERS + 1):
            joined = await asyncio.gather(
                *(kv.subscribe(include_snapshot=True) for _ in range(JOINERS))
            )
            await asyncio.gather(*(reader.read(5) for reader in joined))
            last = max(reader.batches[-1].sequence_number for reader in joined)
            await asyncio.gather(*(reader.read_to(last) for reader in joined))
            await first.read_to(last)
            for reader in joined:
                watermark = reader.batches[0].sequence_number
                live = [n for n in numbers(reader.batches) if n > watermark]
                assert live == list(range(watermark + 1, last + 1))
                assert reader.set.blocks.keys() == first.set.blocks.keys()
                reader.call.cancel()
        stop.set()
        await running


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_sources(host: str) -> None:
    own = Publisher(
        3,
        "tcp://127.0.0.1:45557",
        "tcp://127.0.0.1:45657",
        topic="kv",
        bound="tcp://*:45557",
        bound_replay="tcp://*:45657",
        buffer_steps=10,
        hwm=20,
        max_queue_size=30,
    )
    async with kv_service(
        [own], zmq_host=host, zmq_topic="t", address=f"{host}:50051", advertise_host="10.1.2.3"
    ) as kv:
        response = await kv.stub.GetKvEventSources(pb.GetKvEventSourcesRequest(), timeout=60)
        over_grpc, over_zmq, of_vllm = response.sources
        reached = host if host == "127.0.0.1" else "10.1.2.3"
        republisher = kv.bridge.ranks[3].republisher
        assert over_grpc == pb.KvEventSource(
            transport="grpc",
            endpoint_addr=pb.KvEndpoint(host=reached, port=50051, protocol="grpc"),
            encoding="protobuf",
            data_parallel_rank=3,
            schema_version=1,
            buffer_steps=10_000,
        )
        assert over_zmq == pb.KvEventSource(
            transport="zmq",
            endpoint_addr=pb.KvEndpoint(
                host=reached, port=republisher.endpoint.port, protocol="tcp"
            ),
            replay_endpoint=f"tcp://{reached}:{republisher.replay_endpoint.port}",
            topic="t",
            encoding="protobuf",
            data_parallel_rank=3,
            schema_version=1,
            buffer_steps=10_000,
            hwm=10_000,
        )
        assert of_vllm == pb.KvEventSource(
            transport="zmq",
            endpoint_addr=pb.KvEndpoint(host="10.1.2.3", port=45557, protocol="tcp"),
            replay_endpoint="tcp://10.1.2.3:45657",
            topic="kv",
            encoding="msgpack",
            data_parallel_rank=3,
            buffer_steps=10,
            hwm=20,
            max_queue_size=30,
        )


async def test_a_source_that_nobody_can_reach_is_not_told(tmp_path: Any) -> None:
    ipc = Publisher(0, f"ipc://{tmp_path}/kv")
    async with kv_service([ipc], address="unix:/tmp/x") as kv:
        response = await kv.stub.GetKvEventSources(pb.GetKvEventSourcesRequest(), timeout=60)
        assert [(source.transport, source.encoding) for source in response.sources] == [
            ("grpc", "protobuf"),
            ("zmq", "protobuf"),
        ]
        assert not response.sources[0].HasField("endpoint_addr")

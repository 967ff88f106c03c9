"""An operator's own `--kv-events-config`, on two ranks; and one that publishes nothing.

One engine is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence

import aiohttp
import grpc
import pytest
import zmq

from openengine_vllm.client import OpenEngineError, generate_request
from openengine_vllm.kv_events.decode import decode
from openengine_vllm.kv_events.endpoints import TcpEndpoint, free_ports, parse_tcp
from openengine_vllm.kv_events.receiver import Receiver
from openengine_vllm.kv_events.source import END
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.call_metadata import TOLD_RANK_KEY
from tests.engine.peers import EngineSlot, Peer, connected
from tests.engine.streams import gather
from tests.support.calls import PATIENCE_SECONDS
from tests.support.kv_messages import BlockSet
from tests.support.models import model_dir
from tests.support.server import start_server

RANKS = 2
BLOCK = 32
TOPIC = "kv@two"
BUFFER_STEPS, HWM, QUEUE = 77, 1234, 4321
FLAGS = (
    *("--data-parallel-size", str(RANKS)),
    *("--max-model-len", "256"),
    *("--max-num-seqs", "4"),
    *("--block-size", str(BLOCK)),
    *("--kv-cache-memory-bytes", "64M"),
    "--enforce-eager",
    *("--http-port", "0"),
)


class Subscription:
    """One rank's batches over gRPC, and the set that follows."""

    def __init__(self, peer: Peer, rank: int) -> None:
        self._call = peer.stub.SubscribeKvEvents(
            pb.SubscribeKvEventsRequest(data_parallel_ranks=[rank])
        )
        self.rank = rank
        self.set = BlockSet()
        self.last = -1

    async def begin(self) -> None:
        """Wait until the server has accepted."""
        await self._call.initial_metadata()

    async def next(self) -> pb.KvEventBatch:
        """The next batch."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            response = await self._call.read()
        assert isinstance(response, pb.SubscribeKvEventsResponse)
        assert response.batch.data_parallel_rank == self.rank
        self.set.apply(response.batch)
        self.last = response.batch.sequence_number
        return response.batch


async def generate(peer: Peer, rank: int, token: int) -> None:
    """Have a rank store two blocks."""
    request = generate_request([token] * (2 * BLOCK + 1), {"max_tokens": 1})
    request.kv.data_parallel_rank = rank
    call = peer.stub.Generate(request)
    assert (TOLD_RANK_KEY, str(rank)) in tuple(await call.initial_metadata())
    await gather(call, request)


@contextlib.asynccontextmanager
async def socket(kind: int, endpoint: TcpEndpoint, topic: str = "") -> AsyncIterator[Receiver]:
    """Connected to what was advertised."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    opened = context.socket(kind)
    if kind == zmq.SUB:
        opened.setsockopt(zmq.SUBSCRIBE, topic.encode())
    opened.connect(str(endpoint))
    try:
        with Receiver(opened) as receiver:
            yield receiver
    finally:
        context.destroy(linger=0)


async def replay(source: pb.KvEventSource) -> list[list[bytes]]:
    """All messages of a source, from its first on."""
    endpoint = parse_tcp(source.replay_endpoint)
    assert endpoint is not None
    assert not endpoint.is_wildcard
    async with socket(zmq.DEALER, endpoint) as receiver, asyncio.timeout(PATIENCE_SECONDS):
        receiver.socket.send_multipart([b"", bytes(8)])
        messages = []
        while (frames := await receiver.receive())[2] != END:
            assert frames[1] == source.topic.encode()
            messages.append(frames[2:])
        return messages


def address(source: pb.KvEventSource) -> TcpEndpoint:
    """Where it is."""
    return TcpEndpoint(source.endpoint_addr.host, source.endpoint_addr.port)


def numbers(messages: Sequence[Sequence[bytes]]) -> list[int]:
    """Of messages on ZMQ."""
    return [int.from_bytes(message[0], "big") for message in messages]


def check_sources(sources: dict[tuple[str, str], pb.KvEventSource], ports: range) -> None:
    """One rank's; the ports are vLLM's two and our two."""
    vllm, own = sources["zmq", "msgpack"], sources["zmq", "protobuf"]
    assert (vllm.topic, vllm.buffer_steps) == (TOPIC, BUFFER_STEPS)
    assert (vllm.hwm, vllm.max_queue_size) == (HWM, QUEUE)
    assert own.topic == ""
    told = []
    for source in (vllm, own):
        endpoint, replays = address(source), parse_tcp(source.replay_endpoint)
        assert replays is not None
        assert not endpoint.is_wildcard
        assert not replays.is_wildcard
        told += [endpoint.port, replays.port]
    assert told == list(ports)


async def check_live(peer: Peer, source: pb.KvEventSource, subscription: Subscription) -> None:
    """A batch of vLLM's own, from the address that was advertised."""
    rank = source.data_parallel_rank
    async with socket(zmq.SUB, address(source), TOPIC) as receiver:
        reading = asyncio.ensure_future(receiver.receive())
        token = 200
        while not reading.done():
            await generate(peer, rank, token)
            await subscription.next()
            token += 1
        topic, _, data = await reading
    assert topic == TOPIC.encode()
    batch = decode(data)
    assert batch.rank == rank
    [event] = batch.events
    assert 200 <= event.token_ids[0] < token


@pytest.mark.timeout(600)
async def test_two_ranks_with_ports_of_the_operators(engines: EngineSlot) -> None:
    engines.clear()
    first = free_ports(4 * RANKS)
    ports = [range(first + rank, first + 4 * RANKS, RANKS) for rank in range(RANKS)]
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{ports[0][0]}",
        "replay_endpoint": f"tcp://*:{ports[0][1]}",
        "topic": TOPIC,
        "buffer_steps": BUFFER_STEPS,
        "hwm": HWM,
        "max_queue_size": QUEUE,
    }
    arguments = (
        *("--model", str(model_dir("tiny_llama"))),
        *("--port", "0"),
        *("--kv-events-config", json.dumps(config)),
        *("--kv-zmq-port", str(ports[0][2])),
        *("--kv-zmq-replay-port", str(ports[0][3])),
    )
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(
            start_server(
                *arguments,
                *FLAGS,
                VLLM_SERVER_DEV_MODE="1",
                VLLM_CPU_OMP_THREADS_BIND="nobind",
                OMP_NUM_THREADS="1",
            )
        )
        peer = await stack.enter_async_context(connected(server))
        every = [await peer.client.kv_event_sources([rank]) for rank in range(RANKS)]
        sources = [{(s.transport, s.encoding): s for s in told.sources} for told in every]
        for rank, of_rank in enumerate(sources):
            assert len(every[rank].sources) == len(of_rank) == 3
            assert {source.data_parallel_rank for source in of_rank.values()} == {rank}
            check_sources(of_rank, ports[rank])

        subscriptions = [Subscription(peer, rank) for rank in range(RANKS)]
        for subscription in subscriptions:
            await subscription.begin()
        # Each rank counts for itself.
        for token in range(100, 103):
            await generate(peer, 1, token)
            assert (await subscriptions[1].next()).sequence_number == token - 100
        await generate(peer, 0, 100)
        assert (await subscriptions[0].next()).sequence_number == 0
        assert [len(subscription.set.blocks) for subscription in subscriptions] == [2, 6]

        for rank, of_rank in enumerate(sources):
            theirs = await replay(of_rank["zmq", "msgpack"])
            ours = await replay(of_rank["zmq", "protobuf"])
            assert numbers(theirs) == numbers(ours) == list(range((1, 3)[rank]))
            assert {decode(message[1]).rank for message in theirs} == {rank}
            batches = [pb.KvEventBatch.FromString(message[1]) for message in ours]
            assert {batch.data_parallel_rank for batch in batches} == {rank}
            await check_live(peer, of_rank["zmq", "msgpack"], subscriptions[rank])

        # Both are told of a reset at once, though neither does anything.
        http = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"http://{server.ready['http']}/reset_prefix_cache"
        async with http.post(url) as response:
            assert (await response.json())["success"]
        for subscription in subscriptions:
            before = subscription.last
            batch = await subscription.next()
            assert batch.sequence_number == before + 1
            assert [event.WhichOneof("event") for event in batch.events] == ["all_blocks_cleared"]


async def test_a_configuration_that_publishes_nothing(scored: Peer) -> None:
    assert not (await scored.client.kv_event_sources()).sources
    with pytest.raises(OpenEngineError) as refused:
        await anext(scored.client.subscribe_kv_events())
    assert refused.value.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE
    assert refused.value.status is grpc.StatusCode.FAILED_PRECONDITION
    await scored.generate("The fox", max_tokens=1)

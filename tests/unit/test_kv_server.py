"""KV events in the whole server, from publishers that the test scripts."""

from __future__ import annotations

import asyncio
import socket

import pytest
from grpc import StatusCode

from openengine_vllm.client import Client, OpenEngineError
from openengine_vllm.process import StartError
from openengine_vllm.protocol import v1 as pb
from tests.support.kv_messages import stored
from tests.support.kv_publisher import publishers
from tests.unit.live_server import live_server


async def test_batches_from_before_the_server_was_ready() -> None:
    async with publishers(2) as made:
        made[0].publish(stored([1]))
        made[1].publish(stored([2]))
        described = [publisher.described() for publisher in made]
        async with (
            live_server(kv_publishers=described) as live,
            Client(live.address) as client,
        ):
            sources = (await client.kv_event_sources([1])).sources
            assert [(s.transport, s.encoding, s.data_parallel_rank) for s in sources] == [
                ("grpc", "protobuf", 1),
                ("zmq", "protobuf", 1),
                ("zmq", "msgpack", 1),
            ]
            assert sources[0].endpoint_addr.port == live.port
            stream = client.subscribe_kv_events(include_snapshot=True)
            async with asyncio.timeout(20):
                batches = [(await anext(stream)).batch for _ in made]
            assert [(b.data_parallel_rank, b.sequence_number) for b in batches] == [(0, 0), (1, 0)]
            await stream.aclose()


async def test_subscriptions_end_with_the_engine() -> None:
    async with publishers() as [publisher]:
        publisher.publish(stored([1]))
        async with (
            live_server("--no-exit-on-engine-death", kv_publishers=[publisher.described()]) as live,
            Client(live.address) as client,
        ):
            stream = client.subscribe_kv_events(include_snapshot=True)
            async with asyncio.timeout(20):
                await anext(stream)
                live.engine.dead = True
                with pytest.raises(OpenEngineError) as caught:
                    await anext(stream)
            assert caught.value.code == pb.ERROR_CODE_INTERNAL
            assert caught.value.retryable


async def test_an_engine_without_publishers() -> None:
    async with live_server() as live, Client(live.address) as client:
        assert not (await client.kv_event_sources()).sources
        with pytest.raises(OpenEngineError) as caught:
            await anext(client.subscribe_kv_events())
        assert caught.value.status is StatusCode.FAILED_PRECONDITION


async def test_a_port_that_is_taken_stops_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with publishers() as [publisher]:
            with pytest.raises(StartError, match=f"127.0.0.1:{port}"):
                async with live_server(
                    "--kv-zmq-port", port, kv_publishers=[publisher.described()]
                ):
                    pass

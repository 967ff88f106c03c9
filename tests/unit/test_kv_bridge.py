"""The bridge as a program of its own, and the commands that show what it serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from typing import Any

import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from openengine_vllm.client import Client, OpenEngineError
from openengine_vllm.client.commands import main
from openengine_vllm.kv_events.endpoints import free_ports
from openengine_vllm.protocol import v1 as pb
from tests.support.calls import eventually
from tests.support.kv_bridge import PROGRAM, connections, kv_bridge
from tests.support.kv_messages import removed, stored
from tests.support.kv_publisher import publishers


async def command(*arguments: str) -> list[str]:
    process = await asyncio.create_subprocess_exec(*PROGRAM, *arguments, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().splitlines()


def test_neither_vllm_nor_torch_is_needed() -> None:
    code = (
        "import sys, openengine_vllm.kv_bridge, openengine_vllm.kv_bridge_server\n"
        "print({'vllm', 'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr


async def test_two_ranks_from_the_first_on() -> None:
    async with publishers(2) as made:
        for publisher in made:
            publisher.rank += 3
        arguments = ("--first-rank", "3", *connections(made))
        made[0].publish(stored([1, 2]))
        made[1].publish(stored([7]))
        async with kv_bridge(*arguments) as (address, ready, _), Client(address) as client:
            assert ready["ranks"] == "3,4"
            health = await client.health()
            assert health.state == pb.HEALTH_STATE_READY
            assert {check.name for check in health.checks} == {
                "grpc",
                "publisher.3",
                "publisher.4",
            }
            info = await client.require_compatible()
            assert info.instance_id == ready["instance"]
            sources = (await client.kv_event_sources()).sources
            assert [
                (source.data_parallel_rank, source.transport, source.encoding) for source in sources
            ] == [
                (rank, *kind)
                for rank in (3, 4)
                for kind in (("grpc", "protobuf"), ("zmq", "protobuf"), ("zmq", "msgpack"))
            ]
            assert [
                source.endpoint_addr.port for source in sources if source.encoding == "msgpack"
            ] == [publisher.ports[0] for publisher in made]
            with pytest.raises(OpenEngineError) as caught:
                await client.model_info("m")
            assert caught.value.status is StatusCode.UNIMPLEMENTED
            async with aio.insecure_channel(address) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(
                    health_pb2.HealthCheckRequest(service="openengine.v1.OpenEngine")
                )
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            seen: dict[int, int] = {}
            async with contextlib.aclosing(
                client.subscribe_kv_events(include_snapshot=True)
            ) as responses:
                async for response in responses:
                    seen[response.batch.data_parallel_rank] = response.batch.sequence_number
                    if len(seen) == 2:
                        break
            assert seen == {3: 0, 4: 0}
            lines = await command("kv-sources", "--target", address, "--rank", "4")
            assert len(lines) == 3
            assert all("rank=4" in line for line in lines)


async def test_it_serves_before_its_publisher_is_there() -> None:
    port = free_ports(1)
    arguments = ("--connect", f"tcp://127.0.0.1:{port}")
    async with publishers(0) as made, kv_bridge(*arguments) as (address, *_), Client(address) as c:
        health = await c.health()
        assert health.state == pb.HEALTH_STATE_READY
        assert health.checks[1].state == pb.HEALTH_STATE_NOT_READY
        subscription = c.subscribe_kv_events()
        first = asyncio.ensure_future(anext(subscription))
        async with publishers(ports=(port, 0)) as [publisher]:
            await publisher.subscribed()

            async def is_ready() -> bool:
                return (await c.health()).checks[1].state == pb.HEALTH_STATE_READY

            await eventually(is_ready, "the publisher is there")
            while not first.done():
                publisher.publish(stored([publisher.next]))
                await asyncio.sleep(0.05)
            assert (await first).batch.events[0].block_stored.block_hashes
            await subscription.aclose()
        assert made == []


async def test_the_commands_show_batches() -> None:
    async with publishers() as [publisher]:
        publisher.publish(stored([1, 2], lora_name="ad"), stored([5], parent=2))
        publisher.publish(removed([5]), {"type": "AllBlocksCleared"})
        publisher.publish()
        async with kv_bridge(*connections([publisher])) as (address, *_):
            for flags in ((), ("--json",)):
                process = await asyncio.create_subprocess_exec(
                    *PROGRAM,
                    *("kv-events", "--target", address, "--start", "1", "--snapshot", *flags),
                    stdout=subprocess.PIPE,
                )
                assert process.stdout is not None
                async with asyncio.timeout(60):
                    line = (await process.stdout.readline()).decode()
                process.send_signal(signal.SIGINT)
                await process.wait()
                if flags:
                    assert json.loads(line)["batch"]["sequence_number"] in ("1", "2")
                else:
                    assert "rank=0 seq=" in line


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        code: Any = main(["kv-bridge", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "--connect"),
        (("--connect", "127.0.0.1:5"), "tcp://HOST:PORT"),
        (("--connect", "tcp://*:5557"), "wildcard"),
        (("--connect", "tcp://h:0"), "tcp://HOST:PORT"),
        (("--connect", "tcp://h:1", "--replay", "x"), "--replay: 'x'"),
        (
            ("--connect", "tcp://h:1", "--connect", "tcp://h:2", "--replay", "tcp://h:3"),
            "1 for 2",
        ),
        (("--connect", "tcp://h:1", "--first-rank", "-1"), "whole number"),
    ],
)
def test_wrong_usage(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    assert reason in usage_error(capsys, *arguments)

"""Processes killed outright: what clients hear, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2

from openengine_vllm.client import generate_request
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.channel import client_options
from openengine_vllm.protocol.errors import from_rpc_error
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub
from tests.engine.peers import EngineSlot
from tests.support.calls import (
    ENDLESS_FLAGS,
    ENDLESS_TOKENS,
    RunningCall,
    eventually,
    standard_status,
)
from tests.support.memory_limit import memory_group
from tests.support.models import model_dir
from tests.support.processes import engine_core, footprint, runs, worker
from tests.support.server import ENGINE_FLAGS, STOP_SECONDS, start_server


@pytest.fixture(autouse=True)
def _room(engines: EngineSlot) -> None:
    engines.clear()


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder for the socket files of a server and its engine; their paths must be short."""
    with tempfile.TemporaryDirectory(prefix="oe-") as folder:
        yield Path(folder)


def flags(*more: str) -> tuple[str, ...]:
    model = ("--model", str(model_dir("tiny_llama")))
    return (*model, "--port", "0", *ENGINE_FLAGS, *ENDLESS_FLAGS, *more)


def connect(target: str) -> aio.Channel:
    return aio.insecure_channel(target, options=client_options())


async def running_calls(channel: aio.Channel) -> list[RunningCall]:
    calls = [
        RunningCall(
            channel,
            generate_request(
                "Once upon a time", {"max_tokens": ENDLESS_TOKENS, "ignore_eos": True}
            ),
        )
        for _ in range(3)
    ]
    for call in calls:
        await call.tokens(5)
    return calls


async def kill_under_streams(kill: Callable[[], None], channel: aio.Channel) -> None:
    """Have one of the engine's processes killed and see what clients hear of it."""
    stub = OpenEngineStub(channel)
    calls = await running_calls(channel)
    kill()
    await eventually(lambda: _not_ready(stub), "Health says NOT_READY")
    health = await stub.Health(pb.HealthRequest(include_inference_probe=True))
    checks = {check.name: check.state for check in health.checks}
    assert checks["grpc"] == pb.HEALTH_STATE_READY
    for name in ("scheduler", "model", "inference_probe"):
        assert checks[name] == pb.HEALTH_STATE_NOT_READY
    assert await standard_status(channel) == health_pb2.HealthCheckResponse.NOT_SERVING

    with pytest.raises(aio.AioRpcError) as caught:
        await stub.Generate(generate_request("again", {"max_tokens": 1})).read()
    error = from_rpc_error(caught.value)
    assert error.status is grpc.StatusCode.UNAVAILABLE
    assert error.code == pb.ERROR_CODE_INTERNAL
    assert error.retryable

    for call in calls:
        assert await call.end() is grpc.StatusCode.OK
        [failure] = call.errors
        assert failure.code == pb.ERROR_CODE_INTERNAL
        assert failure.retryable
        last = call.responses[-1]
        assert last.HasField("error"), "nothing follows the error"
        assert last.usage.completion_tokens >= len(call.token_ids) > 0
        assert call.finished == []


async def _not_ready(stub: OpenEngineStub) -> bool:
    state = (await stub.Health(pb.HealthRequest())).state
    assert state in (pb.HEALTH_STATE_READY, pb.HEALTH_STATE_NOT_READY)
    return state == pb.HEALTH_STATE_NOT_READY


async def test_killed_engine_ends_the_server(sockets: Path) -> None:
    with start_server(*flags(), VLLM_RPC_BASE_PATH=str(sockets)) as server:
        held = footprint(server)
        async with connect(server.target) as channel:
            await kill_under_streams(engine_core(server).kill, channel)
        assert await asyncio.to_thread(server.process.wait, STOP_SECONDS) == 1
        held.wait_gone()
        assert _entries(sockets) == []


async def test_worker_out_of_memory_and_a_server_told_to_stay(sockets: Path) -> None:
    """Killed by the kernel for want of memory; where nobody may limit that, as the kernel would."""
    with (
        memory_group() as group,
        start_server(
            *flags("--no-exit-on-engine-death"),
            VLLM_RPC_BASE_PATH=str(sockets),
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
        ) as server,
    ):
        held = footprint(server)
        engine = [engine_core(server), worker(server)]
        async with connect(server.target) as channel:
            if group is None:
                warnings.warn("no control group for memory: killed by the test", stacklevel=1)
                await kill_under_streams(worker(server).kill, channel)
            else:
                await kill_under_streams(partial(group.starve, worker(server).pid), channel)
                assert group.kills == 1
            # vLLM ends its other processes; the server is there all the same.
            await eventually(lambda: not any(map(runs, engine)), "the engine is gone")
            assert server.process.poll() is None
            assert await _not_ready(OpenEngineStub(channel))
        assert await asyncio.to_thread(server.stop) == 1
        held.wait_gone()
        assert _entries(sockets) == []


async def test_killed_server_takes_its_engine_along(sockets: Path) -> None:
    with start_server(*flags(), VLLM_RPC_BASE_PATH=str(sockets)) as server:
        held = footprint(server)
        assert len(held.processes) > 3
        async with connect(server.target) as channel:
            calls = await running_calls(channel)
            server.process.kill()
            for call in calls:
                assert await call.end() is grpc.StatusCode.UNAVAILABLE
        held.wait_gone()
        await eventually(lambda: _entries(sockets) == [], "the engine's files are gone")


async def test_hung_engine_is_found_by_the_probe(sockets: Path) -> None:
    """A stopped process answers nobody, and is not dead either."""
    with start_server(
        *flags("--probe-timeout", "2", "--drain-timeout", "1"),
        VLLM_RPC_BASE_PATH=str(sockets),
    ) as server:
        held = footprint(server)
        core = engine_core(server)
        async with connect(server.target) as channel:
            stub = OpenEngineStub(channel)
            core.suspend()
            waiting = RunningCall(channel, generate_request("Once", {"max_tokens": 1}))
            assert not await _not_ready(stub), "the light check asks nobody"
            aborted = RunningCall(channel, generate_request("Once", {"max_tokens": 1}))
            await eventually(lambda: _is_live(stub, aborted.request), "it is accepted")
            probing = stub.Health(pb.HealthRequest(include_inference_probe=True))
            # What vLLM answers to an abort is not the engine's.
            await stub.Abort(pb.AbortRequest(request_id=aborted.request.request_id))
            assert await aborted.end() is grpc.StatusCode.OK
            health = await probing
            assert health.state == pb.HEALTH_STATE_DEGRADED
            [probe] = [check for check in health.checks if check.name == "inference_probe"]
            assert probe.state == pb.HEALTH_STATE_NOT_READY
            assert probe.message == "the engine did not answer within 2 s"
            assert await standard_status(channel) == health_pb2.HealthCheckResponse.SERVING
            assert not waiting.done

            core.resume()
            assert await waiting.end() is grpc.StatusCode.OK
            assert len(waiting.token_ids) == 1
            health = await stub.Health(pb.HealthRequest(include_inference_probe=True))
            assert health.state == pb.HEALTH_STATE_READY

            core.suspend()
            hung = RunningCall(channel, generate_request("Once", {"max_tokens": 1}))
            await eventually(lambda: _is_live(stub, hung.request), "it is accepted")
            server.process.terminate()
            assert await hung.end() is grpc.StatusCode.OK
            assert [error.code for error in hung.errors] == [pb.ERROR_CODE_DRAINING]
        assert await asyncio.to_thread(server.process.wait, STOP_SECONDS) == 0
        held.wait_gone()
        assert _entries(sockets) == []


async def _is_live(stub: OpenEngineStub, request: pb.GenerateRequest) -> bool:
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.Generate(request).read()
    return from_rpc_error(caught.value).code == pb.ERROR_CODE_DUPLICATE_REQUEST


def _entries(folder: Path) -> list[str]:
    return os.listdir(folder)

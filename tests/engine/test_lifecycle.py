"""A server's life: what it says while it loads, how it drains, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from google.rpc import status_pb2
from grpc import aio
from grpc_health.v1 import health_pb2

from openengine_vllm.client import Client, OpenEngineError, generate_request
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.channel import client_options
from openengine_vllm.protocol.errors import STATUS_DETAILS_KEY
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub
from tests.engine.peers import EngineSlot
from tests.support.calls import (
    ENDLESS_FLAGS,
    ENDLESS_TOKENS,
    RunningCall,
    eventually,
    standard_status,
)
from tests.support.models import model_dir
from tests.support.processes import descendants, footprint, is_spawned
from tests.support.server import (
    ENGINE_FLAGS,
    STOP_SECONDS,
    ServerProcess,
    start_server,
)

DRAINED_TOKENS = 2000
"""Tokens that take an engine some seconds, of which a drain has to wait."""
IMPLEMENTED = (
    *("Generate", "GetEngineInfo", "GetModelInfo", "Abort"),
    *("Drain", "GetLoad", "SubscribeRuntimeEvents"),
    *("GetKvEventSources", "SubscribeKvEvents"),
)
"""RPCs that have to wait for the engine; the others may say that they aren't there."""
SERVICES = ("", "openengine.v1.OpenEngine")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(autouse=True)
def _room(engines: EngineSlot) -> None:
    engines.clear()


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder for all socket files of a server and its engine; their paths must be short."""
    with tempfile.TemporaryDirectory(prefix="oe-") as folder:
        yield Path(folder)


def flags(*more: str) -> tuple[str, ...]:
    return ("--model", str(model_dir("tiny_llama")), *ENGINE_FLAGS, *ENDLESS_FLAGS, *more)


def request(tokens: int) -> pb.GenerateRequest:
    return generate_request("The quick brown fox", {"max_tokens": tokens, "ignore_eos": True})


@asynccontextmanager
async def connect(target: str) -> AsyncIterator[tuple[aio.Channel, Client]]:
    async with (
        aio.insecure_channel(target, options=client_options()) as channel,
        Client(target) as client,
    ):
        yield channel, client


async def standard_health(channel: aio.Channel) -> set[int]:
    return {await standard_status(channel, name) for name in SERVICES}


async def state(client: Client) -> pb.HealthState.ValueType:
    return (await client.health()).state


async def rejection(client: Client) -> OpenEngineError:
    with pytest.raises(OpenEngineError) as caught:
        await client.complete(request(1))
    return caught.value


async def test_life_on_a_unix_socket(sockets: Path, tmp_path: Path) -> None:
    path = sockets / "server"
    config = tmp_path / "config.yaml"
    config.write_text("drain-timeout: 3600\nmax-model-len: 512\nserved_model_name: [fox, dog]\n")
    with start_server(
        *flags("--uds", str(path), f"--config={config}", "--max_model_len", "3k"),
        wait=False,
        VLLM_RPC_BASE_PATH=str(sockets),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    ) as server:
        target = f"unix:{path}"
        await eventually(path.is_socket, "the socket is there before the model is")
        async with connect(target) as (channel, client):
            await _says_that_it_starts(channel, client)
            await asyncio.to_thread(server.wait_ready)
            assert await state(client) == pb.HEALTH_STATE_READY
            assert await standard_health(channel) == {SERVING}
            assert server.lines[0].startswith(f"openengine ready grpc={target} model=")
            assert server.lines[1].startswith("try: ")
            assert f"--target {target}" in server.lines[1]
            assert server.ready["role"] == "aggregated"
            info = await client.engine_info()
            assert info.instance_id == server.ready["instance"]
            assert server.ready["model"] == "fox"
            model = await client.model_info("dog")
            assert model.max_context_length == 3000, "vLLM's flags, and which of two counts"

            held = footprint(server)
            assert path in held.files
            assert any(str(file).startswith("/dev/shm/") for file in held.files)
            calls = [RunningCall(channel, request(DRAINED_TOKENS)) for _ in range(3)]
            for call in calls:
                await call.tokens(5)
            server.process.send_signal(signal.SIGTERM)
            await eventually(lambda: _is(client, pb.HEALTH_STATE_DRAINING), "it says it drains")
            assert await standard_health(channel) == {NOT_SERVING}
            error = await rejection(client)
            assert error.code == pb.ERROR_CODE_DRAINING
            assert error.status is grpc.StatusCode.UNAVAILABLE
            assert error.retryable
            assert not any(call.done for call in calls), "the rejection came before the end"
            for call in calls:
                assert await call.end() is grpc.StatusCode.OK
                assert [end.reason for end in call.finished] == [pb.FINISH_REASON_LENGTH]
                assert len(call.token_ids) == DRAINED_TOKENS
        assert server.process.wait(STOP_SECONDS) == 0
        held.wait_gone()
        assert _entries(sockets) == []
        assert server.process.stdout is not None
        assert server.process.stdout.read() == "", "stdout has the two lines and nothing else"


def _entries(folder: Path) -> list[str]:
    return os.listdir(folder)


async def _is(client: Client, wanted: pb.HealthState.ValueType) -> bool:
    return await state(client) == wanted


async def _says_that_it_starts(channel: aio.Channel, client: Client) -> None:
    health = await client.health(include_inference_probe=True)
    assert health.state == pb.HEALTH_STATE_STARTING
    checks = {check.name: check for check in health.checks}
    assert checks["grpc"].state == pb.HEALTH_STATE_READY
    for name in ("scheduler", "model", "inference_probe"):
        assert checks[name].state == pb.HEALTH_STATE_STARTING
        assert "loading" in checks[name].message
    assert await standard_health(channel) == {NOT_SERVING}
    for method in pb.SERVICE.methods:
        if method.name != "Health":
            await _rejects_while_starting(channel, method.name)


async def _rejects_while_starting(channel: aio.Channel, name: str) -> None:
    rpc: aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
        f"/{pb.SERVICE.full_name}/{name}"
    )
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in rpc(b""):
            pass
    error = caught.value
    if name not in IMPLEMENTED and error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return
    assert error.code() is grpc.StatusCode.UNAVAILABLE, name
    assert "starting" in (error.details() or "")
    trailers = dict(error.trailing_metadata() or ())
    [detail] = status_pb2.Status.FromString(trailers[STATUS_DETAILS_KEY]).details
    message = pb.EngineError()
    assert detail.Unpack(message)
    assert message.code == pb.ERROR_CODE_OVERLOADED
    assert message.retryable
    assert message.retry_after_ms > 0


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("listening", signal.SIGTERM),
        ("listening", signal.SIGINT),
        ("guides", signal.SIGTERM),
        ("engine", signal.SIGTERM),
        ("engine", signal.SIGINT),
    ],
)
async def test_signal_while_loading(moment: str, number: signal.Signals, sockets: Path) -> None:
    moments: dict[str, Callable[[ServerProcess], bool]] = {
        "listening": lambda server: "event=listening" in server.stderr(),
        # The process that checks guides, a while before vLLM starts one.
        "guides": lambda server: len(descendants(server)) > 1,
        "engine": lambda server: any(map(is_spawned, descendants(server))),
    }
    with start_server(
        *flags("--port", "0"), wait=False, VLLM_RPC_BASE_PATH=str(sockets), warm=False
    ) as server:
        await eventually(lambda: moments[moment](server), moment)
        held = footprint(server)
        server.process.send_signal(number)
        assert await asyncio.to_thread(server.process.wait, STOP_SECONDS) == 0
        held.wait_gone()
        assert _entries(sockets) == []
        assert server.process.stdout is not None
        assert server.process.stdout.read() == ""
        assert "Traceback" not in server.stderr().partition("event=signal")[2].partition("vllm")[0]


async def test_drain_deadline(sockets: Path) -> None:
    path = sockets / "server"
    with start_server(*flags("--uds", str(path), "--drain-timeout", "0.5"), wait=False) as server:
        assert server.process.stdout is not None
        server.process.stdout.close()
        await eventually(path.is_socket, "it listens")
        async with connect(f"unix:{path}") as (channel, client):
            await eventually(
                lambda: _is(client, pb.HEALTH_STATE_READY), "it is ready though nobody reads so"
            )
            held = footprint(server)
            calls = [RunningCall(channel, request(ENDLESS_TOKENS)) for _ in range(3)]
            for call in calls:
                await call.tokens(5)
            server.process.send_signal(signal.SIGTERM)
            for call in calls:
                await _ends_with_draining(call)
        assert await asyncio.to_thread(server.process.wait, STOP_SECONDS) == 0
        held.wait_gone()


@pytest.mark.parametrize(
    ("numbers", "patience", "watched"),
    [
        ((signal.SIGTERM,), "0", False),
        ((signal.SIGINT,), "0.5", True),
        ((signal.SIGTERM,), "1", True),
        ((signal.SIGTERM, signal.SIGTERM), "3600", True),
        ((signal.SIGTERM, signal.SIGINT), "3600", False),
    ],
)
async def test_signals_under_streams_that_do_not_end(
    numbers: tuple[signal.Signals, ...], patience: str, watched: bool, sockets: Path
) -> None:
    """With somebody who watches a drain of his own, that would have waited for them."""
    path = sockets / "server"
    with start_server(*flags("--uds", str(path), "--drain-timeout", patience)) as server:
        held = footprint(server)
        async with connect(f"unix:{path}") as (channel, client):
            calls = [RunningCall(channel, request(ENDLESS_TOKENS)) for _ in range(2)]
            for call in calls:
                await call.tokens(5)
            drain = OpenEngineStub(channel).Drain(pb.DrainRequest())
            if watched:
                assert (await anext(aiter(drain))).state == pb.DRAIN_STATE_STARTED
            for number in numbers:
                server.process.send_signal(number)
                if len(numbers) > 1:
                    await eventually(lambda: _drains_or_is_gone(client), "it drains")
            for call in calls:
                await _ends_with_draining(call)
            if watched:
                responses = [response async for response in drain]
                assert responses[-1].state == pb.DRAIN_STATE_COMPLETE
                assert responses[-1].in_flight_requests == 0
                counts = [response.in_flight_requests for response in responses]
                assert counts == sorted(counts, reverse=True)
        assert await asyncio.to_thread(server.process.wait, STOP_SECONDS) == 0
        held.wait_gone()


async def _drains_or_is_gone(client: Client) -> bool:
    try:
        return await state(client) == pb.HEALTH_STATE_DRAINING
    except OpenEngineError as error:
        return error.status is grpc.StatusCode.UNAVAILABLE


async def _ends_with_draining(call: RunningCall) -> None:
    assert await call.end() is grpc.StatusCode.OK
    assert len(call.errors) == 1, call.responses[-1]
    [error] = call.errors
    assert error.code == pb.ERROR_CODE_DRAINING
    assert error.retryable
    last = call.responses[-1]
    assert last.HasField("error")
    assert last.usage.completion_tokens >= len(call.token_ids) > 0
    assert call.finished == []


async def test_ctrl_c_in_the_terminal_then_again() -> None:
    """The whole process group gets each SIGINT, the engine's processes too."""
    with start_server(*flags("--port", "0", "--drain-timeout", "3600")) as server:
        held = footprint(server)
        group = os.getpgid(server.process.pid)
        async with connect(server.target) as (channel, client):
            short, long = (
                RunningCall(channel, request(tokens)) for tokens in (400, ENDLESS_TOKENS)
            )
            await short.tokens(5)
            await long.tokens(5)
            os.killpg(group, signal.SIGINT)
            await eventually(lambda: _is(client, pb.HEALTH_STATE_DRAINING), "it says it drains")
            assert await short.end() is grpc.StatusCode.OK
            assert len(short.token_ids) == 400
            assert [end.reason for end in short.finished] == [pb.FINISH_REASON_LENGTH]
            assert not long.done
            os.killpg(group, signal.SIGINT)
            await _ends_with_draining(long)
        assert await asyncio.to_thread(server.process.wait, STOP_SECONDS) == 0
        held.wait_gone()

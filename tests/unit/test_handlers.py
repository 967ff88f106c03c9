"""Methods and errors at the edge, over a real connection."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio

from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError, from_rpc_error
from openengine_vllm.services.handlers import Context, service_handler
from tests.unit.scripted_engine import serve_handlers

METHODS = {method.name: method for method in pb.SERVICE.methods}


async def call(channel: aio.Channel, name: str, data: bytes = b"") -> bytes:
    path = f"/{pb.SERVICE.full_name}/{name}"
    if METHODS[name].server_streaming:
        streaming: aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
        return b"".join([message async for message in streaming(data, timeout=60)])
    unary: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
    return await unary(data, timeout=60)


async def failure(channel: aio.Channel, name: str, data: bytes = b"") -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        await call(channel, name, data)
    return caught.value


@pytest.mark.parametrize("name", METHODS)
async def test_every_method_without_an_implementation_says_so(name: str) -> None:
    async with serve_handlers({}) as channel:
        error = from_rpc_error(await failure(channel, name))

    assert error.status is StatusCode.UNIMPLEMENTED
    assert error.code_name == "UNSUPPORTED_FEATURE"
    assert error.details == {"rpc": name}


async def test_a_method_that_is_not_in_the_schema_is_a_mistake() -> None:
    async def handler(request: Any, context: Context) -> None: ...

    with pytest.raises(ValueError, match="NoSuch"):
        service_handler(pb.SERVICE, {"NoSuch": handler})


async def test_messages_go_in_and_out() -> None:
    async def health(request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        assert isinstance(request, pb.HealthRequest)
        check = pb.HealthCheck(message=request.model)
        return pb.HealthResponse(state=pb.HEALTH_STATE_DEGRADED, checks=[check])

    async def generate(request: pb.GenerateRequest, context: Context) -> None:
        await context.write(pb.GenerateResponse(request_id=request.request_id).SerializeToString())

    async with serve_handlers({"Health": health, "Generate": generate}) as channel:
        answer = await call(channel, "Health", pb.HealthRequest(model="m").SerializeToString())
        event = await call(
            channel, "Generate", pb.GenerateRequest(request_id="r").SerializeToString()
        )

    assert pb.HealthResponse.FromString(answer).checks[0].message == "m"
    assert pb.GenerateResponse.FromString(event).request_id == "r"


@pytest.mark.parametrize("name", ["Health", "Generate"])
async def test_an_error_is_a_status_with_its_detail(name: str) -> None:
    raised = errors.overloaded("full", retry_after_ms=5)

    async def handler(request: Any, context: Context) -> None:
        raise raised

    async with serve_handlers({name: handler}) as channel:
        error = await failure(channel, name)

    assert error.code() is StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "full"
    read = from_rpc_error(error)
    assert (read.code, read.retryable, read.retry_after_ms) == (raised.code, True, 5)


@pytest.mark.parametrize("name", ["Health", "Generate"])
async def test_a_fault_is_internal_and_tells_nothing(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def handler(request: Any, context: Context) -> None:
        raise RuntimeError("secret")

    async with serve_handlers({name: handler}) as channel:
        error = await failure(channel, name)

    assert error.code() is StatusCode.INTERNAL
    assert "secret" not in str(error.details())
    read = from_rpc_error(error)
    assert read.code_name == "INTERNAL"
    assert not read.retryable
    assert "handler failed" in "".join(capsys.readouterr())


async def test_a_handlers_own_abort_stands() -> None:
    async def handler(request: Any, context: Context) -> None:
        await context.abort(StatusCode.DATA_LOSS, "gone")

    async with serve_handlers({"Health": handler}) as channel:
        error = await failure(channel, "Health")

    assert error.code() is StatusCode.DATA_LOSS
    assert error.details() == "gone"


async def test_a_cancelled_call_cancels_its_handler() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(request: Any, context: Context) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serve_handlers({"Generate": handler}) as channel:
        method: aio.UnaryStreamMultiCallable[bytes, bytes]
        method = channel.unary_stream(f"/{pb.SERVICE.full_name}/Generate")
        stream = method(b"", timeout=60)
        await started.wait()
        stream.cancel()
        await asyncio.wait_for(cancelled.wait(), 60)


@pytest.mark.parametrize("name", ["Health", "Generate"])
@pytest.mark.parametrize("data", [b"\xff", b"\x12\xff\xff", b"\x12\x01\xff"])
async def test_bytes_that_are_no_message_do_not_reach_a_handler(name: str, data: bytes) -> None:
    async def handler(request: Any, context: Context) -> None:
        raise AssertionError("called")

    async with serve_handlers({name: handler}) as channel:
        error = await failure(channel, name, data)

    assert error.code() in (StatusCode.INTERNAL, StatusCode.INVALID_ARGUMENT)
    assert isinstance(from_rpc_error(error), OpenEngineError)


async def test_other_services_are_not_answered() -> None:
    async with serve_handlers({}) as channel:
        method: aio.UnaryUnaryMultiCallable[bytes, bytes]
        method = channel.unary_unary("/other.Service/Health")
        with pytest.raises(aio.AioRpcError) as caught:
            await method(b"", timeout=60)

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

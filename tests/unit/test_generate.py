"""Generate over a real connection, with an engine whose output the test decides."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpc import StatusCode, aio

from openengine_vllm.lifecycle import Lifecycle
from openengine_vllm.limits import RequestLimits
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError, from_rpc_error
from openengine_vllm.registry import EndReason, RequestRegistry
from openengine_vllm.services.generate import GenerateService
from openengine_vllm.services.stalls import StallWatch
from tests.unit.scripted_engine import Service, request, serve


async def refusal(service: Service, message: pb.GenerateRequest) -> OpenEngineError:
    with pytest.raises(aio.AioRpcError) as caught:
        await service.generate(message).read()
    return from_rpc_error(caught.value)


async def abort(service: Service, request_id: str = "r") -> pb.AbortResponse:
    answer: pb.AbortResponse = await service.call("Abort", pb.AbortRequest(request_id=request_id))
    return answer


async def test_events_come_as_the_engine_makes_them() -> None:
    async with serve() as service:
        call = service.generate(request())
        (collector,) = await service.engine.accepted("r")
        collector.put("a")
        events = aiter(call)
        first = await anext(events)
        collector.put("b.", "stop")
        rest = [event async for event in events]

        assert first.token.text == "a"
        assert [event.WhichOneof("event") for event in rest] == ["token", "finished"]
        assert rest[-1].usage.total_tokens == 2 + 3
        assert await call.code() is StatusCode.OK
        await service.idle()
        assert service.engine.aborted == set()
        assert service.registry.has_ended("r")


async def test_a_rejection_comes_before_any_event() -> None:
    async with serve() as service:
        error = await refusal(service, request(stopping=pb.StoppingOptions(max_tokens=0)))

        assert error.status is StatusCode.INVALID_ARGUMENT
        assert error.field == "stopping.max_tokens"
        assert service.engine.collectors == {}
        assert not service.registry.has_ended("r")


async def test_a_server_that_is_starting_draining_or_dead_takes_nothing() -> None:
    async with serve(ready=False) as service:
        assert (await refusal(service, request())).code_name == "OVERLOADED"
        service.make_ready()
        service.lifecycle.drain()
        assert (await refusal(service, request())).code_name == "DRAINING"
        service.lifecycle.fail()
        dead = await refusal(service, request())
        assert dead.code_name == "INTERNAL"
        assert dead.status is StatusCode.UNAVAILABLE
        assert dead.retryable


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.engine_dead(), StatusCode.UNAVAILABLE),
        (errors.invalid_argument("prompt", "too long"), StatusCode.INVALID_ARGUMENT),
        (RuntimeError("secret"), StatusCode.INTERNAL),
    ],
)
async def test_what_the_engine_refuses_leaves_no_trace(
    error: Exception, status: StatusCode
) -> None:
    async with serve() as service:
        service.engine.refusal = error
        refused = await refusal(service, request())

        assert refused.status is status
        assert "secret" not in refused.message
        assert len(service.registry) == service.registry.sequences == 0
        assert not service.registry.has_ended("r")
        service.engine.refusal = None
        call = service.generate(request())
        (collector,) = await service.engine.accepted("r")
        collector.put("a", "length")
        assert [event async for event in call]


async def test_a_live_id_is_refused() -> None:
    async with serve() as service:
        call = service.generate(request())
        await service.engine.accepted("r")
        error = await refusal(service, request())
        call.cancel()

        assert error.status is StatusCode.ALREADY_EXISTS
        assert error.code_name == "DUPLICATE_REQUEST"


async def test_capacity_counts_outputs() -> None:
    async with serve(capacity=4) as service:
        call = service.generate(request("a", sampling=pb.SamplingParams(num_sequences=3)))
        await service.engine.accepted("a")
        two = request("b", sampling=pb.SamplingParams(num_sequences=2))
        error = await refusal(service, two)
        other = service.generate(request("c"))
        await service.engine.accepted("c")

        assert error.status is StatusCode.RESOURCE_EXHAUSTED
        assert service.registry.sequences == 4
        call.cancel()
        other.cancel()
        await service.idle()


async def test_a_cancelled_call_stops_the_engines_part() -> None:
    async with serve() as service:
        call = service.generate(request(sampling=pb.SamplingParams(num_sequences=2)))
        collectors = await service.engine.accepted("r")
        collectors[0].put("a", "length")
        await call.read()
        call.cancel()
        await service.idle()

        assert service.engine.aborted == {"r/1"}
        assert service.registry.sequences == 0


async def test_a_deadline_stops_the_engines_part() -> None:
    async with serve() as service:
        method: aio.UnaryStreamMultiCallable[pb.GenerateRequest, bytes]
        method = service.channel.unary_stream(
            f"/{pb.SERVICE.full_name}/Generate", pb.GenerateRequest.SerializeToString
        )
        call = method(request(), timeout=1)
        await service.engine.accepted("r")
        assert await call.code() is StatusCode.DEADLINE_EXCEEDED
        await service.idle()

        assert service.engine.aborted == {"r/0"}


async def test_a_call_that_is_cancelled_before_acceptance_leaves_no_trace() -> None:
    async with serve() as service:
        service.engine.gate.clear()
        admitted = asyncio.Event()
        service.registry.watch(admitted.set)
        call = service.generate(request())
        await admitted.wait()
        call.cancel()
        await service.idle()

        assert not service.registry.has_ended("r")


async def test_abort_ends_the_stream_and_frees_the_id_at_once() -> None:
    async with serve() as service:
        call = service.generate(request())
        await service.engine.accepted("r")
        answer = await abort(service)
        assert answer.status == pb.ABORT_STATUS_ABORTED
        assert service.engine.aborted == {"r/0"}
        del service.engine.collectors["r"]
        again = service.generate(request())
        (collector,) = await service.engine.accepted("r")
        collector.put("a", "length")

        events = [event async for event in call]
        assert [event.finished.reason for event in events] == [pb.FINISH_REASON_CANCELLED]
        assert events[-1].HasField("usage")
        assert [event.WhichOneof("event") async for event in again] == ["token", "finished"]


async def test_abort_before_acceptance_ends_the_stream() -> None:
    async with serve() as service:
        service.engine.gate.clear()
        admitted = asyncio.Event()
        service.registry.watch(admitted.set)
        call = service.generate(request())
        await admitted.wait()
        assert (await abort(service)).status == pb.ABORT_STATUS_ABORTED

        events = [event async for event in call]
        assert [event.finished.reason for event in events] == [pb.FINISH_REASON_CANCELLED]
        assert events[-1].usage == pb.Usage(prompt_tokens=2, total_tokens=2, cached_prompt_tokens=0)
        assert (await abort(service)).status == pb.ABORT_STATUS_ALREADY_FINISHED


async def test_a_dying_engine_is_a_terminal_event() -> None:
    async with serve() as service:
        call = service.generate(request())
        await service.engine.accepted("r")
        for entry in service.registry:
            entry.end(EndReason.ENGINE_DEAD)
        events = [event async for event in call]

        assert [event.WhichOneof("event") for event in events] == ["error"]
        assert events[0].error.code == pb.ERROR_CODE_INTERNAL
        assert await call.code() is StatusCode.OK
        await service.idle()


@pytest.mark.parametrize("turns", range(4))
async def test_a_client_that_leaves_as_the_engine_accepts(turns: int) -> None:
    """Whatever turn of the loop it is in: what the engine has accepted ends there as well."""
    accepting = asyncio.Event()
    events: list[str] = []

    class Stream:
        def close(self) -> None:
            events.append("closed")

    class Engine:
        async def submit(self, *_: Any) -> Stream:
            try:
                await accepting.wait()
            except asyncio.CancelledError:
                events.append("given up")
                raise
            events.append("accepted")
            return Stream()

    service = GenerateService(Lifecycle(), RequestRegistry(1), RequestLimits(), StallWatch(60))
    entry = RequestRegistry(1).admit("r", 1)
    record: Any = SimpleNamespace(trace_headers=None)
    call = asyncio.ensure_future(
        service._accept(cast(Any, Engine()), cast(Any, None), record, entry)
    )
    await asyncio.sleep(0.01)
    accepting.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    call.cancel()
    try:
        stream: Any = await call
        stream.close()  # It was accepted before the client left: the caller has it to close.
    except asyncio.CancelledError:
        pass
    assert events in (["given up"], ["accepted", "closed"])

"""Drain over a real connection, on requests that end when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import StatusCode, aio

from openengine_vllm import drain as drain_module
from openengine_vllm.drain import Drains
from openengine_vllm.lifecycle import Lifecycle
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import from_rpc_error
from openengine_vllm.registry import EndReason, RequestRegistry
from openengine_vllm.services import drain as drain_service
from tests.unit.scripted_engine import Collector, Service, request, serve

STARTED, IN_PROGRESS = pb.DRAIN_STATE_STARTED, pb.DRAIN_STATE_IN_PROGRESS
COMPLETE = pb.DRAIN_STATE_COMPLETE


@pytest.fixture(autouse=True)
def _no_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_service, "_LONGEST_SILENCE_SECONDS", 3600)


async def running(service: Service, request_id: str) -> tuple[Any, Collector]:
    """A call that has had its first token."""
    call = service.generate(request(request_id))
    (collector,) = await service.engine.accepted(request_id)
    collector.put("a")
    await anext(aiter(call))
    return call, collector


async def until(events: AsyncIterator[pb.DrainResponse], in_flight: int) -> None:
    async for event in events:
        assert event.state == IN_PROGRESS
        assert event.HasField("open_kv_sessions")
        if event.in_flight_requests == in_flight:
            return
    raise AssertionError(f"the drain ended before {in_flight} requests were in flight")


async def rest(call: Any) -> list[Any]:
    return [event async for event in call]


def shape(events: list[pb.DrainResponse]) -> list[tuple[int, int]]:
    return [(event.state, event.in_flight_requests) for event in events]


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("abort", [True, False])
@pytest.mark.parametrize("deadline", [{}, {"deadline_ms": 0}, {"deadline_ms": 60_000}])
async def test_an_idle_server_has_drained_at_once(
    stop: bool, abort: bool, deadline: dict[str, int]
) -> None:
    async with serve() as service:
        events = await rest(
            service.drain(stop_accepting_new_requests=stop, abort_after_deadline=abort, **deadline)
        )
        assert shape(events)[0] == (STARTED, 0)
        assert shape(events)[-1] == (COMPLETE, 0)
        assert all(event.HasField("in_flight_requests") for event in events)
        state = pb.HEALTH_STATE_DRAINING if stop else pb.HEALTH_STATE_READY
        assert service.lifecycle.state == state
        assert service.reported == ([state] if stop else [])


@pytest.mark.parametrize("deadline", [{}, {"deadline_ms": 600_000}])
async def test_it_tells_each_change_and_ends_with_the_last_request(
    deadline: dict[str, int],
) -> None:
    async with serve() as service:
        calls = [await running(service, name) for name in "abc"]
        drain = service.drain(stop_accepting_new_requests=True, **deadline)
        events = aiter(drain)
        assert shape([await anext(events)]) == [(STARTED, 3)]
        await until(events, 3)
        with pytest.raises(aio.AioRpcError) as refused:
            await service.generate(request("late")).read()
        error = from_rpc_error(refused.value)
        assert (error.code_name, error.status) == ("DRAINING", StatusCode.UNAVAILABLE)
        assert error.retryable
        for left, (call, collector) in zip((2, 1, 0), calls, strict=True):
            collector.put("b.", "stop")
            assert (await rest(call))[-1].HasField("usage")
            if left:
                await until(events, left)
        assert shape([event async for event in events])[-1] == (COMPLETE, 0)
        assert await drain.code() is StatusCode.OK


async def test_it_speaks_at_least_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_service, "_LONGEST_SILENCE_SECONDS", 0.01)
    async with serve() as service:
        await running(service, "a")
        events = aiter(service.drain())
        await anext(events)
        for _ in range(5):
            await until(events, 1)


async def test_a_drain_that_accepts_leaves_the_server_ready() -> None:
    async with serve() as service:
        call, collector = await running(service, "a")
        events = aiter(service.drain())
        assert shape([await anext(events)]) == [(STARTED, 1)]
        assert service.lifecycle.state == pb.HEALTH_STATE_READY
        _, other = await running(service, "b")
        await until(events, 2)
        collector.put("", "length")
        await rest(call)
        await until(events, 1)
        other.put("", "length")
        assert shape([event async for event in events])[-1] == (COMPLETE, 0)


@pytest.mark.parametrize("milliseconds", [0, 20])
async def test_a_deadline_without_abort_fails_the_drain_and_nothing_else(
    milliseconds: int,
) -> None:
    async with serve() as service:
        call, collector = await running(service, "a")
        drain = service.drain(stop_accepting_new_requests=True, deadline_ms=milliseconds)
        *progress, last = await rest(drain)
        assert shape(progress)[0] == (STARTED, 1)
        assert {event.state for event in progress[1:]} <= {IN_PROGRESS}
        assert last.error.code == pb.ERROR_CODE_DRAINING
        assert last.error.retryable
        assert f"{milliseconds} ms" in last.error.message
        assert last.in_flight_requests == 1
        assert await drain.code() is StatusCode.OK
        assert service.lifecycle.state == pb.HEALTH_STATE_DRAINING
        collector.put("b", "length")
        assert (await rest(call))[-1].finished.reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("milliseconds", [0, 20])
@pytest.mark.parametrize("stop", [True, False])
async def test_a_deadline_with_abort_fails_what_runs(milliseconds: int, stop: bool) -> None:
    async with serve() as service:
        call, _ = await running(service, "a")
        events = await rest(
            service.drain(
                stop_accepting_new_requests=stop,
                deadline_ms=milliseconds,
                abort_after_deadline=True,
            )
        )
        assert shape(events)[0] == (STARTED, 1)
        assert shape(events)[-1] == (COMPLETE, 0)
        [last] = await rest(call)
        assert last.error.code == pb.ERROR_CODE_DRAINING
        assert last.error.retryable
        assert last.HasField("usage")
        assert service.engine.aborted == {"a/0"}
        if not stop:
            await running(service, "b")


async def test_a_drain_goes_on_without_its_client() -> None:
    async with serve() as service:
        call, _ = await running(service, "a")
        drain = service.drain(
            stop_accepting_new_requests=True, deadline_ms=300, abort_after_deadline=True
        )
        await anext(aiter(drain))
        drain.cancel()
        [last] = await rest(call)
        assert last.error.code == pb.ERROR_CODE_DRAINING


async def test_two_drains_at_once_each_keep_to_their_own_terms() -> None:
    async with serve() as service:
        call, collector = await running(service, "a")
        patient = service.drain()
        await anext(aiter(patient))
        hasty = await rest(service.drain(stop_accepting_new_requests=True, deadline_ms=0))
        assert hasty[-1].error.code == pb.ERROR_CODE_DRAINING
        collector.put("", "length")
        await rest(call)
        assert shape(await rest(patient))[-1] == (COMPLETE, 0)


@pytest.mark.parametrize("noticed", [True, False])
async def test_an_engine_that_dies_fails_the_drain(noticed: bool) -> None:
    async with serve() as service:
        call, collector = await running(service, "a")
        drain = service.drain(stop_accepting_new_requests=True)
        await anext(aiter(drain))
        service.engine.dead = True
        if noticed:
            service.lifecycle.fail()
        collector.break_(RuntimeError())
        await rest(call)
        last = (await rest(drain))[-1]
        assert last.error.code == pb.ERROR_CODE_INTERNAL
        assert last.error.retryable


async def test_a_server_that_starts_or_is_dead_does_not_drain() -> None:
    async with serve(ready=False) as service:
        for code in ("OVERLOADED", "INTERNAL"):
            with pytest.raises(aio.AioRpcError) as caught:
                await service.drain(stop_accepting_new_requests=True).read()
            error = from_rpc_error(caught.value)
            assert (error.code_name, error.status) == (code, StatusCode.UNAVAILABLE)
            service.lifecycle.fail()
        assert service.reported == []


async def _nothing() -> None:
    return


async def test_a_hurried_drain_ends_what_runs_and_waits_for_its_last_words() -> None:
    registry = RequestRegistry(8)
    entry = registry.admit("a", 1)
    drain = await Drains(Lifecycle(), registry, _nothing).begin(
        stop_accepting=True, deadline=None, abort_after_deadline=False
    )
    await asyncio.sleep(0)
    told = asyncio.Event()
    entry.on_end(lambda _: told.set())
    drain.hurry()
    await told.wait()
    assert entry.end_reason is EndReason.DRAINED
    assert not drain.done
    registry.close(entry)
    await drain.finished
    assert drain.error is None


async def test_a_client_that_does_not_read_does_not_hold_a_drain_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drain_module, "_LAST_WORDS_SECONDS", 0.01)
    registry = RequestRegistry(8)
    entry = registry.admit("a", 1)
    drain = await Drains(Lifecycle(), registry, _nothing).begin(
        stop_accepting=True, deadline=0, abort_after_deadline=True
    )
    await drain.finished
    assert entry.closed
    assert drain.in_flight == 0

"""SubscribeRuntimeEvents over a real connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc import StatusCode, aio

from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import from_rpc_error
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub
from openengine_vllm.services.runtime_events import Allowance
from tests.support.calls import eventually
from tests.unit.scripted_engine import Service, scheduler_stats, serve

FORWARD_PASS = pb.RUNTIME_EVENT_TYPE_FORWARD_PASS
BATCH = pb.RUNTIME_EVENT_TYPE_BATCH
QUEUE = pb.RUNTIME_EVENT_TYPE_QUEUE
TRANSFER = pb.RUNTIME_EVENT_TYPE_TRANSFER

SMALL_WINDOW = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.use_local_subchannel_pool", 1),
)
"""Channel options with which little is in flight to a client that does not read."""


async def subscribed(service: Service, *types: pb.RuntimeEventType.ValueType) -> Any:
    """A subscription that the server has taken."""
    call = service.subscribe(*types)
    await call.initial_metadata()
    return call


async def rest(call: Any) -> list[pb.RuntimeEvent]:
    """All events to the end, which is a clean one."""
    events = [response.runtime_event async for response in call]
    assert await call.code() is StatusCode.OK
    return events


def busy(**fields: Any) -> Any:
    return scheduler_stats(num_running_reqs=3, prefill=1, decode=2, **fields)


async def test_one_step_in_all_its_events() -> None:
    async with serve() as service:
        service.engine.stats.configure((4,), 101, prefix_caching=True)
        call = await subscribed(service)
        service.engine.stats.record(
            4,
            busy(
                iteration=9,
                num_waiting_reqs=1,
                num_skipped_waiting_reqs=2,
                kv_cache_usage=0.1,
                kv_connector_stats={"bytes": [5, 6]},
            ),
        )
        service.events.end()
        events = await rest(call)
        assert [(event.type, dict(event.attributes)) for event in events] == [
            (
                FORWARD_PASS,
                {
                    "rank": "4",
                    "passes": "1",
                    "iteration": "9",
                    "duration_ms": "2.500",
                    "prefill_requests": "1",
                    "prefill_tokens": "10",
                    "decode_requests": "2",
                    "decode_tokens": "2",
                },
            ),
            (
                BATCH,
                {
                    "rank": "4",
                    "running_requests": "3",
                    "prefill_batch_size": "1",
                    "decode_batch_size": "2",
                    "used_kv_blocks": "10",
                    "total_kv_blocks": "101",
                },
            ),
            (
                QUEUE,
                {
                    "queue": "engine",
                    "rank": "4",
                    "queued_requests": "3",
                    "deferred_requests": "2",
                },
            ),
            (TRANSFER, {"rank": "4", "connector.bytes_count": "2", "connector.bytes_sum": "11"}),
        ]
        assert [event.event_id for event in events] == [f"instance-{n:016d}" for n in range(4)]
        assert len({event.timestamp_unix_nanos for event in events}) == 1


async def test_passes_are_told_each_and_batches_and_queues_when_they_change() -> None:
    async with serve() as service:
        call = await subscribed(service)
        for stats in (busy(), busy(), busy(num_waiting_reqs=1), scheduler_stats()):
            service.engine.stats.record(0, stats)
        service.events.end()
        assert [event.type for event in await rest(call)] == [
            *(FORWARD_PASS, BATCH, QUEUE),
            FORWARD_PASS,
            *(FORWARD_PASS, QUEUE),
            *(BATCH, QUEUE),
        ]


async def test_requests_that_come_and_go() -> None:
    async with serve() as service:
        call = await subscribed(service, QUEUE)
        entry = service.registry.admit("a", 3)
        service.registry.close(entry)
        service.events.end()
        assert [dict(event.attributes) for event in await rest(call)] == [
            {"queue": "server", "live_requests": "1", "live_sequences": "3"},
            {"queue": "server", "live_requests": "0", "live_sequences": "0"},
        ]


async def test_each_subscriber_gets_its_types_under_the_same_ids() -> None:
    async with serve() as service:
        everything = await subscribed(service)
        passes = await subscribed(service, FORWARD_PASS, FORWARD_PASS)
        others = await subscribed(service, BATCH, QUEUE)
        for _ in range(3):
            service.engine.stats.record(0, busy())
            service.registry.forget(service.registry.admit("a", 1))
        service.events.end()
        events = await rest(everything)
        ids = [event.event_id for event in events]
        assert ids == sorted(set(ids))
        assert await rest(passes) == [event for event in events if event.type == FORWARD_PASS]
        assert await rest(others) == [event for event in events if event.type != FORWARD_PASS]


async def test_nothing_is_made_unless_somebody_wants_it() -> None:
    async with serve() as service:
        watched = service.engine.stats._watchers
        service.engine.stats.record(0, busy())
        assert watched == []
        call = await subscribed(service, TRANSFER)
        assert len(watched) == 1
        service.engine.stats.record(0, busy())
        assert service.events._log.next == 0
        call.cancel()
        await eventually(lambda: not watched, "the subscriber has left")
        again = await subscribed(service)
        service.events.end()
        assert await rest(again) == []


async def test_events_come_while_the_subscription_lasts() -> None:
    async with serve() as service:
        call = await subscribed(service, FORWARD_PASS)
        for iteration in range(200):
            service.engine.stats.record(0, busy(iteration=iteration))
            response = await anext(aiter(call))
            assert response.runtime_event.attributes["iteration"] == str(iteration)


async def test_events_that_cost_too_much_are_merged() -> None:
    """Two subscribers may be told of 100 events a second, and are told of 3,000 passes."""
    async with serve(deliveries=200) as service:
        passes = await subscribed(service, FORWARD_PASS)
        everything = await subscribed(service)
        for iteration in range(3000):
            stats = busy(
                iteration=iteration,
                num_waiting_reqs=iteration % 7,
                kv_connector_stats={"bytes": [5, 6]},
            )
            service.engine.stats.record(0, stats)
        service.events.end()
        events = await rest(everything)
        told = [event.attributes for event in events if event.type == FORWARD_PASS]
        assert sum(int(attributes["passes"]) for attributes in told) == 3000
        assert sum(int(attributes["decode_tokens"]) for attributes in told) == 6000
        assert sum(float(attributes["duration_ms"]) for attributes in told) == 7500
        assert [told[0]["passes"], told[-1]["iteration"]] == ["1", "2999"]
        moved = [event.attributes for event in events if event.type == TRANSFER]
        assert sum(int(attributes["connector.bytes_sum"]) for attributes in moved) == 33_000
        queues = [event.attributes for event in events if event.type == QUEUE]
        assert queues[-1]["queued_requests"] == str(2999 % 7), "the last state is told"
        assert [event for event in events if event.type == FORWARD_PASS] == await rest(passes)
        assert len(events) < 300


async def test_a_subscriber_is_not_told_of_what_was_before_it() -> None:
    async with serve(deliveries=1) as service:
        first = await subscribed(service, FORWARD_PASS)
        for iteration in range(10):
            service.engine.stats.record(0, busy(iteration=iteration))
        second = await subscribed(service, FORWARD_PASS)
        service.engine.stats.record(0, busy(iteration=10))
        service.events.end()
        told = [event.attributes for event in await rest(first)]
        assert sum(int(attributes["passes"]) for attributes in told) == 11
        [last] = await rest(second)
        assert (last.attributes["passes"], last.attributes["iteration"]) == ("1", "10")


def test_an_allowance_fills_up_again() -> None:
    allowance = Allowance(10)
    assert allowance.wait(100) == 0
    allowance.spend(25, 100)
    assert allowance.wait(100) == pytest.approx(1.5)
    assert allowance.wait(101) == pytest.approx(0.5)
    assert allowance.wait(101.5) == 0
    allowance.spend(1, 101.5)
    assert allowance.wait(101.5) == pytest.approx(0.1)
    allowance.spend(10, 1000)
    assert allowance.wait(1000) == 0, "a second's worth at most"


async def test_a_slow_subscriber_fails_alone() -> None:
    """The slow one's window fills up; the other reads as they come."""
    async with (
        serve(retained=50) as service,
        aio.insecure_channel(service.target, options=SMALL_WINDOW) as channel,
    ):
        slow = OpenEngineStub(channel).SubscribeRuntimeEvents(
            pb.SubscribeRuntimeEventsRequest(types=[FORWARD_PASS]), timeout=60
        )
        await slow.initial_metadata()
        [behind] = service.events._cursors
        fast = await subscribed(service, FORWARD_PASS)
        made = 0
        async with asyncio.timeout(60):
            while behind._next >= service.events._log.next - 50:
                for _ in range(45):
                    service.engine.stats.record(0, busy())
                for _ in range(45):
                    await anext(aiter(fast))
                made += 45
        responses = [response async for response in slow]
        assert responses[-1].error.code == pb.ERROR_CODE_OVERLOADED
        assert responses[-1].error.retryable
        assert "50 events" in responses[-1].error.message
        assert all(response.HasField("runtime_event") for response in responses[:-1])
        assert 0 < len(responses) < made
        assert await slow.code() is StatusCode.OK
        service.events.end()
        assert await rest(fast) == []


async def test_an_engine_that_dies_ends_subscriptions_with_an_error() -> None:
    async with serve() as service:
        call = await subscribed(service)
        service.engine.stats.record(0, busy())
        service.events.end(errors.engine_dead())
        service.events.end()
        responses = [response async for response in call]
        assert [response.WhichOneof("event") for response in responses] == [
            *(["runtime_event"] * 3),
            "error",
        ]
        assert responses[-1].error.code == pb.ERROR_CODE_INTERNAL
        assert responses[-1].error.retryable
        assert await call.code() is StatusCode.OK


@pytest.mark.parametrize("types", [(0,), (FORWARD_PASS, 5), (-1,)])
async def test_types_that_are_not_there(types: Any) -> None:
    async with serve() as service:
        with pytest.raises(aio.AioRpcError) as caught:
            await anext(aiter(service.subscribe(*types)))
        error = from_rpc_error(caught.value)
        assert error.status is StatusCode.INVALID_ARGUMENT
        assert error.field == f"types[{len(types) - 1}]"


async def test_a_server_that_starts_has_no_events() -> None:
    async with serve(ready=False) as service:
        with pytest.raises(aio.AioRpcError) as caught:
            await anext(aiter(service.subscribe()))
        assert from_rpc_error(caught.value).code_name == "OVERLOADED"

"""Drains of a live engine: those that accept, then those that don't, on one server."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from openengine_vllm.client import OpenEngineError, generate_request
from openengine_vllm.protocol import v1 as pb
from tests.engine.peers import OPERATED_SLOTS, Peer
from tests.support.calls import ENDLESS_TOKENS, RunningCall, eventually, standard_status

STARTED, COMPLETE = pb.DRAIN_STATE_STARTED, pb.DRAIN_STATE_COMPLETE
CALLS = OPERATED_SLOTS + 1
"""One of them waits in the engine's queue."""
TOKENS = 500
"""Tokens that are not all made before a drain can begin."""


async def calls(peer: Peer, tokens: int, number: int = CALLS) -> list[RunningCall]:
    """So many calls that have been admitted, as many of them running as can."""
    request = generate_request("The quick brown fox", {"max_tokens": tokens, "ignore_eos": True})
    started: list[RunningCall] = []
    for index in range(number):
        copy = pb.GenerateRequest()
        copy.CopyFrom(request)
        copy.request_id = f"{request.request_id}-{index}"
        started.append(RunningCall(peer.channel, copy))
        # Those that come together may begin in any order.
        if index < OPERATED_SLOTS:
            await started[-1].tokens(2)

    async def admitted() -> bool:
        load = await peer.client.load()
        return load.running_requests + load.queued_requests == number

    if tokens == ENDLESS_TOKENS:
        await eventually(admitted, "all calls are admitted")
    return started


async def drained(peer: Peer, **fields: Any) -> list[pb.DrainResponse]:
    """A drain to its end, checked for what holds of all of them."""
    responses = [response async for response in peer.stub.Drain(pb.DrainRequest(**fields))]
    first, *between, last = responses
    assert first.state == STARTED
    assert {response.state for response in between} <= {pb.DRAIN_STATE_IN_PROGRESS}
    assert last.state == COMPLETE or last.HasField("error")
    for response in responses:
        assert response.HasField("in_flight_requests")
        assert response.HasField("open_kv_sessions")
    return responses


async def ends_with_draining(call: RunningCall) -> None:
    assert await call.end() is grpc.StatusCode.OK
    [error] = call.errors
    assert error.code == pb.ERROR_CODE_DRAINING
    assert error.retryable
    assert call.responses[-1].HasField("error")
    assert call.responses[-1].HasField("usage")


async def idle(peer: Peer) -> bool:
    load = await peer.client.load()
    return load.running_requests == load.queued_requests == load.used_kv_blocks == 0


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("deadline", [None, 600_000])
async def test_requests_that_end_in_time(abort: bool, deadline: int | None, operated: Peer) -> None:
    running = await calls(operated, TOKENS)
    responses = await drained(operated, deadline_ms=deadline, abort_after_deadline=abort)
    counts = [response.in_flight_requests for response in responses]
    assert 1 <= counts[0] <= CALLS
    assert counts == sorted(counts, reverse=True)
    assert responses[-1].state == COMPLETE
    assert counts[-1] == 0
    for call in running:
        assert await call.end() is grpc.StatusCode.OK
        assert len(call.token_ids) == TOKENS
    assert await operated.is_ready()


@pytest.mark.parametrize("deadline", [0, 300])
async def test_requests_that_outlast_the_deadline(deadline: int, operated: Peer) -> None:
    running = await calls(operated, ENDLESS_TOKENS)
    last = (await drained(operated, deadline_ms=deadline))[-1]
    assert last.error.code == pb.ERROR_CODE_DRAINING
    assert last.in_flight_requests == CALLS
    assert await operated.is_ready()
    for call in running[:OPERATED_SLOTS]:
        await call.tokens(len(call.token_ids) + 1)
    assert not any(call.done for call in running)


@pytest.mark.parametrize("deadline", [0, 300])
async def test_requests_that_the_deadline_ends(deadline: int, operated: Peer) -> None:
    running = await calls(operated, ENDLESS_TOKENS)
    responses = await drained(operated, deadline_ms=deadline, abort_after_deadline=True)
    assert responses[0].in_flight_requests == CALLS
    assert (responses[-1].state, responses[-1].in_flight_requests) == (COMPLETE, 0)
    for call in running:
        await ends_with_draining(call)
    assert await operated.is_ready()
    await eventually(lambda: idle(operated), "idle")


async def test_a_server_that_is_taken_out_of_service(operated: Peer) -> None:
    """It takes nothing more, whatever becomes of the drains, and stops on SIGTERM."""
    running = await calls(operated, ENDLESS_TOKENS)
    patient = operated.stub.Drain(pb.DrainRequest(stop_accepting_new_requests=True))
    assert (await anext(aiter(patient))).state == STARTED
    health = await operated.client.health(include_inference_probe=True)
    assert health.state == pb.HEALTH_STATE_DRAINING
    assert await standard_status(operated.channel) == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(OpenEngineError) as refused:
        await operated.client.complete("late", max_tokens=1)
    assert refused.value.code == pb.ERROR_CODE_DRAINING
    assert refused.value.status is grpc.StatusCode.UNAVAILABLE
    assert refused.value.retryable
    for deadline in (0, 300):
        last = (await drained(operated, stop_accepting_new_requests=True, deadline_ms=deadline))[-1]
        assert last.error.code == pb.ERROR_CODE_DRAINING
    assert not any(call.done for call in running)
    leaving = operated.stub.Drain(
        pb.DrainRequest(
            stop_accepting_new_requests=True, deadline_ms=1000, abort_after_deadline=True
        )
    )
    assert (await anext(aiter(leaving))).state == STARTED
    leaving.cancel()
    for call in running:
        await ends_with_draining(call)
    responses = [response async for response in patient]
    counts = [response.in_flight_requests for response in responses]
    assert counts[0] == CALLS
    assert (responses[-1].state, counts[-1]) == (COMPLETE, 0)
    await eventually(lambda: idle(operated), "idle")
    assert (await operated.client.health()).state == pb.HEALTH_STATE_DRAINING
    subscription = operated.stub.SubscribeRuntimeEvents(pb.SubscribeRuntimeEventsRequest())
    await subscription.initial_metadata()
    assert await asyncio.to_thread(operated.server.stop) == 0
    last_words = [response async for response in subscription]
    assert not any(response.HasField("error") for response in last_words)
    assert await subscription.code() is grpc.StatusCode.OK

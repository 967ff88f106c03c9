"""Health and Abort over a real connection."""

from __future__ import annotations

from typing import Any

import pytest
from grpc import StatusCode, aio

from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError, from_rpc_error
from tests.unit.scripted_engine import Service, request, serve


async def health(service: Service, **fields: Any) -> pb.HealthResponse:
    answer: pb.HealthResponse = await service.call("Health", pb.HealthRequest(**fields))
    return answer


async def refusal(service: Service, name: str, message: Any) -> OpenEngineError:
    with pytest.raises(aio.AioRpcError) as caught:
        await service.call(name, message)
    return from_rpc_error(caught.value)


def states(answer: pb.HealthResponse) -> dict[str, pb.HealthState.ValueType]:
    return {check.name: check.state for check in answer.checks}


async def test_health_follows_the_lifecycle() -> None:
    starting, ready = pb.HEALTH_STATE_STARTING, pb.HEALTH_STATE_READY
    dead = pb.HEALTH_STATE_NOT_READY
    async with serve(ready=False) as service:
        answer = await health(service)
        assert answer.state == starting
        assert states(answer) == {
            "grpc": ready,
            "scheduler": starting,
            "model": starting,
            "role": ready,
        }
        service.make_ready()
        answer = await health(service)
        assert answer.state == ready
        assert set(states(answer).values()) == {ready}
        assert {check.message for check in answer.checks} == {"", "AGGREGATED"}
        service.lifecycle.drain()
        answer = await health(service)
        assert answer.state == pb.HEALTH_STATE_DRAINING
        assert states(answer)["scheduler"] == ready
        service.lifecycle.fail()
        answer = await health(service)
        assert answer.state == dead
        assert states(answer)["scheduler"] == states(answer)["model"] == dead
        assert service.engine.probes == 0


async def test_health_of_a_model() -> None:
    async with serve(ready=False) as service:
        assert (await health(service, model="other")).state == pb.HEALTH_STATE_STARTING
        service.make_ready()
        assert (await health(service, model="model")).state == pb.HEALTH_STATE_READY
        assert (await health(service, model="alias")).state == pb.HEALTH_STATE_READY
        error = await refusal(service, "Health", pb.HealthRequest(model="other"))
        assert error.status is StatusCode.NOT_FOUND
        assert error.field == "model"


async def test_health_of_a_role() -> None:
    async with serve() as service:
        assert (await health(service, role=pb.ENGINE_ROLE_AGGREGATED)).checks
        roles: tuple[Any, ...] = (pb.ENGINE_ROLE_PREFILL, pb.ENGINE_ROLE_DECODE, 9)
        for role in roles:
            error = await refusal(service, "Health", pb.HealthRequest(role=role))
            assert error.code_name == "ROLE_MISMATCH"
            assert error.status is StatusCode.FAILED_PRECONDITION


async def test_a_probe_that_answers() -> None:
    async with serve() as service:
        answer = await health(service, include_inference_probe=True)

        assert answer.state == pb.HEALTH_STATE_READY
        assert states(answer)["inference_probe"] == pb.HEALTH_STATE_READY
        assert service.engine.probes == 1


async def test_a_probe_that_fails_degrades_this_answer_alone() -> None:
    async with serve() as service:
        service.engine.probe_error = errors.overloaded("queue is full")
        answer = await health(service, include_inference_probe=True)

        assert answer.state == pb.HEALTH_STATE_DEGRADED
        assert states(answer)["inference_probe"] == pb.HEALTH_STATE_NOT_READY
        assert answer.checks[-1].message == "queue is full"
        assert (await health(service)).state == pb.HEALTH_STATE_READY


async def test_a_draining_server_is_probed_and_stays_draining() -> None:
    async with serve() as service:
        service.lifecycle.drain()
        service.engine.probe_error = errors.engine_dead()
        answer = await health(service, include_inference_probe=True)

        assert service.engine.probes == 1
        assert answer.state == pb.HEALTH_STATE_DRAINING


@pytest.mark.parametrize("dead", [False, True])
async def test_no_probe_without_an_engine(dead: bool) -> None:
    async with serve(ready=dead) as service:
        if dead:
            service.lifecycle.fail()
        answer = await health(service, include_inference_probe=True)

        assert states(answer)["inference_probe"] == answer.state != pb.HEALTH_STATE_READY
        assert answer.checks[-1].message.startswith("not run")
        assert service.engine.probes == 0


async def test_abort_of_what_is_not_there() -> None:
    async with serve() as service:
        error = await refusal(service, "Abort", pb.AbortRequest(request_id="nobody"))
        assert error.status is StatusCode.NOT_FOUND
        assert error.code_name == "REQUEST_NOT_FOUND"
        session = pb.AbortRequest(kv_session=pb.KvSessionRef(session_id="s"))
        error = await refusal(service, "Abort", session)
        assert error.code_name == "KV_SESSION_NOT_FOUND"
        error = await refusal(service, "Abort", pb.AbortRequest())
        assert error.status is StatusCode.INVALID_ARGUMENT
        assert error.field == "target"


async def test_abort_needs_an_engine() -> None:
    async with serve(ready=False) as service:
        error = await refusal(service, "Abort", pb.AbortRequest(request_id="r"))

        assert error.status is StatusCode.UNAVAILABLE


async def test_abort_of_a_request_that_has_ended() -> None:
    async with serve() as service:
        call = service.generate(request())
        (collector,) = await service.engine.accepted("r")
        collector.put("a", "length")
        assert [event async for event in call]
        await service.idle()
        answer = await service.call("Abort", pb.AbortRequest(request_id="r"))

        assert answer.status == pb.ABORT_STATUS_ALREADY_FINISHED


async def test_abort_of_all_requests() -> None:
    everything = pb.AbortRequest(all_requests=pb.AllRequests())
    async with serve() as service:
        nothing = await service.call("Abort", everything)
        calls = [service.generate(request(name)) for name in ("a", "b")]
        for name in ("a", "b"):
            await service.engine.accepted(name)
        service.lifecycle.drain()
        answer = await service.call("Abort", everything)

        assert nothing.status == pb.ABORT_STATUS_ALREADY_FINISHED
        assert answer.status == pb.ABORT_STATUS_ABORTED
        assert "2 requests" in answer.message
        assert len(service.registry) == 0
        for call in calls:
            events = [event async for event in call]
            assert events[-1].finished.reason == pb.FINISH_REASON_CANCELLED

"""`load`, `drain`, `abort` and `events` as an operator runs them."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from tests.support.scripted import ScriptedServer
from tests.unit.test_client_commands import BOUND, ends, run, server, start

__all__ = ["server"]

LOAD = pb.LoadInfo(
    instance_id="i",
    running_requests=3,
    queued_requests=0,
    used_kv_blocks=7,
    total_kv_blocks=100,
    running_tokens=50,
    waiting_tokens=0,
    decode_batch_size=3,
    ranks=[pb.RankLoadInfo(data_parallel_rank=4, running_requests=3, queued_requests=0)],
    attributes={"prefix_cache_hit_rate": "0.25"},
)


async def test_load(server: ScriptedServer) -> None:
    server.answer("GetLoad", LOAD)
    result = await run("load", "--per-rank", "--target", server.target)
    assert result.code == 0
    assert result.out.splitlines() == [
        "requests               3 running, 0 queued",
        "tokens                 50 running, 0 waiting",
        "batch                  - prefill, 3 decode",
        "kv blocks              7/100",
        "kv sessions            -",
        "prefix_cache_hit_rate  0.25",
        "rank 4: 3 running, 0 queued, - prefill, - decode, kv blocks -/-",
    ]
    [(_, request)] = server.requests
    assert request == pb.GetLoadRequest(include_per_rank=True)


async def test_load_as_json(server: ScriptedServer) -> None:
    server.answer("GetLoad", LOAD)
    result = await run("load", "--json", "--target", server.target)
    value = json.loads(result.out)
    assert value["queued_requests"] == 0
    assert "prefill_batch_size" not in value


async def test_load_is_watched_until_interrupted(server: ScriptedServer) -> None:
    server.answer("GetLoad", LOAD)
    process = await start("load", "--watch", "0.01", "--target", server.target)
    assert process.stdout is not None
    async with asyncio.timeout(BOUND):
        head = (await process.stdout.readline()).decode().split()
        rows = [(await process.stdout.readline()).decode().split() for _ in range(6)]
    process.send_signal(signal.SIGINT)
    assert (await ends(process)).code == 130
    assert head[:3] == ["time", "running", "queued"]
    assert rows[0][1:] == ["3", "0", "50", "0", "-", "3", "7/100"]
    assert rows[1] == ["rank", "4", "3", "0", "-", "-", "-/-"]
    assert len(server.requests) >= 3


def state(name: str, in_flight: int) -> pb.DrainResponse:
    return pb.DrainResponse(
        state=pb.DrainState.Value(f"DRAIN_STATE_{name}"),
        in_flight_requests=in_flight,
        open_kv_sessions=0,
    )


async def test_drain(server: ScriptedServer) -> None:
    server.stream("Drain", state("STARTED", 2), state("IN_PROGRESS", 1), state("COMPLETE", 0))
    result = await run("drain", "--target", server.target)
    assert result.code == 0
    assert result.out.splitlines() == [
        "STARTED  2 requests  0 KV sessions",
        "IN_PROGRESS  1 requests  0 KV sessions",
        "COMPLETE  0 requests  0 KV sessions",
    ]
    [(_, request)] = server.requests
    assert request == pb.DrainRequest(stop_accepting_new_requests=True)


@pytest.mark.parametrize(("seconds", "milliseconds"), [("0", 0), ("1.5", 1500)])
async def test_drain_with_a_deadline_that_passes(
    seconds: str, milliseconds: int, server: ScriptedServer
) -> None:
    error = pb.DrainResponse(error=errors.to_proto(errors.draining("2 requests are in flight")))
    server.stream("Drain", state("STARTED", 2), error)
    arguments = ("--keep-accepting", "--deadline", seconds, "--abort", "--json")
    result = await run("drain", *arguments, "--target", server.target)
    assert result.code == 1
    assert json.loads(result.out)["state"] == "DRAIN_STATE_STARTED"
    assert result.err == "error: DRAINING: 2 requests are in flight (try again later)\n"
    [(_, request)] = server.requests
    assert request == pb.DrainRequest(deadline_ms=milliseconds, abort_after_deadline=True)


async def test_a_drain_that_is_cut_off(server: ScriptedServer) -> None:
    server.stream("Drain", state("STARTED", 2))
    result = await run("drain", "--target", server.target)
    assert result.code == 1
    assert "before the drain was complete" in result.err


async def test_drain_aborts_only_after_a_deadline() -> None:
    result = await run("drain", "--abort")
    assert result.code == 2
    assert "--deadline" in result.err


@pytest.mark.parametrize("seconds", ["-1", "5000000", "nan", "soon"])
async def test_drain_takes_no_such_deadline(seconds: str) -> None:
    result = await run("drain", f"--deadline={seconds}")
    assert result.code == 2
    assert "--deadline" in result.err


async def test_abort(server: ScriptedServer) -> None:
    aborted = pb.AbortResponse(status=pb.ABORT_STATUS_ABORTED, message="aborted")
    server.answer("Abort", aborted)
    assert (await run("abort", "r-1", "--target", server.target))[:2] == (0, "aborted\n")
    result = await run("abort", "--all", "--json", "--target", server.target)
    assert json.loads(result.out)["status"] == "ABORT_STATUS_ABORTED"
    assert [request for _, request in server.requests] == [
        pb.AbortRequest(request_id="r-1"),
        pb.AbortRequest(all_requests=pb.AllRequests()),
    ]


async def test_abort_by_an_engine_of_few_words(server: ScriptedServer) -> None:
    server.answer("Abort", pb.AbortResponse(status=pb.ABORT_STATUS_ALREADY_FINISHED))
    result = await run("abort", "r-1", "--target", server.target)
    assert result[:2] == (0, "already finished\n")


async def test_health_of_a_role(server: ScriptedServer) -> None:
    server.answer("Health", pb.HealthResponse(state=pb.HEALTH_STATE_READY))
    assert (await run("health", "--role", "decode", "--target", server.target)).code == 0
    [(_, request)] = server.requests
    assert request == pb.HealthRequest(role=pb.ENGINE_ROLE_DECODE)


@pytest.mark.parametrize("arguments", [(), ("r-1", "--all")])
async def test_abort_needs_one_target(arguments: tuple[str, ...]) -> None:
    result = await run("abort", *arguments)
    assert result.code == 2
    assert "--all" in result.err


def event(number: int) -> pb.SubscribeRuntimeEventsResponse:
    return pb.SubscribeRuntimeEventsResponse(
        runtime_event=pb.RuntimeEvent(
            event_id=f"i-{number}",
            timestamp_unix_nanos=1_500_000_000,
            type=pb.RUNTIME_EVENT_TYPE_FORWARD_PASS,
            attributes={"rank": "0", "duration_ms": "2.5"},
        )
    )


async def test_events(server: ScriptedServer) -> None:
    server.stream("SubscribeRuntimeEvents", event(0), event(1))
    result = await run(
        "events", "--type", "forward-pass", "--type", "queue", "--target", server.target
    )
    assert result.code == 0
    assert result.out == "00:00:01.500000 FORWARD_PASS duration_ms=2.5 rank=0\n" * 2
    [(_, request)] = server.requests
    assert request == pb.SubscribeRuntimeEventsRequest(
        types=[pb.RUNTIME_EVENT_TYPE_FORWARD_PASS, pb.RUNTIME_EVENT_TYPE_QUEUE]
    )


async def test_events_of_a_subscriber_that_fell_behind(server: ScriptedServer) -> None:
    failure = pb.SubscribeRuntimeEventsResponse(error=errors.to_proto(errors.overloaded("behind")))
    server.stream("SubscribeRuntimeEvents", event(0), failure)
    result = await run("events", "--json", "--target", server.target)
    assert result.code == 1
    assert json.loads(result.out)["runtime_event"]["event_id"] == "i-0"
    assert "OVERLOADED: behind" in result.err

"""What the server counts, from its endpoint, after calls of which the test knows everything."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from openengine_vllm import __version__
from openengine_vllm.grpc_server import LIVENESS_NAME
from openengine_vllm.metrics.instruments import Instrument
from openengine_vllm.metrics.server_metrics import ServerMetrics
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub
from openengine_vllm.registry import EndReason
from openengine_vllm.server import Server
from openengine_vllm.services.stalls import CountingWriter, StallWatch
from tests.support.calls import eventually
from tests.support.scrape import Scrape, scrape
from tests.unit.live_server import LiveServer, live_server
from tests.unit.scripted_engine import request
from tests.unit.test_settings import parse

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
ON = ("--metrics-port", "0")


async def scraped(live: LiveServer) -> Scrape:
    assert live.metrics_address is not None
    return await scrape(live.metrics_address)


async def idle(live: LiveServer) -> None:
    """Wait until no handler runs: a client knows a call's end before its handler does."""

    async def none_runs() -> bool:
        return not (await scraped(live)).sum("openengine_requests_in_flight")

    await eventually(none_runs, "no call runs")


def instruments() -> list[Instrument]:
    metrics = Server(parse(*ON)).metrics
    assert metrics is not None
    return metrics.instruments


async def test_a_request_that_ends_well() -> None:
    async with (
        live_server(*ON) as live,
        aio.insecure_channel(live.address) as channel,
    ):
        stub = OpenEngineStub(channel)
        sampling = pb.SamplingParams(num_sequences=2)
        call = aiter(stub.Generate(request(sampling=sampling), timeout=60))
        first, second = await live.engine.accepted("r")
        first.put("ab", cached=1)
        await anext(call)
        during = await scraped(live)
        first.put("c.", "stop", cached=1)
        second.put("xy", "length")
        assert [event async for event in call]
        await idle(live)
        after = await scraped(live)
    assert during.value("openengine_requests_in_flight", rpc="Generate") == 1
    assert during.value("openengine_live_sequences") == 2
    assert during.value("openengine_generation_tokens_total") == 2
    assert during.value("openengine_prompt_tokens_total") == 0
    assert during.value("openengine_requests_total", rpc="Generate", code="OK") == 0
    assert after.value("openengine_requests_in_flight", rpc="Generate") == 0
    assert after.value("openengine_live_sequences") == 0
    assert after.value("openengine_requests_total", rpc="Generate", code="OK") == 1
    assert after.value("openengine_generation_tokens_total") == 6
    assert after.value("openengine_prompt_tokens_total") == 2
    assert after.value("openengine_cached_prompt_tokens_total") == 1
    assert after.value("openengine_outputs_total", finish="stop") == 1
    assert after.value("openengine_outputs_total", finish="length") == 1
    assert after.value("openengine_time_to_first_token_seconds_count") == 1
    assert after.value("openengine_request_duration_seconds_count", rpc="Generate") == 1
    assert after.sum("openengine_errors_total") == 0


async def test_the_time_between_what_is_handed_over() -> None:
    async with (
        live_server(*ON) as live,
        aio.insecure_channel(live.address) as channel,
    ):
        call = aiter(OpenEngineStub(channel).Generate(request(), timeout=60))
        (output,) = await live.engine.accepted("r")
        messages = 0
        for part, reason in (("a", None), ("bc", None), ("d.", "stop")):
            output.put(part, reason)
            messages += 1
            assert (await anext(call)).HasField("token")
        messages += len([event async for event in call])
        await idle(live)
        after = await scraped(live)
    assert after.value("openengine_stream_messages_total", rpc="Generate") == messages
    assert after.value("openengine_inter_token_latency_seconds_count") == 2
    first = after.value("openengine_time_to_first_token_seconds_sum")
    between = after.value("openengine_inter_token_latency_seconds_sum")
    whole = after.value("openengine_request_duration_seconds_sum", rpc="Generate")
    assert first > 0
    assert between > 0
    assert first + between <= whole


@pytest.mark.parametrize(
    ("message", "metadata", "field", "code"),
    [
        (request(sampling=pb.SamplingParams(top_p=2)), (), "sampling.top_p", "INVALID_ARGUMENT"),
        (request(model="other"), (), "model", "MODEL_NOT_FOUND"),
        (request(), (("openengine-priority", "high"),), "metadata", "INVALID_ARGUMENT"),
    ],
)
async def test_a_request_that_is_rejected(
    message: pb.GenerateRequest, metadata: tuple[tuple[str, str], ...], field: str, code: str
) -> None:
    async with (
        live_server(*ON) as live,
        aio.insecure_channel(live.address) as channel,
    ):
        call = OpenEngineStub(channel).Generate(message, timeout=60, metadata=metadata)
        status = await call.code()
        assert status is not StatusCode.OK
        await idle(live)
        after = await scraped(live)
    assert after.value("openengine_requests_total", rpc="Generate", code=status.name) == 1
    told = {"rpc": "Generate", "code": code, "sent_as": "status"}
    assert after.value("openengine_errors_total", field=field, **told) == 1
    assert after.sum("openengine_errors_total") == 1
    assert after.sum("openengine_outputs_total") == 0
    assert after.value("openengine_time_to_first_token_seconds_count") == 0


async def test_other_calls_bytes_and_rpcs_that_are_not_there() -> None:
    async with (
        live_server(*ON) as live,
        aio.insecure_channel(live.address) as channel,
    ):
        stub = OpenEngineStub(channel)
        await stub.Health(pb.HealthRequest(), timeout=60)
        with pytest.raises(aio.AioRpcError):
            await stub.Embed(pb.EmbedRequest(), timeout=60)
        raw: Any = channel.unary_stream(f"/{pb.SERVICE.full_name}/Generate")
        assert await raw(b"\xff", timeout=60).code() is StatusCode.INVALID_ARGUMENT
        await idle(live)
        after = await scraped(live)
    assert after.value("openengine_requests_total", rpc="Health", code="OK") == 1
    assert after.value("openengine_requests_total", rpc="Embed", code="UNIMPLEMENTED") == 1
    told = {"rpc": "Generate", "code": "INVALID_ARGUMENT", "sent_as": "status"}
    assert after.value("openengine_errors_total", field="", **told) == 1


async def test_a_handler_that_breaks_is_an_internal_error() -> None:
    async with (
        live_server(*ON) as live,
        aio.insecure_channel(live.address) as channel,
    ):
        live.engine.refusal = RuntimeError("broken")
        assert await OpenEngineStub(channel).Generate(request()).code() is StatusCode.INTERNAL
        await idle(live)
        after = await scraped(live)
    assert after.value("openengine_requests_total", rpc="Generate", code="INTERNAL") == 1
    told = {"rpc": "Generate", "code": "INTERNAL", "sent_as": "status"}
    assert after.value("openengine_errors_total", field="", **told) == 1


async def test_requests_that_are_cancelled_aborted_and_failed() -> None:
    async with (
        live_server(*ON) as live,
        aio.insecure_channel(live.address) as channel,
    ):
        stub = OpenEngineStub(channel)
        left = stub.Generate(request("left"), timeout=60)
        (output,) = await live.engine.accepted("left")
        output.put("a")
        await left.read()
        left.cancel()
        await idle(live)
        for reason in (EndReason.ABORTED, EndReason.ENGINE_DEAD):
            call = stub.Generate(request(reason.value), timeout=60)
            await live.engine.accepted(reason.value)
            for entry in live.server.registry:
                entry.end(reason)
            assert [event async for event in call]
        await idle(live)
        after = await scraped(live)
    assert after.value("openengine_requests_total", rpc="Generate", code="CANCELLED") == 1
    assert after.value("openengine_requests_total", rpc="Generate", code="OK") == 2
    assert after.value("openengine_outputs_total", finish="cancelled") == 1
    assert after.value("openengine_outputs_total", finish="unfinished") == 2
    told = {"rpc": "Generate", "code": "INTERNAL", "field": "", "sent_as": "event"}
    assert after.value("openengine_errors_total", **told) == 1
    assert after.sum("openengine_errors_total") == 1
    assert after.value("openengine_generation_tokens_total") == 1


async def test_calls_without_a_key() -> None:
    async with (
        live_server(*ON, "--api-key", "secret") as live,
        aio.insecure_channel(live.address) as channel,
    ):
        code = await OpenEngineStub(channel).Generate(request(), timeout=60).code()
        assert code is StatusCode.UNAUTHENTICATED
        after = await scraped(live)
    assert after.value("openengine_unauthenticated_calls_total") == 1
    assert after.sum("openengine_requests_total") == 0


async def test_subscribers_and_their_events() -> None:
    async with (
        live_server(*ON) as live,
        aio.insecure_channel(live.address) as channel,
    ):
        stub = OpenEngineStub(channel)
        queue = pb.SubscribeRuntimeEventsRequest(types=[pb.RUNTIME_EVENT_TYPE_QUEUE])
        call = stub.SubscribeRuntimeEvents(queue, timeout=60)
        await call.initial_metadata()
        before = await scraped(live)
        entry = live.server.registry.admit("x", 1)
        behind = await scraped(live)
        await call.read()
        after = await scraped(live)
        live.server.registry.close(entry)
        call.cancel()
        await idle(live)
        left = await scraped(live)
    assert before.value("openengine_runtime_events_subscribers") == 1
    assert before.value("openengine_runtime_events_total") == 0
    assert behind.value("openengine_runtime_events_lag") in (0, 1)
    assert after.value("openengine_runtime_events_total") == 1
    assert after.value("openengine_runtime_events_lag") == 0
    assert left.value("openengine_runtime_events_subscribers") == 0
    assert left.value("openengine_runtime_events_dropped_subscribers_total") == 0
    rpc = "SubscribeRuntimeEvents"
    assert after.value("openengine_stream_messages_total", rpc=rpc) == 1
    assert after.value("openengine_inter_token_latency_seconds_count") == 0


async def test_the_states_and_who_answers() -> None:
    async with live_server(*ON, "--max-concurrent-requests", "77") as live:
        ready = await scraped(live)
        live.server.lifecycle.drain()
        draining = await scraped(live)
    states = {"STARTING", "READY", "DRAINING", "NOT_READY"}
    assert {s for s in states if ready.value("openengine_health_state", state=s)} == {"READY"}
    assert draining.value("openengine_health_state", state="DRAINING") == 1
    assert draining.sum("openengine_health_state") == 1
    assert ready.sum("openengine_info", version=__version__) == 1
    assert ready.value("openengine_max_live_sequences") == 77


async def test_the_loop_is_sampled() -> None:
    metrics = ServerMetrics()
    sampling = asyncio.ensure_future(metrics.watch_loop())

    def samples() -> float:
        families = metrics.registry.collect()
        return max(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "openengine_event_loop_lag_seconds_count"
        )

    await eventually(lambda: samples() > 1, "two samples")
    sampling.cancel()


class Reader:
    """Takes a message only when it is told to."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()

    async def write(self, message: bytes) -> None:
        await self.reads.wait()


async def test_a_client_that_does_not_read() -> None:
    metrics, context = ServerMetrics(), Reader()
    watch = StallWatch(0.05, metrics)
    looking = asyncio.ensure_future(watch.run())

    async def write() -> None:
        writer = watch.open(context, "Generate")  # type: ignore[arg-type]
        assert isinstance(writer, CountingWriter)
        try:
            await writer.write([b"x", b"y"])
        finally:
            assert writer.stalled
            writer.close()

    writing = asyncio.ensure_future(write())
    await asyncio.wait([writing])
    assert writing.cancelled()
    looking.cancel()
    cells = metrics.stream("Generate")
    assert (cells.messages.value, cells.stalled.value) == (2, 1)
    assert watch.slow == 0


async def test_without_the_flag_there_is_nothing() -> None:
    async with live_server() as live:
        assert live.metrics_address is None
        assert live.server.metrics is None
        watch = StallWatch(60)
        assert not isinstance(watch.open(Reader(), "Generate"), CountingWriter)  # type: ignore[arg-type]


async def test_liveness_outlives_a_drain_and_not_the_engine() -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    async with (
        live_server("--no-exit-on-engine-death") as live,
        aio.insecure_channel(live.address) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=LIVENESS_NAME), timeout=60)
        assert (await watch.read()).status == serving
        ready = health_pb2.HealthCheckRequest()
        drain = OpenEngineStub(channel).Drain(
            pb.DrainRequest(stop_accepting_new_requests=True), timeout=60
        )
        assert [state async for state in drain]
        assert (await stub.Check(ready, timeout=60)).status != serving
        alive = health_pb2.HealthCheckRequest(service=LIVENESS_NAME)
        assert (await stub.Check(alive, timeout=60)).status == serving
        live.engine.dead = True
        assert (await watch.read()).status != serving


def documented() -> list[tuple[str, ...]]:
    rows = re.findall(r"^\| `(openengine_\w+)` \|(.*)\|$", DOCS.read_text(), re.MULTILINE)
    return [(name, *(cell.strip() for cell in rest.split("|"))) for name, rest in rows]


def test_the_docs_are_the_instruments() -> None:
    ours = [
        (
            each.name,
            each.kind,
            ", ".join(f"`{label}`" for label in each.labels),
            each.unit,
            each.meaning,
        )
        for each in instruments()
    ]
    assert sorted(documented()) == sorted(ours)


def test_names_follow_prometheus() -> None:
    for instrument in instruments():
        assert instrument.name.endswith("_total") == (instrument.kind == "counter")
        assert instrument.name.endswith("_seconds") == (instrument.unit == "seconds")
        assert not set(instrument.labels) & {"le", "instance", "job", "quantile"}

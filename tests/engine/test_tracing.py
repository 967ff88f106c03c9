"""Spans on a live engine: the caller's, ours and vLLM's in one trace; and, with the same
engine, the reasoning tokens that a parser counts.
"""

from __future__ import annotations

import asyncio

import pytest
from grpc import StatusCode, aio
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from openengine_vllm.client import GenerateOptions, generate_request
from openengine_vllm.protocol import v1 as pb
from tests.engine.peers import EngineSlot, Peer, connected
from tests.engine.streams import gather
from tests.support.calls import eventually
from tests.support.collector import Collector, attributes, collector
from tests.support.log_lines import request_lines
from tests.support.models import THINK_END_ID, THINK_ID, model_dir
from tests.support.server import ENGINE_FLAGS, start_server

CALLER_SPAN = "00f067aa0ba902b7"
OURS = "openengine.v1.OpenEngine/Generate"
VLLMS = "llm_request"


def trace_id(number: int) -> str:
    return f"{number:032x}"


def parent(number: int, sampled: bool = True) -> tuple[tuple[str, str], ...]:
    header = f"00-{trace_id(number)}-{CALLER_SPAN}-0{int(sampled)}"
    return (("traceparent", header), ("tracestate", "vendor=1"))


async def test_spans_and_reasoning_tokens(engines: EngineSlot) -> None:
    engines.clear()
    async with collector() as collected:
        flags = (
            *("--model", str(model_dir("tiny_llama_thinking"))),
            *("--served-model-name", "thinking"),
            *("--otlp-traces-endpoint", collected.endpoint),
            *("--reasoning-parser", "deepseek_r1"),
            *("--enable-prefix-caching", "--port", "0"),
            *ENGINE_FLAGS,
        )
        with start_server(*flags) as server:
            async with connected(server) as peer:
                await _one_trace(peer, collected)
                await _no_valid_parent(peer)
                await _reasoning(peer)
            # In a thread: the collector here takes the last spans meanwhile.
            assert await asyncio.to_thread(server.stop) == 0
            lines = {line["request_id"]: line for line in request_lines(server.stderr())}
        own = [span for span in collected.spans if span.name == OURS]
        assert {attributes(span)["gen_ai.response.id"] for span in own} == lines.keys() - {
            "unsampled"
        }
        assert trace_id(3) not in {span.trace_id.hex() for span in collected.spans}
        rejected = next(s for s in own if attributes(s)["gen_ai.response.id"] == "rejected")
        assert rejected.trace_id.hex() == trace_id(2)
        assert attributes(rejected)["rpc.response.status_code"] == "INVALID_ARGUMENT"
        assert rejected.status.code == Status.STATUS_CODE_UNSET
        rootless = next(s for s in own if attributes(s)["gen_ai.response.id"] == "malformed")
        assert rootless.parent_span_id == b""
        assert lines["malformed"]["trace_id"] == rootless.trace_id.hex()
        assert lines["traced"]["trace_id"] == trace_id(1)
        assert lines["open"]["reasoning_tokens"] == "6"


async def _one_trace(peer: Peer, collected: Collector) -> None:
    request = generate_request(
        [20, 30, 40],
        {
            "request_id": "traced",
            "max_tokens": 5,
            "ignore_eos": True,
            "temperature": 0.5,
            "seed": 3,
        },
    )
    metadata = (*parent(1), ("openengine-routing-key", "blue"))
    await gather(peer.stub.Generate(request, metadata=metadata), request, reasoning=True)
    await eventually(lambda: len(collected.in_trace(trace_id(1))) == 2, "two spans")
    spans = collected.in_trace(trace_id(1))
    ours, engines = spans[OURS], spans[VLLMS]
    assert ours.parent_span_id.hex() == CALLER_SPAN
    assert ours.kind == Span.SPAN_KIND_SERVER
    assert ours.trace_state == engines.trace_state == "vendor=1"
    assert engines.parent_span_id == ours.span_id
    assert ours.start_time_unix_nano <= engines.start_time_unix_nano
    assert ours.status.code == Status.STATUS_CODE_UNSET
    told = attributes(ours)
    assert told.pop("gen_ai.response.time_to_first_chunk") > 0
    assert told == {
        "rpc.system.name": "grpc",
        "rpc.method": OURS,
        "rpc.response.status_code": "OK",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "thinking",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": "traced",
        "gen_ai.response.model": "thinking",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.reasoning.output_tokens": 0,
        "openengine.routing_key": "blue",
    }
    assert attributes(engines)["gen_ai.usage.completion_tokens"] == 5


async def _no_valid_parent(peer: Peer) -> None:
    rejected = generate_request([20], {"request_id": "rejected", "max_tokens": 0})
    call = peer.stub.Generate(rejected, metadata=parent(2))
    with pytest.raises(aio.AioRpcError):
        await call.read()
    assert await call.code() is StatusCode.INVALID_ARGUMENT
    for name, metadata in (
        ("malformed", (("traceparent", "00-short-01"), ("tracestate", "vendor=1"))),
        ("unsampled", parent(3, sampled=False)),
    ):
        request = generate_request([20], {"request_id": name, "max_tokens": 1})
        await gather(peer.stub.Generate(request, metadata=metadata), request, reasoning=True)


async def _reasoning(peer: Peer) -> None:
    options = GenerateOptions(max_tokens=3, ignore_eos=True, seed=7, num_sequences=2)
    for name, prompt, expected in (
        ("open", [20, THINK_ID], 6),
        ("closed", [20, THINK_ID, 30, THINK_END_ID], 0),
    ):
        request = generate_request(prompt, {**options, "request_id": name})
        generation = await gather(peer.stub.Generate(request), request, reasoning=True)
        ids = [token for output in generation.outputs for token in output.token_ids]
        assert not {THINK_ID, THINK_END_ID} & set(ids), "choose another seed"
        assert generation.usage is not None
        assert generation.usage.reasoning_tokens == expected
        assert generation.usage.completion_tokens == 6


async def test_a_collector_that_is_not_there_delays_nothing(engines: EngineSlot) -> None:
    engines.clear()
    flags = ("--model", str(model_dir("tiny_llama")), "--port", "0", *ENGINE_FLAGS)
    with start_server(*flags, "--otlp-traces-endpoint", "http://127.0.0.1:9") as server:
        async with connected(server) as peer:
            request = pb.GenerateRequest(request_id="r", prompt="Once")
            request.stopping.max_tokens = 2
            await peer.send(request)
        assert server.stop() == 0

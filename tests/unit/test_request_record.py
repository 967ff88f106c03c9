"""The log line of a request, from the real handler over an engine that the test feeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from grpc import StatusCode, aio
from structlog.testing import capture_logs

from openengine_vllm.limits import MAX_METADATA_ENTRIES
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.registry import EndReason
from openengine_vllm.services.request_record import MAX_LOGGED_METADATA, logged_metadata
from tests.unit.scripted_engine import Service, request, serve

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def call(
    service: Service, message: pb.GenerateRequest, *metadata: tuple[str, str]
) -> aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]:
    method: aio.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse]
    method = service.channel.unary_stream(
        f"/{pb.SERVICE.full_name}/Generate",
        pb.GenerateRequest.SerializeToString,
        pb.GenerateResponse.FromString,
    )
    return method(message, timeout=60, metadata=metadata)


def of_requests(logged: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(entry) for entry in logged if entry["event"] == "request"]


async def test_a_request_that_ends_well() -> None:
    with capture_logs() as logged:
        async with serve() as service:
            message = request(
                model="alias",
                sampling=pb.SamplingParams(num_sequences=2),
                metadata={"tenant": "a\nb"},
            )
            stream = call(
                service,
                message,
                ("openengine-priority", "-7"),
                ("openengine-target-dp-rank", "0"),
                ("openengine-routing-key", "blue"),
                ("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),
            )
            first, second = await service.engine.accepted("r")
            first.put("ab.", "stop", cached=1)
            second.put("abc", "length")
            assert [event async for event in stream]
            assert service.engine.plan.priority == -7
            assert service.engine.plan.data_parallel_rank == 0
            assert service.engine.trace_headers is None
            await service.idle()
    [entry] = of_requests(logged)
    assert entry.pop("duration_ms") >= entry.pop("ttft_ms") > 0
    assert entry == {
        "event": "request",
        "log_level": "info",
        "rpc": "Generate",
        "request_id": "r",
        "model": "alias",
        "priority": -7,
        "rank": 0,
        "routing_key": "blue",
        "outcome": "ok",
        "status": "OK",
        "finish": "stop,length",
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "cached_tokens": 1,
        "trace_id": TRACE,
        "metadata": '{"tenant": "a\\nb"}',
    }


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        (("openengine-priority", "high"), "metadata[openengine-priority]"),
        (("openengine-target-dp-rank", "1"), "kv.data_parallel_rank"),
    ],
)
async def test_a_request_that_is_rejected(metadata: tuple[str, str], field: str) -> None:
    with capture_logs() as logged:
        async with serve() as service:
            stream = call(service, request("x" * 5000, stopping=pb.StoppingOptions()), metadata)
            assert await stream.code() is StatusCode.INVALID_ARGUMENT
            long_id = request("r" * 200)
            stream = call(service, long_id, metadata)
            assert await stream.code() is StatusCode.INVALID_ARGUMENT
    first, second = of_requests(logged)
    assert len(first["request_id"]) == 257
    assert second["field"] == field
    assert second["outcome"] == "rejected"
    assert second["status"] == second["code"] == "INVALID_ARGUMENT"
    assert "finish" not in second
    assert "prompt_tokens" not in second


async def test_a_request_that_meets_no_engine() -> None:
    with capture_logs() as logged:
        async with serve(ready=False) as service:
            assert await call(service, request()).code() is StatusCode.UNAVAILABLE
    [entry] = of_requests(logged)
    assert (entry["outcome"], entry["status"], entry["code"]) == (
        "rejected",
        "UNAVAILABLE",
        "OVERLOADED",
    )


async def test_what_the_engine_says_stays_out() -> None:
    with capture_logs() as logged:
        async with serve() as service:
            service.engine.refusal = errors.invalid_argument("prompt", "secret is too long")
            assert await call(service, request()).code() is StatusCode.INVALID_ARGUMENT
    [entry] = of_requests(logged)
    assert entry["field"] == "prompt"
    assert "secret" not in repr(entry)


async def test_a_request_whose_client_leaves() -> None:
    with capture_logs() as logged:
        async with serve() as service:
            stream = call(service, request())
            (collector,) = await service.engine.accepted("r")
            collector.put("a")
            await stream.read()
            stream.cancel()
            await service.idle()
    [entry] = of_requests(logged)
    assert (entry["outcome"], entry["status"], entry["finish"]) == ("cancelled", "CANCELLED", "-")
    assert entry["completion_tokens"] == 1


async def test_a_request_that_is_aborted_or_fails() -> None:
    with capture_logs() as logged:
        async with serve() as service:
            for reason in (EndReason.ABORTED, EndReason.ENGINE_DEAD):
                stream = call(service, request(reason.value))
                await service.engine.accepted(reason.value)
                for entry in service.registry:
                    entry.end(reason)
                assert [event async for event in stream]
                await service.idle()
    aborted, failed = of_requests(logged)
    assert (aborted["outcome"], aborted["finish"]) == ("aborted", "cancelled")
    assert (failed["outcome"], failed["code"], failed["status"]) == ("failed", "INTERNAL", "OK")
    assert "ttft_ms" not in aborted


def test_logged_metadata_is_bounded_json() -> None:
    assert logged_metadata({}) == {}
    assert json.loads(logged_metadata({"b": '"', "a": "\x1b"})["metadata"]) == {
        "a": "\x1b",
        "b": '"',
    }
    fields = logged_metadata({f"{i:02}{'k' * 400}": "\0" * 400 for i in range(64)})
    shown = json.loads(fields["metadata"])
    assert len(fields["metadata"]) <= MAX_LOGGED_METADATA
    assert 0 < len(shown) == 64 - fields["metadata_left_out"]


def test_more_metadata_than_is_allowed_is_only_counted() -> None:
    """Sorting a million entries for the log would stop every stream for a second."""
    entries = {str(number): "" for number in range(MAX_METADATA_ENTRIES + 1)}
    assert logged_metadata(entries) == {"metadata_left_out": MAX_METADATA_ENTRIES + 1}

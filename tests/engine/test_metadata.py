"""Request metadata and the access log on a live server."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from openengine_vllm.client import GenerateOptions, generate_request
from openengine_vllm.protocol import v1 as pb
from tests.engine.peers import Peer
from tests.engine.rejections import good_request
from tests.engine.streams import gather
from tests.engine.test_rejections import assert_unharmed, refusal
from tests.support.calls import eventually
from tests.support.log_lines import request_lines

PRIORITY, RANK, ROUTING = (
    "openengine-priority",
    "openengine-target-dp-rank",
    "openengine-routing-key",
)


@pytest.mark.parametrize(
    "metadata",
    [
        ((PRIORITY, "0"), (RANK, "0"), (ROUTING, "user 1")),
        (("openengine-unknown", "x"), ("x-other", "a"), ("x-other", "b")),
        (("traceparent", "garbage"), ("tracestate", "==")),
    ],
)
async def test_what_is_accepted(tiny: Peer, metadata: tuple[tuple[str, str], ...]) -> None:
    request = good_request("accepted")
    generation = await gather(tiny.stub.Generate(request, metadata=metadata), request)
    assert len(generation.only.token_ids) == 1


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        (((PRIORITY, ""),), f"metadata[{PRIORITY}]"),
        (((PRIORITY, "high"),), f"metadata[{PRIORITY}]"),
        (((PRIORITY, "2147483648"),), f"metadata[{PRIORITY}]"),
        (((PRIORITY, "0"), (PRIORITY, "0")), f"metadata[{PRIORITY}]"),
        (((RANK, "-1"),), f"metadata[{RANK}]"),
        (((RANK, "0"), (RANK, "0")), f"metadata[{RANK}]"),
        (((ROUTING, ""),), f"metadata[{ROUTING}]"),
        (((ROUTING, "k" * 257),), f"metadata[{ROUTING}]"),
        (((RANK, "1"),), "kv.data_parallel_rank"),
    ],
)
async def test_what_is_malformed(
    tiny: Peer, metadata: tuple[tuple[str, str], ...], field: str
) -> None:
    error = await refusal(tiny.stub.Generate(good_request("malformed"), metadata=metadata))
    assert error.status is StatusCode.INVALID_ARGUMENT
    assert error.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert error.field == field
    await assert_unharmed(tiny, "malformed")


async def test_what_contradicts_the_body(tiny: Peer) -> None:
    for key, change in (
        (PRIORITY, pb.GenerateRequest(priority=2)),
        (RANK, pb.GenerateRequest(kv=pb.KvOptions(data_parallel_rank=0))),
    ):
        request = good_request("contradicts")
        request.MergeFrom(change)
        error = await refusal(tiny.stub.Generate(request, metadata=((key, "1"),)))
        assert error.code == pb.ERROR_CODE_INVALID_ARGUMENT
        assert error.field == f"metadata[{key}]"
    request = good_request("contradicts")
    request.kv.data_parallel_rank = 0
    await gather(tiny.stub.Generate(request, metadata=((RANK, "0"),)), request)


async def test_a_priority_is_refused_as_in_the_body(tiny: Peer) -> None:
    in_body = good_request("priority")
    in_body.priority = 1
    expected = await refusal(tiny.stub.Generate(in_body))
    metadata = ((PRIORITY, "1"),)
    error = await refusal(tiny.stub.Generate(good_request("priority"), metadata=metadata))
    assert error.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE
    assert (error.code, error.status, error.message, error.details) == (
        expected.code,
        expected.status,
        expected.message,
        expected.details,
    )


async def test_the_access_log(tiny: Peer) -> None:
    options = GenerateOptions(max_tokens=4, ignore_eos=True, num_sequences=2, seed=1)
    options["request_id"] = 'id "1" \\n=x'
    request = generate_request("My secret prompt", options)
    request.metadata["tenant"] = "a\nevent=request \x1b[31m"
    metadata = ((ROUTING, "blue green"), (RANK, "0"))
    generation = await gather(tiny.stub.Generate(request, metadata=metadata), request)
    request.stopping.max_tokens = 0
    await refusal(tiny.stub.Generate(request))

    def logged() -> list[dict[str, str]]:
        lines = request_lines(tiny.server.stderr())
        return [line for line in lines if line["request_id"] == request.request_id]

    await eventually(lambda: len(logged()) == 2, "two lines")
    done, rejected = logged()
    assert generation.usage is not None
    assert float(done.pop("duration_ms")) >= float(done.pop("ttft_ms")) > 0
    assert done.pop("timestamp")
    assert done == {
        "level": "info",
        "event": "request",
        "rpc": "Generate",
        "request_id": request.request_id,
        "model": "tiny",
        "rank": "0",
        "routing_key": "blue green",
        "outcome": "ok",
        "status": "OK",
        "finish": "length,length",
        "prompt_tokens": str(generation.usage.prompt_tokens),
        "completion_tokens": "8",
        "cached_tokens": "0",
        "metadata": '{"tenant": "a\\nevent=request \\u001b[31m"}',
    }
    assert (rejected["outcome"], rejected["code"]) == ("rejected", "INVALID_ARGUMENT")
    assert rejected["field"] == "stopping.max_tokens"
    log = tiny.server.stderr()
    assert "secret" not in log
    assert "\x1b[31m" not in log
    text = generation.outputs[0].text.strip()
    assert len(text) < 4 or text not in log

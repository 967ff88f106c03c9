"""What a live server refuses, how it says so, and that it is unharmed by it.

A rejection is a status before acceptance and no event. After each one the server is READY, has
no trace of the request, and serves the same id.
"""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest
from grpc import aio

from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError, from_rpc_error
from tests.engine.peers import (
    MULTI_EOS_CAPACITY,
    MULTI_EOS_QUEUED_TOKENS,
    MULTI_EOS_REQUEST_BYTES,
    MULTI_EOS_SLOTS,
    Peer,
)
from tests.engine.rejections import REJECTIONS, Rejection, good_request, unknown_field
from tests.engine.streams import gather

IMPLEMENTED = {
    *("Generate", "GetEngineInfo", "GetModelInfo", "Health", "Abort"),
    *("Drain", "GetLoad", "SubscribeRuntimeEvents"),
    *("GetKvEventSources", "SubscribeKvEvents"),
}
_GENERATE = "/openengine.v1.OpenEngine/Generate"

Stream = aio.UnaryStreamCall[Any, Any]


async def refusal(
    call: Stream | aio.UnaryUnaryCall[Any, Any],
) -> OpenEngineError:
    """The error of a call that is refused without any event."""
    try:
        if isinstance(call, aio.UnaryStreamCall):
            async for event in call:
                pytest.fail(f"an event: {event}")
        else:
            await call
    except aio.AioRpcError as error:
        return from_rpc_error(error)
    pytest.fail("not refused")


def raw_stream(peer: Peer, path: str, data: bytes) -> Stream:
    """A call with these bytes for a request."""
    rpc: aio.UnaryStreamMultiCallable[bytes, bytes] = peer.channel.unary_stream(path)
    return rpc(data)


async def assert_unharmed(peer: Peer, request_id: str = "again") -> None:
    """The server is READY and serves, under an id that may have been refused before."""
    assert await peer.is_ready()
    generation = await peer.send(good_request(request_id))
    assert len(generation.only.token_ids) == 1


def assert_no_traceback(message: str) -> None:
    assert message
    assert "Traceback" not in message
    assert "vllm." not in message
    assert re.search(r"(^|\s)/\w+/", message) is None, "a path of the host"


@pytest.mark.parametrize("rejection", REJECTIONS, ids=lambda rejection: rejection.name)
async def test_request_is_rejected(rejection: Rejection, tiny: Peer) -> None:
    request = good_request(rejection.name)
    rejection.change(request)
    error = await refusal(tiny.stub.Generate(request))
    assert error.status is rejection.status
    assert error.code == rejection.code
    assert not error.retryable
    assert error.retry_after_ms is None
    assert error.field == rejection.field
    assert re.search(rejection.says, error.message), error.message
    assert_no_traceback(error.message)
    # Neither live nor remembered: the request was never there.
    abort = pb.AbortRequest(request_id=request.request_id)
    missing = await refusal(tiny.stub.Abort(abort))
    assert missing.code == pb.ERROR_CODE_REQUEST_NOT_FOUND
    await assert_unharmed(tiny, rejection.name)


def test_names_of_rejections_are_unique() -> None:
    names = [rejection.name for rejection in REJECTIONS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "request_id",
    ["x", "x" * 256, "é" * 256, "\U0001f98a" * 256, " ", "a b/c..\\%", "-", "probe/1"],
    ids=["one", "256", "256-accents", "256-emoji", "space", "punctuation", "dash", "probe"],
)
async def test_request_id_is_accepted(request_id: str, tiny: Peer) -> None:
    await tiny.send(good_request(request_id))


def _at_the_limit(change: str) -> pb.GenerateRequest:
    request = good_request("limit")
    match change:
        case "stop conditions":
            request.stopping.conditions.extend([pb.StopCondition(stop_token_id=9)] * 256)
        case "stop bytes":
            request.stopping.conditions.extend([pb.StopCondition(stop_text="é" * 32)] * 256)
        case "metadata":
            request.metadata.update({f"{number:02}": "x" * 254 for number in range(64)})
        case "cache salt":
            request.kv.cache_salt = "é" * 512
        case "sequences":
            request.sampling.temperature = 1.0
            request.sampling.num_sequences = 128
        case "prompt":
            request.token_ids.ids[:] = [9] * 2047
        case "explicit zeros":
            request.priority = 0
            request.kv.data_parallel_rank = 0
            request.kv.cache_salt = ""
            request.stopping.min_tokens = 0
            request.response.return_output_logprobs = False
            request.response.return_prompt_logprobs = False
            request.kv.bypass_prefix_cache = False
        case "unknown field outside kv":
            request.MergeFromString(unknown_field(999))
    return request


@pytest.mark.parametrize(
    "change",
    [
        "stop conditions",
        "stop bytes",
        "metadata",
        "cache salt",
        "sequences",
        "prompt",
        "explicit zeros",
        "unknown field outside kv",
    ],
)
async def test_request_at_the_limit_is_accepted(change: str, tiny: Peer) -> None:
    generation = await tiny.send(_at_the_limit(change))
    assert generation.error is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 5e-324),
        ("temperature", 2.0),
        ("top_p", 5e-324),
        ("top_k", 2**31 - 1),
        ("min_p", 1.0),
        ("min_p", 5e-324),
        ("repetition_penalty", 3.4e38),
        ("repetition_penalty", 2.0**-126),
        ("frequency_penalty", 2.0),
        ("presence_penalty", -2.0),
        ("seed", 2**64 - 1),
    ],
)
async def test_extreme_value_is_accepted_and_harms_nobody(
    name: str, value: float, tiny: Peer
) -> None:
    quiet = await tiny.generate("A bystander", temperature=0.0, max_tokens=8)
    request = good_request("extreme")
    request.sampling.temperature = 1.0
    setattr(request.sampling, name, value)
    request.stopping.max_tokens = 8
    generation = await tiny.send(request)
    assert generation.error is None
    assert all(token_id < 1024 for token_id in generation.only.token_ids)
    after = await tiny.generate("A bystander", temperature=0.0, max_tokens=8)
    assert after.only.token_ids == quiet.only.token_ids
    assert await tiny.is_ready()


async def open_stream(peer: Peer, request_id: str, **sampling: Any) -> Stream:
    """A request that would run for long, after its first event; cancel it in the end."""
    request = good_request(request_id)
    request.model = ""
    request.stopping.max_tokens = 2000
    request.stopping.ignore_eos = True
    request.sampling.MergeFrom(pb.SamplingParams(temperature=1.0, **sampling))
    call = peer.stub.Generate(request)
    assert (await anext(aiter(call))).HasField("token")
    return call


async def test_live_duplicate_is_rejected_and_the_first_goes_on(tiny: Peer) -> None:
    first = await open_stream(tiny, "twin")
    error = await refusal(tiny.stub.Generate(good_request("twin")))
    assert error.status is grpc.StatusCode.ALREADY_EXISTS
    assert error.code == pb.ERROR_CODE_DUPLICATE_REQUEST
    assert not error.retryable
    assert error.field == "request_id"
    assert (await anext(aiter(first))).HasField("token")
    aborted = await tiny.stub.Abort(pb.AbortRequest(request_id="twin"))
    assert aborted.status == pb.ABORT_STATUS_ABORTED
    # Free at once, while the first stream's last events may still be on their way.
    assert (await tiny.send(good_request("twin"))).error is None
    assert await tiny.is_ready()


LORA = [method for method in pb.SERVICE.methods if "Lora" in method.name]
UNIMPLEMENTED = [
    method for method in pb.SERVICE.methods if method.name not in IMPLEMENTED and method not in LORA
]


@pytest.mark.parametrize("method", LORA, ids=lambda method: method.name)
async def test_a_server_without_adapters_says_so(method: Any, tiny: Peer) -> None:
    rpc = getattr(tiny.stub, method.name)
    error = await refusal(rpc(getattr(pb, method.input_type.name)()))
    assert error.status is grpc.StatusCode.FAILED_PRECONDITION
    assert error.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE
    assert "LoRA" in error.message


@pytest.mark.parametrize("method", UNIMPLEMENTED, ids=lambda method: method.name)
async def test_rpc_that_is_not_there_says_so(method: Any, tiny: Peer) -> None:
    rpc = getattr(tiny.stub, method.name)
    error = await refusal(rpc(getattr(pb, method.input_type.name)()))
    assert error.status is grpc.StatusCode.UNIMPLEMENTED
    assert error.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE
    assert not error.retryable
    assert method.name in error.message
    await assert_unharmed(tiny)


async def test_abort_without_a_target_is_rejected(tiny: Peer) -> None:
    error = await refusal(tiny.stub.Abort(pb.AbortRequest()))
    assert error.status is grpc.StatusCode.INVALID_ARGUMENT
    assert error.field == "target"
    assert "request_id" in error.message
    await assert_unharmed(tiny)


async def test_abort_of_an_unknown_session_is_rejected(tiny: Peer) -> None:
    session = pb.KvSessionRef(session_id="s")
    error = await refusal(tiny.stub.Abort(pb.AbortRequest(kv_session=session)))
    assert error.status is grpc.StatusCode.NOT_FOUND
    assert error.code == pb.ERROR_CODE_KV_SESSION_NOT_FOUND


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\x2a\x01\x09", b"\x22" * 100],
    ids=["tag", "short", "not-utf8", "submessage", "nested"],
)
async def test_malformed_message_is_rejected(data: bytes, tiny: Peer) -> None:
    error = await refusal(raw_stream(tiny, _GENERATE, data))
    assert error.status is grpc.StatusCode.INVALID_ARGUMENT
    assert error.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert not error.retryable
    assert_no_traceback(error.message)
    await assert_unharmed(tiny)


async def test_unknown_method_and_service_are_unimplemented(tiny: Peer) -> None:
    for path in ("/openengine.v1.OpenEngine/Nothing", "/openengine.v2.OpenEngine/Generate"):
        error = await refusal(raw_stream(tiny, path, b""))
        assert error.status is grpc.StatusCode.UNIMPLEMENTED
    await assert_unharmed(tiny)


async def test_oversized_call_metadata_is_refused(tiny: Peer) -> None:
    call = tiny.stub.Generate(good_request("loud"), metadata=(("x-loud", "x" * 20_000),))
    error = await refusal(call)
    assert error.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    await assert_unharmed(tiny, "loud")


# A server with room for few.


async def test_message_over_the_limit_is_refused(multi_eos: Peer) -> None:
    request = good_request("large")
    request.model = ""
    request.metadata["k"] = "x" * MULTI_EOS_REQUEST_BYTES
    error = await refusal(multi_eos.stub.Generate(request))
    assert error.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not error.retryable
    assert await multi_eos.is_ready()
    assert (await multi_eos.generate([5], max_tokens=1)).error is None


async def overload(peer: Peer, request: pb.GenerateRequest) -> OpenEngineError:
    """The error of a request that there is no room for."""
    error = await refusal(peer.stub.Generate(request))
    assert error.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.code == pb.ERROR_CODE_OVERLOADED
    assert error.retryable
    return error


async def test_sequences_over_the_capacity_are_refused_at_once(multi_eos: Peer) -> None:
    small = good_request("small")
    small.model = ""
    running = await open_stream(multi_eos, "runs", num_sequences=MULTI_EOS_SLOTS)
    queued = [multi_eos.stub.Generate(_queued(f"queued-{n}", n)) for n in (0, 1)]
    # Admission is before the engine's queue, so it has taken those when it refuses this one.
    error = await overload(multi_eos, small)
    assert f"limit of {MULTI_EOS_CAPACITY}" in error.message
    assert await multi_eos.is_ready()
    await multi_eos.stub.Abort(pb.AbortRequest(request_id="runs"))
    assert (await multi_eos.send(small)).error is None
    for number, call in enumerate(queued):
        generation = await gather(call, _queued(f"queued-{number}", number))
        assert generation.only.finish is not None
    running.cancel()


def _queued(request_id: str, seed: int) -> pb.GenerateRequest:
    request = good_request(request_id)
    request.model = ""
    request.sampling.seed = seed
    return request


async def test_a_request_counts_with_all_its_sequences(multi_eos: Peer) -> None:
    two = good_request("two")
    two.model = ""
    two.sampling.temperature = 1.0
    two.sampling.num_sequences = MULTI_EOS_CAPACITY - MULTI_EOS_SLOTS + 1
    call = await open_stream(multi_eos, "runs", num_sequences=MULTI_EOS_SLOTS)
    await overload(multi_eos, two)
    two.sampling.num_sequences -= 1
    queued = multi_eos.stub.Generate(two)
    await multi_eos.stub.Abort(pb.AbortRequest(request_id="runs"))
    assert len((await gather(queued, two)).outputs) == two.sampling.num_sequences
    too_many = good_request("too many")
    too_many.model = ""
    too_many.sampling.temperature = 1.0
    too_many.sampling.num_sequences = MULTI_EOS_CAPACITY + 1
    error = await refusal(multi_eos.stub.Generate(too_many))
    assert error.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert error.field == "sampling.num_sequences"
    call.cancel()


async def test_vllms_own_queue_limit_is_overload(multi_eos: Peer) -> None:
    running = await open_stream(multi_eos, "runs", num_sequences=MULTI_EOS_SLOTS)
    waits = good_request("waits")
    waits.model = ""
    waits.token_ids.ids[:] = [9] * MULTI_EOS_QUEUED_TOKENS
    waiting = multi_eos.stub.Generate(waits)
    refused = good_request("refused")
    refused.model = ""
    await overload(multi_eos, refused)
    await multi_eos.stub.Abort(pb.AbortRequest(request_id="runs"))
    assert (await gather(waiting, waits)).error is None
    assert (await multi_eos.send(refused)).error is None
    running.cancel()

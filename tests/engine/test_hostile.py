"""Clients that mean harm or have lost their way: what they cost, and that nobody else notices.

One server for all of it, in single precision, so that the tokens of a stream don't depend on
what else is in its batches.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import psutil
import pytest
from grpc import aio

from openengine_vllm.client import generate_request
from openengine_vllm.engine.scores import MOST_PENDING_BYTES
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError, from_rpc_error
from tests.engine.floods import LARGE, MIB, floods, numbers
from tests.engine.peers import EngineSlot, Peer, connected
from tests.engine.rejections import good_request
from tests.engine.test_rejections import assert_no_traceback, assert_unharmed, raw_stream, refusal
from tests.support.calls import RunningCall, eventually
from tests.support.models import model_dir
from tests.support.server import ENGINE_FLAGS, ServerProcess, start_server

HELD, HELD_TOKENS = 120, 850
"""Outputs of a request whose client does not read, and tokens of each: over 100,000 in all."""
BYSTANDERS = 4
CAPACITY = HELD + BYSTANDERS + 2
STALL_SECONDS = 60
"""The engine makes the tokens in a small part of it when it has its processors to itself."""
GROWTH_BYTES = 20 * MIB
FLAGS = (
    *("--served-model-name", "tiny"),
    *("--dtype", "float32"),
    *("--max-num-seqs", str(HELD + BYSTANDERS)),
    *("--max-concurrent-requests", str(CAPACITY)),
    *("--stall-timeout", str(STALL_SECONDS)),
    "--enable-prefix-caching",
    *ENGINE_FLAGS,
    *("--kv-cache-memory-bytes", "256M"),  # room for all of it at once
)
_GENERATE = "/openengine.v1.OpenEngine/Generate"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def server(engines: EngineSlot) -> Iterator[ServerProcess]:
    engines.clear()
    arguments = ("--model", str(model_dir("tiny_llama")), "--port", "0", *FLAGS)
    with start_server(*arguments) as server:
        yield server


@pytest.fixture
async def peer(server: ServerProcess) -> AsyncIterator[Peer]:
    async with connected(server) as peer:
        yield peer


class Bystanders:
    """Streams that run beside, all of them open."""

    def __init__(self, peer: Peer, tokens: int) -> None:
        self._calls = [
            RunningCall(
                peer.channel,
                generate_request(
                    f"The {number}. fox jumps over",
                    {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True},
                ),
            )
            for number in range(BYSTANDERS)
        ]

    async def begun(self) -> Bystanders:
        for call in self._calls:
            await call.tokens(1)
        return self

    async def token_ids(self) -> list[list[int]]:
        for call in self._calls:
            assert await call.end() is grpc.StatusCode.OK
            assert [end.reason for end in call.finished] == [pb.FINISH_REASON_LENGTH]
        return [call.token_ids for call in self._calls]


def many_outputs(request_id: str, tokens: int, **response: Any) -> pb.GenerateRequest:
    """As many outputs as are held, in messages that are large because the id is."""
    request = good_request(request_id + "\U0001f98a" * (256 - len(request_id)))
    request.sampling.MergeFrom(pb.SamplingParams(temperature=1.0, num_sequences=HELD, seed=1))
    request.stopping.MergeFrom(pb.StoppingOptions(max_tokens=tokens, ignore_eos=True))
    request.response.MergeFrom(pb.ResponseOptions(**response))
    return request


def resident(server: ServerProcess) -> int:
    """Bytes of the frontend process; the engine's processes are its children."""
    return int(psutil.Process(server.process.pid).memory_info().rss)


@contextlib.asynccontextmanager
async def peak_growth(server: ServerProcess) -> AsyncIterator[list[int]]:
    """Samples of how much larger the frontend process is than now."""
    before = resident(server)
    samples = [0]

    async def sample() -> None:
        while True:
            await asyncio.sleep(0.05)
            samples.append(resident(server) - before)

    sampling = asyncio.ensure_future(sample())
    try:
        yield samples
        samples.append(resident(server) - before)
    finally:
        sampling.cancel()


async def is_live(peer: Peer, request_id: str) -> bool:
    """Whether the server still holds a request, as another client can find out."""
    error = await refusal(peer.stub.Generate(good_request(request_id)))
    return error.code == pb.ERROR_CODE_DUPLICATE_REQUEST


async def hold(peer: Peer, request: pb.GenerateRequest) -> aio.UnaryStreamCall[Any, Any]:
    """A call of which the first event has been read, and nothing since."""
    call = peer.stub.Generate(request)
    first = await anext(aiter(call))
    assert isinstance(first, pb.GenerateResponse)
    assert first.HasField("token")
    return call


async def beside_a_held_stream(
    peer: Peer, request: pb.GenerateRequest
) -> tuple[aio.UnaryStreamCall[Any, Any], int]:
    """Hold a stream until the engine has made all that it will for it.

    Returns the call, and by how many bytes the frontend grew at the most. An engine gives each
    sequence that runs a token a step, and has room for all of these: when the bystanders, which
    came last, have as many tokens as each held output was to have, the held ones are complete.
    """
    quiet = await Bystanders(peer, HELD_TOKENS).token_ids()
    warm = pb.GenerateRequest.FromString(request.SerializeToString())
    warm.request_id = "warm"
    warm.stopping.max_tokens = 100
    assert (await peer.send(warm)).error is None
    async with peak_growth(peer.server) as growth:
        call = await hold(peer, request)
        beside = await Bystanders(peer, HELD_TOKENS).begun()
        assert await beside.token_ids() == quiet
        assert await peer.is_ready()
        assert await is_live(peer, request.request_id), "the stall timeout came too early"
    return call, max(growth)


async def test_a_reader_that_holds_its_stream_costs_bounded_memory_and_time(peer: Peer) -> None:
    request = many_outputs("held", HELD_TOKENS)
    call, growth = await beside_a_held_stream(peer, request)
    assert growth < GROWTH_BYTES

    larger = good_request("larger")
    larger.sampling.MergeFrom(pb.SamplingParams(temperature=1.0, num_sequences=CAPACITY - HELD + 1))
    error = await refusal(peer.stub.Generate(larger))
    assert error.code == pb.ERROR_CODE_OVERLOADED, "the held request keeps its slots until then"

    async def is_accepted() -> bool:
        try:
            return (await peer.send(larger)).error is None
        except aio.AioRpcError as failure:
            return from_rpc_error(failure).code != pb.ERROR_CODE_OVERLOADED

    await eventually(is_accepted, "the slots of the held request are free")

    tokens = 0
    ended: OpenEngineError | None = None
    try:
        async for event in call:
            assert event.HasField("token"), "no end but the status"
            tokens += len(event.token.tokens)
    except aio.AioRpcError as failure:
        ended = from_rpc_error(failure)
    assert ended is not None
    assert ended.code == pb.ERROR_CODE_OVERLOADED
    assert ended.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert tokens < HELD * HELD_TOKENS
    await assert_unharmed(peer, request.request_id)


async def test_scores_that_nobody_reads_are_bounded(peer: Peer) -> None:
    request = many_outputs(
        "scored",
        HELD_TOKENS,
        return_output_logprobs=True,
        output_candidates=pb.CandidateTokenSelection(top_n=20),
    )
    call, growth = await beside_a_held_stream(peer, request)
    assert growth < MOST_PENDING_BYTES + GROWTH_BYTES

    events = [event async for event in call]
    assert await call.code() is grpc.StatusCode.OK
    assert events[-1].error.code == pb.ERROR_CODE_OVERLOADED
    assert events[-1].usage.completion_tokens < HELD * HELD_TOKENS
    assert not any(event.HasField("finished") for event in events)
    await assert_unharmed(peer, request.request_id)


async def test_floods_are_refused_while_streams_and_health_go_on(peer: Peer) -> None:
    tokens = 300
    quiet = await Bystanders(peer, tokens).token_ids()
    for flood in floods():
        beside = await Bystanders(peer, tokens).begun()
        calls = [raw_stream(peer, _GENERATE, data) for data in flood.messages()]
        assert await peer.is_ready()
        for call in calls:
            error = await refusal(call)
            assert (error.code, error.field) == (flood.code, flood.field), flood.name
            assert len(error.message) < 1000
            assert_no_traceback(error.message)
        assert await beside.token_ids() == quiet, flood.name
        assert await peer.is_ready()


async def test_ids_of_a_megabyte_are_refused_by_the_other_calls(peer: Peer) -> None:
    error = await refusal(peer.stub.Abort(pb.AbortRequest(request_id=LARGE)))
    assert error.code == pb.ERROR_CODE_REQUEST_NOT_FOUND
    session = pb.KvSessionRef(session_id=LARGE)
    error = await refusal(peer.stub.Abort(pb.AbortRequest(kv_session=session)))
    assert error.code == pb.ERROR_CODE_KV_SESSION_NOT_FOUND
    error = await refusal(peer.stub.Health(pb.HealthRequest(model=LARGE)))
    assert error.code == pb.ERROR_CODE_MODEL_NOT_FOUND
    error = await refusal(peer.stub.GetModelInfo(pb.GetModelInfoRequest(model=LARGE)))
    assert error.code == pb.ERROR_CODE_MODEL_NOT_FOUND
    await assert_unharmed(peer)


async def test_numbers_at_the_ends_of_their_ranges_are_taken_or_refused(peer: Peer) -> None:
    tokens = 400
    quiet = await Bystanders(peer, tokens).token_ids()
    beside = await Bystanders(peer, tokens).begun()
    together = good_request("together")
    for values in numbers():
        for number in values:
            request = good_request(f"{number.path} {number.value}")
            request.sampling.temperature = 1.0
            number.set_in(request)
            try:
                async for event in peer.stub.Generate(request):
                    assert not event.HasField("error"), number
            except aio.AioRpcError as failure:
                error = from_rpc_error(failure)
                assert error.status is grpc.StatusCode.INVALID_ARGUMENT, number
                assert error.field is not None
                assert error.field.startswith(number.path), number
            else:
                if number.name != "prompt_logprob_start":  # it is looked at with scores only
                    number.set_in(together)
    assert (await peer.send(together)).error is None
    assert await beside.token_ids() == quiet
    await assert_unharmed(peer)

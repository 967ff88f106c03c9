"""Requests that end before their time, by whatever cause, leave nothing and disturb nobody.

The server runs in the process of the tests, so that its tables can be looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc
import psutil
import pytest
import pytest_asyncio
import uvloop
from grpc import aio

from openengine_vllm.client import OpenEngineError
from openengine_vllm.engine.stream import GenerationStream, RunningSequence
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.channel import client_options
from openengine_vllm.registry import Entry
from tests.engine.in_process import Running, request, serve
from tests.engine.peers import EngineSlot
from tests.support.calls import ENDLESS_FLAGS, ENDLESS_TOKENS, RunningCall, eventually
from tests.support.line import Line
from tests.support.models import VOCAB_SIZE, model_dir
from tests.support.server import ENGINE_FLAGS

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture"),
]

SLOTS = 16
"""Sequences that the engine runs at once; the others wait."""
ROUNDS, STREAMS, UNDISTURBED = 5, 100, 10
GROWTH_BYTES = 30 * 1024 * 1024
"""Allocators keep a few megabytes here and there. What one stream holds (prompt, records,
collector, call) is some 100 kB, so streams that stay would be twice this over three rounds."""
FLAGS = (
    *("--dtype", "float32"),  # or ties between tokens would be broken by the batch's make-up
    *("--max-num-seqs", str(SLOTS)),
    *("--max-num-batched-tokens", "256"),  # long prompts take several steps
    *ENGINE_FLAGS,
    *ENDLESS_FLAGS,
)


@pytest.fixture(scope="module")
def event_loop_policy() -> uvloop.EventLoopPolicy:
    """The loop that the program runs on."""
    return uvloop.EventLoopPolicy()


@pytest.fixture(scope="module")
def _environment(engines: EngineSlot) -> Iterator[None]:
    engines.clear()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_RPC_BASE_PATH", folder)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(_environment: None) -> AsyncIterator[Running]:
    async with serve("--model", str(model_dir("tiny_llama")), *FLAGS) as running:
        yield running


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _leaves_nothing(running: Running) -> AsyncIterator[None]:
    yield
    await running.idle()


async def test_storm(running: Running) -> None:
    """Five rounds of 100 streams that end at random moments, beside ten that must not notice."""
    quiet = await _undisturbed(running)
    endings: Counter[tuple[str, str]] = Counter()
    memory: list[int] = []
    tasks = _tasks()
    for number in range(ROUNDS):
        random_ = random.Random(number)
        undisturbed = asyncio.ensure_future(_undisturbed(running))
        endings.update(await asyncio.gather(*(_disturb(running, random_) for _ in range(STREAMS))))
        assert await undisturbed == quiet
        del undisturbed
        await running.idle()
        await _engine_is_idle(running)
        await eventually(lambda: _tasks() <= tasks, f"no task stays: {_tasks() - tasks}")
        gc.collect()
        assert _live_objects() == {}
        memory.append(psutil.Process().memory_info().rss)
    for cause in CAUSES:
        for moment in ("before a token", "while decoding"):
            assert endings[cause, moment] > 0, endings
    assert max(memory[2:]) - max(memory[:2]) < GROWTH_BYTES, memory


def _tasks() -> Counter[str]:
    """How many tasks there are of each kind; some are always there, and are made anew."""
    return Counter(getattr(t.get_coro(), "__qualname__", "") for t in asyncio.all_tasks())


async def _undisturbed(running: Running) -> list[list[int]]:
    calls = [
        running.call(300, prompt=f"The {number}. fox jumps over") for number in range(UNDISTURBED)
    ]
    for call in calls:
        assert await call.end() is grpc.StatusCode.OK
        assert [end.reason for end in call.finished] == [pb.FINISH_REASON_LENGTH]
    return [call.token_ids for call in calls]


async def _disturb(running: Running, random_: random.Random) -> tuple[str, str]:
    """One stream and its end; returns what ended it, and when."""
    tokens = random_.randrange(1, 200)
    by = random_.choice((None, "time", "token", "end"))
    length = random_.choice((random_.randrange(1, 20), random_.randrange(500, 1500)))
    prompt = [random_.randrange(VOCAB_SIZE) for _ in range(length)]
    cause = random_.choice(list(CAUSES))
    # Those that are not waited for to the end would not end by themselves.
    asked = request(tokens if by == "end" else ENDLESS_TOKENS, prompt)
    plan = Plan(asked, by, tokens, random_.uniform(0, 0.5))
    # Random moments are what this is about; nothing waits for the time to pass.
    await asyncio.sleep(random_.uniform(0, 1))
    call = await CAUSES[cause](running, plan)
    if not call.token_ids:
        return cause, "before a token"
    return cause, "while decoding" if not call.finished else "at the end"


@dataclass
class Plan:
    """A request, and when it is to end: at once, by time, at a token, or at the last one."""

    request: pb.GenerateRequest
    by: str | None
    tokens: int
    seconds: float

    async def moment(self, call: RunningCall) -> None:
        if self.by == "time":
            await asyncio.sleep(self.seconds)
        elif self.by is not None:
            await call.until(lambda: len(call.token_ids) >= self.tokens, "its moment")


async def _cancel(running: Running, plan: Plan) -> RunningCall:
    call = RunningCall(running.channel, plan.request)
    await plan.moment(call)
    call.cancel()
    assert await call.end() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.OK)
    return call


async def _deadline(running: Running, plan: Plan) -> RunningCall:
    call = RunningCall(running.channel, plan.request, timeout=0.001 + plan.seconds * 4)
    assert await call.end() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OK)
    return call


async def _reset(running: Running, plan: Plan) -> RunningCall:
    line = Line(running.target)
    async with (
        line.opened() as target,
        aio.insecure_channel(target, options=client_options()) as channel,
    ):
        call = RunningCall(channel, plan.request)
        await plan.moment(call)
        await line.cut()
        assert await call.end() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK)
    return call


CAUSES = {"cancel": _cancel, "deadline": _deadline, "reset": _reset}


async def _engine_is_idle(running: Running) -> None:
    """All slots serve at once, and afterwards the scheduler holds no block for any request."""
    calls = [running.call(8) for _ in range(SLOTS)]
    for call in calls:
        assert await call.end() is grpc.StatusCode.OK
        assert len(call.token_ids) == 8
    # Only an engine in which no block is in use empties its prefix cache.
    await eventually(running.release_prefix_cache, "no request holds a block")


def _live_objects() -> Counter[str]:
    kinds = (GenerationStream, RunningSequence, Entry)
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, kinds))


async def test_deadline_ends_the_request_when_the_client_cannot_say_so(running: Running) -> None:
    """The server has the deadline too: nothing reaches it from this client any more."""
    line = Line(running.target)
    async with (
        line.opened() as target,
        aio.insecure_channel(target, options=client_options()) as channel,
    ):
        call = RunningCall(channel, request(ENDLESS_TOKENS), timeout=3)
        await call.tokens(1)
        assert running.unfinished == 1
        line.mute()
        await running.idle()
        assert await call.end() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert len(call.token_ids) < ENDLESS_TOKENS


async def test_id_is_free_after_a_cancel(running: Running) -> None:
    call = running.call(ENDLESS_TOKENS, request_id="again")
    await call.tokens(3)
    call.cancel()
    await call.end()

    await eventually(lambda: running.server.registry.find("again") is None, "the id is free")
    completion = await running.client.complete(request(3, request_id="again"))
    assert len(completion.outputs[0].token_ids) == 3


async def test_live_duplicate(running: Running) -> None:
    call = running.call(200, request_id="twice")
    await call.tokens(3)
    with pytest.raises(OpenEngineError) as caught:
        await running.client.complete(request(3, request_id="twice"))
    assert caught.value.code == pb.ERROR_CODE_DUPLICATE_REQUEST
    assert caught.value.status is grpc.StatusCode.ALREADY_EXISTS
    assert not caught.value.retryable
    assert caught.value.field == "request_id"
    assert await call.end() is grpc.StatusCode.OK
    assert len(call.token_ids) == 200, "the first one did not notice"


async def test_abort_and_use_the_id_again_at_once(running: Running) -> None:
    call = running.call(ENDLESS_TOKENS, request_id="reborn")
    await call.tokens(3)
    response = await running.client.abort("reborn")
    assert response.status == pb.ABORT_STATUS_ABORTED
    completion = await running.client.complete(request(3, request_id="reborn"))
    assert len(completion.outputs[0].token_ids) == 3
    _check_aborted(call, await call.end(), outputs=1)
    response = await running.client.abort("reborn")
    assert response.status == pb.ABORT_STATUS_ALREADY_FINISHED


def _check_aborted(call: RunningCall, status: grpc.StatusCode, outputs: int) -> None:
    assert status is grpc.StatusCode.OK
    assert call.errors == []
    assert sorted(end.output_index for end in call.finished) == list(range(outputs))
    assert any(end.reason == pb.FINISH_REASON_CANCELLED for end in call.finished)
    with_usage = [r for r in call.responses if r.HasField("usage")]
    assert with_usage == [call.responses[-1]], "usage comes with the last event alone"
    assert call.responses[-1].HasField("finished")
    assert with_usage[0].usage.completion_tokens >= len(call.token_ids)


async def test_abort_of_an_unknown_id(running: Running) -> None:
    with pytest.raises(OpenEngineError) as caught:
        await running.client.abort("never-seen")
    assert caught.value.code == pb.ERROR_CODE_REQUEST_NOT_FOUND
    assert caught.value.status is grpc.StatusCode.NOT_FOUND


async def test_abort_of_a_rejected_id(running: Running) -> None:
    """A request that was never accepted leaves no trace of its id."""
    with pytest.raises(OpenEngineError):
        await running.client.complete(request(1, prompt=[VOCAB_SIZE], request_id="rejected"))
    with pytest.raises(OpenEngineError) as caught:
        await running.client.abort("rejected")
    assert caught.value.code == pb.ERROR_CODE_REQUEST_NOT_FOUND


async def test_abort_without_a_target(running: Running) -> None:
    rpc: aio.UnaryUnaryMultiCallable[pb.AbortRequest, bytes] = running.channel.unary_unary(
        f"/{pb.SERVICE.full_name}/Abort", pb.AbortRequest.SerializeToString
    )
    with pytest.raises(aio.AioRpcError) as caught:
        await rpc(pb.AbortRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_abort_all(running: Running) -> None:
    calls = [running.call(ENDLESS_TOKENS) for _ in range(SLOTS + 4)]
    await eventually(lambda: running.unfinished == len(calls), "all are accepted")
    await calls[0].tokens(3)
    response = await running.client.abort_all()
    assert response.status == pb.ABORT_STATUS_ABORTED
    for call in calls:
        _check_aborted(call, await call.end(), outputs=1)
    response = await running.client.abort_all()
    assert response.status == pb.ABORT_STATUS_ALREADY_FINISHED


async def test_abort_while_queued(running: Running) -> None:
    async with _full(running):
        queued = running.call(ENDLESS_TOKENS, request_id="queued")
        await eventually(lambda: running.unfinished == SLOTS + 1, "it is accepted")
        assert (await running.client.abort("queued")).status == pb.ABORT_STATUS_ABORTED
        _check_aborted(queued, await queued.end(), outputs=1)
        assert queued.token_ids == []
        assert queued.responses[-1].usage.prompt_tokens > 0
        assert queued.responses[-1].usage.completion_tokens == 0
        await eventually(lambda: running.unfinished == SLOTS, "vLLM has forgotten it")


async def test_cancel_while_queued(running: Running) -> None:
    async with _full(running):
        queued = running.call(ENDLESS_TOKENS)
        await eventually(lambda: running.unfinished == SLOTS + 1, "it is accepted")
        queued.cancel()
        await queued.end()
        await eventually(lambda: running.unfinished == SLOTS, "vLLM has forgotten it")
        assert queued.token_ids == []


@contextlib.asynccontextmanager
async def _full(running: Running) -> AsyncIterator[None]:
    """All of the engine's slots are taken."""
    calls = [running.call(ENDLESS_TOKENS) for _ in range(SLOTS)]
    for call in calls:
        await call.tokens(1)
    try:
        yield
        assert not any(call.done for call in calls), "a slot was free all along"
    finally:
        for call in calls:
            call.cancel()
            await call.end()


async def test_abort_of_outputs_one_of_which_has_finished(running: Running) -> None:
    call = running.call(
        ENDLESS_TOKENS,
        num_sequences=8,
        temperature=1.0,
        seed=1,
        stop_token_ids=list(range(7, 263)),
        request_id="several",
    )
    await call.until(lambda: bool(call.finished), "the first output's end")
    assert (await running.client.abort("several")).status == pb.ABORT_STATUS_ABORTED
    _check_aborted(call, await call.end(), outputs=8)
    reasons = Counter(end.reason for end in call.finished)
    assert set(reasons) == {pb.FINISH_REASON_STOP, pb.FINISH_REASON_CANCELLED}


@pytest.mark.parametrize("end", ["cancel", "abort"])
async def test_all_outputs_of_a_request_end(running: Running, end: str) -> None:
    call = running.call(ENDLESS_TOKENS, num_sequences=4, temperature=1.0, request_id=f"n-{end}")
    await call.until(lambda: _indices(call) == {0, 1, 2, 3}, "a token of each output")
    assert running.unfinished == 4
    assert running.server.registry.sequences == 4
    if end == "abort":
        await running.client.abort(f"n-{end}")
        _check_aborted(call, await call.end(), outputs=4)
    else:
        call.cancel()
        assert await call.end() is grpc.StatusCode.CANCELLED
    await running.idle()


def _indices(call: RunningCall) -> set[int]:
    return {r.token.output_index for r in call.responses if r.HasField("token")}

"""Requests that vLLM's own server hands to an engine that serves gRPC as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from openengine_vllm.engine.gate import BatchGate, BatchKind
from openengine_vllm.engine.sharing import SharedEntrance, batch_kind, prompt_length
from openengine_vllm.engine.waiting_room import WaitingRoom
from openengine_vllm.protocol import errors
from openengine_vllm.registry import EndReason, RequestRegistry

PROMPT = {"type": "token", "prompt_token_ids": [1, 2, 3]}


class Llm:
    """Accepts requests and notes what becomes of them; the methods that vLLM's has."""

    def __init__(self) -> None:
        self.collectors: list[RequestOutputCollector] = []
        self.aborted: list[str] = []
        self.checked: list[tuple[int, str | None]] = []
        self.refusal: Exception | None = None

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        self.checked.append((n, request_id))

    async def add_request(self, request_id: str, *_: Any, **__: Any) -> RequestOutputCollector:
        if self.refusal is not None:
            raise self.refusal
        collector = RequestOutputCollector(RequestOutputKind.DELTA, f"{request_id}-internal")
        self.collectors.append(collector)
        return collector

    async def abort(self, request_id: str, internal: bool = False) -> None:
        assert internal
        self.aborted.append(request_id)

    async def generate(self, params: SamplingParams) -> AsyncGenerator[Any, None]:
        """As vLLM's own does, which closes whatever happens."""
        collector = await self.add_request("id", PROMPT, params)
        try:
            while True:
                output = await collector.get()
                yield output
                if output.finished:
                    return
        finally:
            collector.close()


class Shared:
    """An engine with an entrance for others, and what it counts."""

    def __init__(self, capacity: int = 2) -> None:
        self.llm = Llm()
        self.gate = BatchGate()
        self.room = WaitingRoom(self.gate)
        self.registry = RequestRegistry(capacity)
        self.refusal: errors.OpenEngineError | None = None
        self.guides = 0
        SharedEntrance(
            cast("Any", self.llm), self.room, self.registry, self._accepting, self._before_guides
        )

    def _accepting(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def _before_guides(self) -> None:
        self.guides += 1
        await asyncio.sleep(0)

    async def add(self, **params: Any) -> RequestOutputCollector:
        return await self.llm.add_request("id", PROMPT, SamplingParams(**params))


def output(*, finished: bool = False) -> Any:
    return SimpleNamespace(finished=finished)


async def settle() -> None:
    """Give everything that can go on its turn."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_request_is_live_until_its_generator_ends() -> None:
    shared = Shared()
    stream = shared.llm.generate(SamplingParams())
    first = asyncio.ensure_future(anext(stream))
    await settle()
    assert shared.registry.sequences == 1
    [collector] = shared.llm.collectors
    collector.put(output())
    await first
    collector.put(output(finished=True))
    assert len(shared.registry) == 1
    await stream.aclose()
    assert len(shared.registry) == 0


async def test_a_refused_request_leaves_nothing_behind() -> None:
    shared = Shared()
    shared.llm.refusal = RuntimeError()
    with pytest.raises(RuntimeError):
        await shared.add(logprobs=1)
    assert len(shared.registry) == 0
    await asyncio.wait_for(shared.gate.enter(BatchKind.LISTED), 10)


async def test_no_more_than_the_capacity_and_nothing_while_draining() -> None:
    shared = Shared()
    await shared.add(n=2, temperature=1)
    with pytest.raises(GracefulHTTPError, match="limit of 2") as full:
        await shared.add()
    assert full.value.http_status == 503
    with pytest.raises(GracefulHTTPError, match="limit of 2"):
        shared.llm.check_admission(1)
    shared.refusal = errors.draining()
    with pytest.raises(GracefulHTTPError) as draining:
        shared.llm.check_admission(0)
    assert draining.value.http_status == 503
    shared.refusal = errors.engine_dead()
    with pytest.raises(EngineDeadError):
        await shared.add()
    assert len(shared.llm.collectors) == 1


async def test_the_engines_own_question_is_not_asked_again() -> None:
    """It comes for requests that were admitted, also before a drain began."""
    shared = Shared()
    shared.refusal = errors.draining()
    shared.llm.check_admission(1, "id")
    shared.llm.check_admission(request_id="id")
    assert shared.llm.checked == [(1, "id"), (1, "id")]


@pytest.mark.parametrize("reason", [EndReason.ABORTED, EndReason.DRAINED])
async def test_one_that_is_told_to_end_is_aborted(reason: EndReason) -> None:
    shared = Shared()
    await shared.add()
    [entry] = shared.registry
    entry.end(reason)
    await settle()
    assert shared.llm.aborted == ["id-internal"]


async def test_ranked_requests_wait_while_listed_ones_run() -> None:
    shared = Shared(capacity=3)
    await shared.gate.enter(BatchKind.LISTED)
    waiting = asyncio.ensure_future(shared.add(logprobs=2, n=2, temperature=1))
    await settle()
    assert (shared.room.sequences, shared.room.tokens) == (2, 6)
    await shared.add()
    assert len(shared.llm.collectors) == 1, "whom it does not concern goes on"
    shared.gate.leave()
    await waiting
    assert shared.room.sequences == shared.room.tokens == 0


async def test_listed_requests_wait_until_the_engine_is_done_with_ranked_ones() -> None:
    """Not until a slow client has read its answer."""
    shared = Shared()
    collector = await shared.add(logprobs=2)
    entering = asyncio.ensure_future(shared.gate.enter(BatchKind.LISTED))
    collector.put(output())
    await settle()
    assert not entering.done()
    collector.output = None
    collector.put(output(finished=True))
    await asyncio.wait_for(entering, 10)
    assert len(shared.registry) == 1
    collector.close()
    second = asyncio.ensure_future(shared.gate.enter(BatchKind.RANKED))
    await settle()
    assert not second.done(), "it left once"
    second.cancel()


async def test_one_that_is_told_to_end_while_it_waits() -> None:
    shared = Shared()
    await shared.gate.enter(BatchKind.LISTED)
    waiting = asyncio.ensure_future(shared.add(logprobs=2))
    await settle()
    [entry] = shared.registry
    entry.end(EndReason.DRAINED)
    with pytest.raises(GracefulHTTPError):
        await waiting
    assert len(shared.registry) == shared.room.sequences == 0
    shared.gate.leave()
    await asyncio.wait_for(shared.gate.enter(BatchKind.LISTED), 10)


async def test_one_whose_client_leaves_while_it_waits() -> None:
    shared = Shared()
    await shared.gate.enter(BatchKind.LISTED)
    waiting = asyncio.ensure_future(shared.add(logprobs=2))
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(shared.registry) == shared.room.sequences == 0
    shared.gate.leave()
    await asyncio.wait_for(shared.gate.enter(BatchKind.LISTED), 10)


async def test_something_comes_before_the_first_guide_alone() -> None:
    shared = Shared()
    guide = StructuredOutputsParams(choice=["a"])
    await asyncio.gather(*(shared.add(structured_outputs=guide) for _ in range(2)))
    assert shared.guides == 1


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (SamplingParams(), None),
        (SamplingParams(logprobs=0), None),
        (SamplingParams(logprobs=1), BatchKind.RANKED),
        (SamplingParams(logprobs=-1), BatchKind.RANKED),
        (SamplingParams(logprob_token_ids=[1]), BatchKind.LISTED),
        (SamplingParams(logprobs=1, logprob_token_ids=[1]), BatchKind.LISTED),
        (object(), None),
    ],
)
def test_kinds(params: Any, kind: BatchKind | None) -> None:
    assert batch_kind(params) is kind


def test_lengths() -> None:
    assert prompt_length(PROMPT) == 3
    assert prompt_length("text") == prompt_length({"prompt": "text"}) == 0

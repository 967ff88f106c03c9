"""How the outputs of one request get into the engine, one after another."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from openengine_vllm.engine import pause, runtime
from openengine_vllm.engine.pause import Pause
from openengine_vllm.engine.requests import PreparedRequest, plan_generation
from openengine_vllm.engine.runtime import Engine
from openengine_vllm.engine.scores import MOST_PENDING_BYTES, PendingScores
from openengine_vllm.engine.stats import EngineStats
from openengine_vllm.limits import RequestLimits
from openengine_vllm.protocol import v1 as pb
from tests.unit.scripted_engine import FACTS, Letters


class Llm:
    """Notes what it is given; takes requests without giving anyone else a turn."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.errored = False
        self.second = asyncio.Event()
        """Set when the second request is added."""
        self.renderer = SimpleNamespace(tokenizer=None)
        self.vllm_config = SimpleNamespace(
            use_v2_model_runner=True,
            observability_config=SimpleNamespace(otlp_traces_endpoint=None),
            structured_outputs_config=SimpleNamespace(reasoning_parser=""),
        )

    async def add_request(self, engine_id: str, *_: Any, **__: Any) -> RequestOutputCollector:
        self.added.append(engine_id)
        if len(self.added) == 2:
            self.second.set()
        return RequestOutputCollector(RequestOutputKind.DELTA, engine_id)

    async def abort(self, engine_ids: list[str]) -> None:
        self.aborted += engine_ids


OUTPUTS = 4


def prepared(**response: Any) -> PreparedRequest:
    request = pb.GenerateRequest(
        request_id="r",
        token_ids=pb.TokenIds(ids=[97]),
        sampling=pb.SamplingParams(num_sequences=OUTPUTS),
        response=pb.ResponseOptions(**response),
    )
    plan = plan_generation(request, FACTS, RequestLimits())
    return PreparedRequest(plan, {"prompt_token_ids": [97]}, [97])


def engine(llm: Llm) -> Engine:
    return Engine(
        cast("Any", llm), FACTS, cast("Any", Letters()), cast("Any", None), 4096, EngineStats()
    )


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause, "_LONGEST_SECONDS", 0.0)


@pytest.mark.usefixtures("_impatient")
async def test_others_have_their_turn_while_many_outputs_are_submitted() -> None:
    llm = Llm()
    seen: list[int] = []

    async def other() -> None:
        while len(llm.added) < OUTPUTS:
            seen.append(len(llm.added))
            await asyncio.sleep(0)

    watching = asyncio.ensure_future(other())
    stream = await engine(llm).submit(prepared())
    await watching
    assert seen == list(range(OUTPUTS))
    stream.close()


@pytest.mark.usefixtures("_impatient")
async def test_outputs_that_were_submitted_are_dropped_when_the_caller_goes() -> None:
    llm = Llm()
    submission = asyncio.ensure_future(engine(llm).submit(prepared()))
    await llm.second.wait()
    submission.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submission
    await asyncio.sleep(0)  # the abort is a task of its own
    assert len(llm.added) < OUTPUTS
    assert set(llm.added) <= set(llm.aborted)


async def test_scores_that_are_too_many_before_all_outputs_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keep(_: Any, __: str, pending: PendingScores) -> None:
        pending.add(cast("Any", SimpleNamespace(size=MOST_PENDING_BYTES)))

    monkeypatch.setattr(runtime, "keep_arrays", keep)
    llm = Llm()
    stream = await engine(llm).submit(prepared(return_output_logprobs=True))
    [event] = [pb.GenerateResponse.FromString(data) for data in await stream.next()]
    assert event.error.code == pb.ERROR_CODE_OVERLOADED
    assert await stream.next() == []
    await asyncio.sleep(0)  # the abort is a task of its own
    assert set(llm.added) <= set(llm.aborted)


async def test_short_work_is_not_interrupted() -> None:
    turns: list[None] = []
    asyncio.get_running_loop().call_soon(turns.append, None)
    await Pause().if_due()
    assert turns == []

"""One probe at a time, shared by all who ask meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from openengine_vllm.protocol import errors
from openengine_vllm.services.probe import InferenceProbe
from tests.unit.scripted_engine import ScriptedEngine


async def start(probe: InferenceProbe, engine: ScriptedEngine) -> asyncio.Future[str | None]:
    """A caller that waits for a probe, which waits for the engine."""
    caller = asyncio.ensure_future(probe.run(cast("Any", engine)))
    await engine.probed.wait()
    await asyncio.sleep(0)
    return caller


async def test_callers_share_a_running_probe_and_not_an_old_one() -> None:
    probe, engine = InferenceProbe(60), ScriptedEngine()
    engine.gate.clear()
    callers = [await start(probe, engine) for _ in range(5)]
    assert engine.probes == 1
    engine.gate.set()

    assert await asyncio.gather(*callers) == [None] * 5
    assert await probe.run(cast("Any", engine)) is None
    assert engine.probes == 2


async def test_a_caller_that_leaves_does_not_take_the_probe_along() -> None:
    probe, engine = InferenceProbe(60), ScriptedEngine()
    engine.gate.clear()
    leaving = await start(probe, engine)
    staying = await start(probe, engine)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    engine.gate.set()

    assert await staying is None
    assert engine.probes == 1


async def test_an_engine_that_does_not_answer_counts_as_hung() -> None:
    probe, engine = InferenceProbe(0.01), ScriptedEngine()
    engine.gate.clear()

    failure = await probe.run(cast("Any", engine))

    assert failure == "the engine did not answer within 0.01 s"
    engine.gate.set()
    assert await probe.run(cast("Any", engine)) is None


async def test_an_engine_that_refuses() -> None:
    probe, engine = InferenceProbe(60), ScriptedEngine()
    engine.probe_error = errors.engine_dead()

    assert await probe.run(cast("Any", engine)) == errors.engine_dead().message


async def test_a_fault_reaches_every_caller_and_the_next_probe_is_new() -> None:
    probe, engine = InferenceProbe(60), ScriptedEngine()
    engine.gate.clear()
    engine.probe_error = RuntimeError("fault")
    callers = [await start(probe, engine) for _ in range(2)]
    engine.gate.set()

    results = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(result) for result in results] == [RuntimeError] * 2
    engine.probe_error = None
    assert await probe.run(cast("Any", engine)) is None


async def test_busy_engine_that_answers_others_is_not_hung() -> None:
    """The probe waits behind other work: only an engine that answers nobody counts as hung."""
    engine = ScriptedEngine()
    engine.gate.clear()
    probe = InferenceProbe(0.2)
    caller = await start(probe, engine)
    engine.stats.steps += 1
    assert await caller is None
    caller = await start(probe, engine)
    assert "did not answer" in (await caller or "")

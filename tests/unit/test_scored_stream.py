"""Scores in the streams of requests, driven by scripted collectors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openengine_vllm.engine import scores
from openengine_vllm.engine.outputs import StopRules
from openengine_vllm.engine.scores import PendingScores, PromptScores, ScoreRow
from openengine_vllm.engine.stops import StopAutomaton
from openengine_vllm.engine.token_information import ALL, Candidates, TokenInformation
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.registry import EndReason
from tests.unit.scripted_engine import EOS, Collector
from tests.unit.test_stream import PROMPT, Request, kinds, text

SCORES = TokenInformation(outputs=True)
MANY = 2000
"""Candidates of a token, enough to be encoded off the event loop."""
EVERYTHING = TokenInformation(outputs=True, output_candidates=Candidates(ALL, MANY))
WITH_PROMPT = TokenInformation(prompt=True)


class Unused(Executor):
    """For streams that have nothing to encode off the event loop."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        raise AssertionError("nothing is too much for the event loop")


class Held(Executor):
    """Runs what it is given in a thread, once the test says so."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go = threading.Event()
        self.threads: list[threading.Thread] = []
        self._pool = ThreadPoolExecutor(1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def run() -> Any:
            self.go.wait()
            self.threads.append(threading.current_thread())
            return fn(*args, **kwargs)

        self.asked.set()
        return self._pool.submit(run)


def score(token_id: int, place: int, candidates: int = 0) -> ScoreRow:
    """Of the token at a place of its output, from 1 on, which rank and score tell."""
    ids = np.array([token_id, *range(1, candidates + 1)], np.int32)
    return ScoreRow(ids, np.full(len(ids), -place, np.float32), place)


def put(
    collector: Collector, letters: str, start: int, reason: str | None = None, candidates: int = 0
) -> None:
    """Scored tokens; ``.`` is EOS."""
    ids = [EOS if letter == "." else ord(letter) for letter in letters]
    rows = [score(token_id, place, candidates) for place, token_id in enumerate(ids, start)]
    collector.put_ids(*ids, reason=reason, scores=rows)


def prompt_scores() -> PromptScores:
    ids = np.array([[token_id] for token_id in PROMPT[1:]], np.int32)
    return PromptScores(ids, -ids.astype(np.float32), np.array([3, 4]))


def records(events: Sequence[pb.GenerateResponse], index: int = 0) -> list[pb.TokenInfo]:
    return [
        record
        for event in events
        if event.HasField("token") and event.token.output_index == index
        for record in event.token.tokens
    ]


def check_scores(events: Sequence[pb.GenerateResponse], said: str) -> None:
    """Each record has the id and the scores of its place; their texts are the text."""
    sent = records(events)
    places = range(1, len(sent) + 1)
    assert [record.rank for record in sent] == list(places)
    assert [record.logprob for record in sent] == [-place for place in places]
    assert [record.token_id for record in sent] == [
        EOS if letter == "." else ord(letter) for letter in said[: len(sent)]
    ]
    assert "".join(record.token for record in sent if record.token_id != EOS) == text(events)


@given(
    st.lists(st.text("abc", max_size=4), max_size=8),
    st.sampled_from(["", ".", "c"]),
    st.sampled_from([None, ["abc"], ["cc", "abab"], ["aa"]]),
    st.booleans(),
    st.lists(st.booleans(), min_size=8, max_size=8),
)
async def test_scores_stay_with_their_tokens(
    deltas: list[str], last: str, stops: list[str] | None, include: bool, waits: list[bool]
) -> None:
    """Whatever stop texts and stop tokens hold back or take away, and deltas are merged."""
    automaton = None if stops is None else StopAutomaton(stops)
    rules = StopRules(automaton, frozenset({ord("c")}), include_in_output=include)
    request = Request(1, rules, wanted=SCORES, worker=Unused())
    reading = asyncio.ensure_future(request.rest())
    said = ""
    for delta, wait in zip(deltas, waits, strict=False):
        put(request.collectors[0], delta, len(said) + 1)
        said += delta
        if wait:
            await asyncio.sleep(0)
    put(request.collectors[0], last, len(said) + 1, "stop" if last else "length")
    said += last
    events = await reading

    check_scores(events, said)
    finished = events[-1].finished
    if not finished.stop_match.HasField("stop_text"):
        assert len(records(events)) == len(said) - (last == "c" and not include)


async def test_candidates_reach_the_client() -> None:
    request = Request(wanted=EVERYTHING, worker=Unused())
    put(request.collectors[0], "a", 1, "length", candidates=3)
    (record,) = records(await request.rest())

    assert [(one.token_id, one.rank, one.logprob) for one in record.candidates] == [
        (1, 1, -1),
        (2, 2, -1),
        (3, 3, -1),
    ]


async def test_many_scores_are_encoded_in_a_thread_and_in_order() -> None:
    worker = Held()
    request = Request(2, wanted=EVERYTHING, worker=worker)
    put(request.collectors[0], "a", 1, candidates=MANY)
    put(request.collectors[1], "x", 1, "length")
    waiting = asyncio.ensure_future(request.next())
    await worker.asked.wait()
    put(request.collectors[0], "b", 2, candidates=MANY)
    put(request.collectors[0], "c", 3, "length", candidates=MANY)
    assert not waiting.done()
    worker.go.set()
    events = [*await waiting, *await request.rest()]

    assert kinds(events) == ["token", "token", "finished", "token", "finished"]
    check_scores(events, "abc")
    assert all(len(record.candidates) == MANY for record in records(events))
    assert threading.current_thread() not in worker.threads
    assert len(worker.threads) == 2


async def test_a_merged_delta_is_split_where_it_gets_too_large() -> None:
    limit = 4000
    request = Request(wanted=EVERYTHING, worker=Unused(), most_bytes=limit)
    said = "abcdefghij" * 4
    put(request.collectors[0], said, 1, "length", candidates=20)
    batch = await request.stream.next()
    events = [pb.GenerateResponse.FromString(data) for data in batch]
    tokens = [event.token for event in events[:-1]]

    assert len(tokens) > 2
    assert all(len(data) <= limit for data in batch)
    assert all(one.text == "".join(record.token for record in one.tokens) for one in tokens)
    check_scores(events, said)
    assert events[-1].HasField("finished")


async def test_the_prompt_event_comes_first() -> None:
    """Also when the engine answers another output earlier."""
    request = Request(3, wanted=WITH_PROMPT)
    request.collectors[1].put("b")
    request.collectors[2].put("c", "length")
    waiting = asyncio.ensure_future(request.next())
    await request.collectors[2].taken.wait()
    assert not waiting.done()
    request.collectors[1].put("d")
    request.collectors[0].prompt_scores = prompt_scores()
    request.collectors[0].put("a")
    events = await waiting
    for collector in request.collectors[:2]:
        collector.put("", "length")
    events += await request.rest()

    assert kinds(events)[:4] == ["prompt", "token", "token", "finished"]
    assert kinds(events).count("prompt") == 1
    assert [text(events, index) for index in range(3)] == ["a", "bd", "c"]
    first, *others = events[0].prompt.tokens
    assert first == pb.TokenInfo(token_id=PROMPT[0], token="x")
    assert [(one.token_id, one.token, one.logprob, one.rank) for one in others] == [
        (PROMPT[1], "y", -PROMPT[1], 3),
        (PROMPT[2], "z", -PROMPT[2], 4),
    ]


async def test_outputs_that_end_before_the_prompt_event_have_its_usage_last() -> None:
    request = Request(2, wanted=WITH_PROMPT)
    request.collectors[1].put("b", "length")
    waiting = asyncio.ensure_future(request.rest())
    await request.collectors[1].taken.wait()
    request.collectors[0].prompt_scores = prompt_scores()
    request.collectors[0].put("a", "length")
    events = await waiting

    assert kinds(events) == ["prompt", "token", "finished", "token", "finished"]
    assert [e.HasField("usage") for e in events] == [False] * 4 + [True]


async def test_large_scores_may_wait_for_the_prompt_event() -> None:
    request = Request(2, wanted=replace(WITH_PROMPT, outputs=True))
    put(request.collectors[1], "b", 1, candidates=2000)
    waiting = asyncio.ensure_future(request.rest())
    await request.collectors[1].taken.wait()
    request.collectors[0].prompt_scores = prompt_scores()
    put(request.collectors[0], "a", 1, "length")
    put(request.collectors[1], "c", 2, "length")
    events = await waiting

    assert kinds(events)[:2] == ["prompt", "token"]
    assert [text(events, index) for index in range(2)] == ["a", "bc"]
    assert kinds(events).count("finished") == 2


@pytest.mark.parametrize("engine_is_quick", [False, True])
async def test_an_abort_before_the_prompt_event(engine_is_quick: bool) -> None:
    """There is no prompt event then, least of all one without the scores."""
    request = Request(2, wanted=WITH_PROMPT)
    request.collectors[1].put("b")
    waiting = asyncio.ensure_future(request.rest())
    await request.collectors[1].taken.wait()
    request.stream.end(EndReason.ABORTED)
    if engine_is_quick:
        for collector in request.collectors:
            collector.put("", "abort")
    events = await waiting

    assert kinds(events) == ["token", "finished", "finished"]
    assert {event.finished.reason for event in events[1:]} == {pb.FINISH_REASON_CANCELLED}
    assert sorted(event.finished.output_index for event in events[1:]) == [0, 1]
    assert text(events, 1) == "b"
    assert [e.HasField("usage") for e in events] == [False, False, True]


async def test_an_abort_behind_the_first_answer_leaves_the_prompt_event() -> None:
    request = Request(wanted=WITH_PROMPT)
    request.collectors[0].prompt_scores = prompt_scores()
    request.collectors[0].put("a")
    request.stream.end(EndReason.ABORTED)
    request.collectors[0].put("", "abort")
    events = await request.rest()

    assert kinds(events) == ["prompt", "token", "finished"]
    assert events[0].prompt.tokens[1].HasField("logprob")


async def test_an_error_before_the_prompt_event() -> None:
    request = Request(2, wanted=WITH_PROMPT)
    request.collectors[1].put("b")
    request.collectors[0].break_(RuntimeError())
    events = await request.rest()

    assert kinds(events)[-1] == "error"
    assert kinds(events).count("error") == 1
    assert "prompt" not in kinds(events)


async def test_what_fails_in_the_worker_is_one_internal_error() -> None:
    request = Request(wanted=WITH_PROMPT)
    ids = np.array([[PROMPT[1]]], np.int32)  # one position too few
    request.collectors[0].prompt_scores = PromptScores(ids, -ids.astype(np.float32), np.array([1]))
    request.collectors[0].put("a")
    events = await request.rest()

    assert kinds(events) == ["error"]
    assert events[0].error.code == pb.ERROR_CODE_INTERNAL
    assert events[0].HasField("usage")
    assert request.aborted == ["e0"]
    assert request.closed == 1


async def test_too_much_that_waits_ends_with_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "MOST_PENDING_BYTES", 3 * score(97, 1).size)
    request = Request(wanted=SCORES)
    collector = request.collectors[0]
    collector.pending = PendingScores(lambda: request.stream.end(EndReason.SLOW_CLIENT))
    collector.put_ids(97, 97, 97, scores=[score(97, place) for place in (1, 2, 3)])
    assert request.aborted == []
    collector.put_ids(97, scores=[score(97, 4)])
    assert request.aborted == ["e0"]
    assert request.closed == 1
    request.collectors[0].put("", "abort")
    events = await request.rest()

    check_scores(events, "aaaa")
    assert events[-1].error.code == pb.ERROR_CODE_OVERLOADED
    assert events[-1].error.retryable
    assert request.closed == 1


def finish(request: Request) -> None:
    request.collectors[0].put("a", "length")


def stop_text(request: Request) -> None:
    request.collectors[0].put("zz")


def engine_dies(request: Request) -> None:
    request.collectors[0].break_(RuntimeError())


def our_fault(request: Request) -> None:
    request.collectors[0].put_ids(-5)


def unasked_abort(request: Request) -> None:
    request.collectors[0].put("a", "abort")


ENDS = {
    reason.value: lambda request, reason=reason: request.stream.end(reason) for reason in EndReason
}


@pytest.mark.parametrize(
    "end",
    [finish, stop_text, engine_dies, our_fault, unasked_abort]
    + [pytest.param(end, id=name) for name, end in ENDS.items()],
)
async def test_every_ending_is_told_once(end: Callable[[Request], None]) -> None:
    """As soon as the last events are there, whether or not they are read any more."""
    request = Request(1, StopRules(StopAutomaton(["zz"])))
    request.collectors[0].put("b")
    await request.next()
    assert request.closed == 0
    end(request)
    await request.next()
    assert request.closed == 1
    assert await request.next() == []
    request.stream.close()
    assert request.closed == 1


async def test_an_early_close_is_told_once() -> None:
    request = Request(2)
    request.collectors[0].put("a", "length")
    await request.next()
    assert request.closed == 0
    request.stream.close()
    request.stream.close()
    assert request.closed == 1

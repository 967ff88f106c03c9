"""Outputs of one request merged into one stream, driven by scripted collectors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openengine_vllm.engine.information import InformationReader
from openengine_vllm.engine.outputs import SequenceOutput, StopRules
from openengine_vllm.engine.pieces import Pieces
from openengine_vllm.engine.stats import Progress
from openengine_vllm.engine.stops import StopAutomaton
from openengine_vllm.engine.stream import GenerationStream, RunningSequence
from openengine_vllm.engine.token_information import NO_INFORMATION, TokenInformation
from openengine_vllm.limits import MIB
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.generation_encoding import GenerationEncoder
from openengine_vllm.registry import EndReason
from tests.unit.scripted_engine import EOS, SPECIAL, WORKER, Collector, Letters

PROMPT = [ord(char) for char in "xyz"]
PIECES = Pieces([chr(token_id) if token_id != EOS else "<eos>" for token_id in range(1000)])


class Request:
    """A stream over ``n`` scripted outputs, and what it told the engine to drop."""

    def __init__(
        self,
        n: int = 1,
        rules: StopRules | None = None,
        *,
        caches: bool = True,
        wanted: TokenInformation = NO_INFORMATION,
        most_bytes: int = 4 * MIB,
        worker: Executor = WORKER,
    ) -> None:
        encoder = GenerationEncoder("r", most_bytes)
        reader = InformationReader(wanted, PIECES)
        self.closed = 0
        self.collectors = [Collector() for _ in range(n)]
        self.aborted: list[str] = []
        self.stream = GenerationStream(
            [
                RunningSequence(
                    index,
                    f"e{index}",
                    collector,  # type: ignore[arg-type]
                    SequenceOutput(Letters(), SPECIAL, rules or StopRules()),
                )
                for index, collector in enumerate(self.collectors)
            ],
            encoder,
            information=reader,
            prompt_tokens=7,
            prompt_event=(
                lambda scores: encoder.prompt(reader.prompt_records(PROMPT, scores, Letters()))
            )
            if wanted.prompt
            else None,
            reports_cache=caches,
            abort=self.aborted.extend,
            on_close=self._close,
            progress=Progress(),
            worker=worker,
        )

    def _close(self) -> None:
        self.closed += 1

    async def next(self) -> list[pb.GenerateResponse]:
        return [pb.GenerateResponse.FromString(data) for data in await self.stream.next()]

    async def rest(self) -> list[pb.GenerateResponse]:
        events = []
        while batch := await self.next():
            events += batch
        return events


def kinds(events: Sequence[pb.GenerateResponse]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]


def text(events: Sequence[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(e.token.text for e in events if e.token.output_index == index)


async def test_tokens_then_finish_with_usage() -> None:
    request = Request()
    request.collectors[0].put("ab", cached=3)
    first = await request.next()
    request.collectors[0].put("c.", "stop")
    last = await request.next()

    assert kinds(first) == ["token"]
    assert first[0].request_id == "r"
    assert first[0].token.HasField("output_index")
    assert [(t.token_id, t.token) for t in first[0].token.tokens] == [(97, "a"), (98, "b")]
    assert not first[0].HasField("usage")
    assert kinds(last) == ["token", "finished"]
    assert last[1].finished.reason == pb.FINISH_REASON_STOP
    assert last[1].finished.stop_match == pb.StopMatch(eos_token_id=EOS)
    assert last[1].usage == pb.Usage(
        prompt_tokens=7, completion_tokens=4, total_tokens=11, cached_prompt_tokens=3
    )
    assert await request.next() == []
    assert request.aborted == []


@pytest.mark.parametrize("reason", ["length", "repetition"])
async def test_a_limit_is_a_length_finish(reason: str) -> None:
    request = Request()
    request.collectors[0].put("a", reason)

    finished = (await request.rest())[-1].finished

    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert not finished.HasField("stop_match")


async def test_cached_tokens_are_absent_only_without_a_cache() -> None:
    for caches in (True, False):
        request = Request(caches=caches)
        request.collectors[0].put("a", "length")

        usage = (await request.rest())[-1].usage

        assert usage.HasField("cached_prompt_tokens") == caches
        assert usage.cached_prompt_tokens == 0


async def test_cached_tokens_are_those_of_the_first_output() -> None:
    """The others find the prompt of the first in the cache, which is no hit of the request's."""
    request = Request(2)
    request.collectors[0].put("a", "length", cached=3)
    request.collectors[1].put("b", "length", cached=6)

    assert (await request.rest())[-1].usage.cached_prompt_tokens == 3


async def test_outputs_end_one_by_one_and_the_last_has_the_usage() -> None:
    request = Request(3)
    for index, collector in enumerate(request.collectors):
        collector.put("ab"[: index + 1])
    events = await request.next()
    request.collectors[1].put("x", "length")
    events += await request.next()
    request.collectors[2].put("y.", "stop")
    request.collectors[0].put("z", "length")
    events += await request.rest()

    finished = [e.finished.output_index for e in events if e.HasField("finished")]
    assert finished == [1, 0, 2]
    assert [text(events, index) for index in range(3)] == ["az", "abx", "aby"]
    assert [e.HasField("usage") for e in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].usage.completion_tokens == 2 + 3 + 4
    assert events[-1].usage.prompt_tokens == 7


async def test_a_stop_text_ends_the_engines_part() -> None:
    request = Request(2, StopRules(StopAutomaton(["bc"])))
    request.collectors[0].put("abcd")
    events = await request.next()

    assert request.aborted == ["e0"]
    assert text(events) == "a"
    assert events[-1].finished.stop_match == pb.StopMatch(stop_text="bc")
    assert not events[-1].HasField("usage")
    # Whatever the engine still says about this output is not listened to.
    request.collectors[0].put("e", "abort")
    request.collectors[1].put("x", "length")
    events = await request.rest()
    assert kinds(events) == ["token", "finished"]
    assert events[-1].usage.completion_tokens == 3 + 1


async def test_a_stop_token_of_the_caller() -> None:
    request = Request(1, StopRules(token_ids=frozenset({ord("b")})))
    request.collectors[0].put("ab", "stop")
    events = await request.rest()

    assert text(events) == "a"
    assert events[-1].finished.stop_match == pb.StopMatch(stop_token_id=ord("b"))
    assert events[-1].usage.completion_tokens == 2


async def test_held_back_text_comes_before_the_finish() -> None:
    request = Request(1, StopRules(StopAutomaton(["abc"])))
    request.collectors[0].put("xab")
    assert text(await request.next()) == "x"
    request.collectors[0].put("", "length")

    assert kinds(events := await request.next()) == ["token", "finished"]
    assert text(events) == "ab"


async def test_nothing_to_show_is_no_event() -> None:
    request = Request(1, StopRules(StopAutomaton(["abc"])))
    request.collectors[0].put("a")
    waiting = asyncio.ensure_future(request.next())
    await request.collectors[0].taken.wait()
    assert not waiting.done()
    request.collectors[0].put("x")

    assert text(await waiting) == "ax"


async def test_next_waits_for_any_output() -> None:
    request = Request(2)
    waiting = asyncio.ensure_future(request.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    request.collectors[1].put("b")

    assert [e.token.output_index for e in await waiting] == [1]


async def test_abort_cancels_each_unfinished_output() -> None:
    request = Request(3, StopRules(StopAutomaton(["zz"])))
    request.collectors[0].put("a", "length")
    await request.next()
    request.collectors[1].put("bz")
    request.stream.end(EndReason.ABORTED)
    assert request.aborted == ["e1", "e2"]
    request.collectors[1].put("", "abort")
    events = await request.rest()

    assert text(events, 1) == "bz"
    finished = [e.finished for e in events if e.HasField("finished")]
    assert [one.output_index for one in finished] == [1, 2]
    assert {one.reason for one in finished} == {pb.FINISH_REASON_CANCELLED}
    assert [e.HasField("usage") for e in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].usage.completion_tokens == 3


async def test_abort_wakes_a_waiting_reader() -> None:
    request = Request()
    waiting = asyncio.ensure_future(request.rest())
    await asyncio.sleep(0)
    request.stream.end(EndReason.ABORTED)

    assert kinds(await waiting) == ["finished"]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (EndReason.DRAINED, pb.ERROR_CODE_DRAINING),
        (EndReason.ENGINE_DEAD, pb.ERROR_CODE_INTERNAL),
        (EndReason.SLOW_CLIENT, pb.ERROR_CODE_OVERLOADED),
    ],
)
async def test_other_ends_are_one_terminal_error(
    reason: EndReason, code: pb.ErrorCode.ValueType
) -> None:
    request = Request(2)
    request.collectors[0].put("a")
    request.stream.end(reason)
    events = await request.rest()

    assert kinds(events) == ["token", "error"]
    assert events[-1].error.code == code
    assert events[-1].error.retryable
    assert events[-1].usage.completion_tokens == 1
    assert set(request.aborted) == {"e0", "e1"}


async def test_an_end_after_the_last_event_changes_nothing() -> None:
    request = Request()
    request.collectors[0].put("a", "length")
    await request.rest()
    request.stream.end(EndReason.ABORTED)

    assert await request.next() == []


@pytest.mark.parametrize("reason", ["error", "something new"])
async def test_an_end_that_is_not_understood_is_an_error(reason: str) -> None:
    request = Request(2)
    request.collectors[0].put("a", reason)
    events = await request.rest()

    assert events[-1].error.code == pb.ERROR_CODE_INTERNAL
    assert kinds(events).count("error") == 1
    assert set(request.aborted) == {"e0", "e1"}


async def test_an_abort_that_nobody_asked_for_is_an_error() -> None:
    request = Request()
    request.collectors[0].put("a", "abort")
    events = await request.rest()

    assert events[-1].error.code == pb.ERROR_CODE_INTERNAL
    assert events[-1].error.retryable


async def test_what_vllm_throws_means_a_dead_engine() -> None:
    request = Request(2)
    request.collectors[0].put("a")
    request.collectors[1].break_(RuntimeError("secret"))
    events = await request.rest()

    assert kinds(events) == ["token", "error"]
    assert events[-1].error.code == pb.ERROR_CODE_INTERNAL
    assert events[-1].error.retryable
    assert "secret" not in events[-1].error.message


async def test_a_fault_of_ours_is_an_internal_error() -> None:
    request = Request()
    request.collectors[0].put_ids(-5)  # no character
    events = await request.rest()

    assert kinds(events) == ["error"]
    assert events[-1].error.code == pb.ERROR_CODE_INTERNAL
    assert not events[-1].error.retryable
    assert request.aborted == ["e0"]


async def test_close_drops_what_runs_once() -> None:
    request = Request(2)
    request.collectors[0].put("a", "length")
    await request.next()
    request.stream.close()
    request.stream.close()

    assert request.aborted == ["e1"]
    assert await request.next() == []


steps = st.lists(
    st.tuples(st.integers(0, 2), st.text("abc", max_size=3), st.booleans()), max_size=20
)


@settings(max_examples=100)
@given(steps, st.sampled_from([None, *EndReason]), st.booleans())
def test_order_of_any_stream(
    script: list[tuple[int, str, bool]], end: EndReason | None, watched: bool
) -> None:
    """Tokens, then one finish an output, the usage on the last event, and nothing after it."""

    async def play() -> tuple[Request, list[pb.GenerateResponse]]:
        request = Request(3, StopRules(StopAutomaton(["abc", "cc"])) if watched else None)
        done: set[int] = set()
        reading = asyncio.ensure_future(request.rest())
        for index, letters, last in script:
            if index not in done:
                request.collectors[index].put(letters, "length" if last else None)
                done |= {index} if last else set()
            if len(letters) % 2:
                await asyncio.sleep(0)
        if end is not None:
            request.stream.end(end)
        else:
            for index in {0, 1, 2} - done:
                request.collectors[index].put("", "length")
        return request, await reading

    _, events = asyncio.run(play())

    assert [e.HasField("usage") for e in events] == [False] * (len(events) - 1) + [True]
    assert all(e.token.tokens or e.token.text for e in events if e.HasField("token"))
    finished: set[int] = set()
    for event in events:
        if event.HasField("token"):
            assert event.token.output_index not in finished
        elif event.HasField("finished"):
            assert event.finished.output_index not in finished
            finished.add(event.finished.output_index)
    if not events[-1].HasField("error"):
        assert finished == {0, 1, 2}

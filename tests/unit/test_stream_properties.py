"""Several outputs in one stream, their tokens coming in at random and read at random."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from openengine_vllm.engine.outputs import Finish, StopKind, StopMatch, StopRules
from openengine_vllm.engine.stops import StopAutomaton
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.registry import EndReason
from tests.unit.output_oracle import Asked, Piece, Seen, outcome
from tests.unit.scripted_engine import EOS, SPECIAL
from tests.unit.test_stream import Request

STOP = ord("s")
"""A letter that callers stop at."""
PROMPT_TOKENS = 7
REASONS = {
    pb.FINISH_REASON_STOP: Finish.STOP,
    pb.FINISH_REASON_LENGTH: Finish.LENGTH,
    pb.FINISH_REASON_CANCELLED: Finish.ABORT,
}
KINDS = {
    "stop_text": StopKind.TEXT,
    "stop_token_id": StopKind.TOKEN,
    "eos_token_id": StopKind.EOS,
}


@dataclass(frozen=True)
class Script:
    """What the engine makes of one output, and the reason that it gives at the end."""

    ids: tuple[int, ...]
    reason: str

    @property
    def pieces(self) -> list[Piece]:
        return [
            Piece(one, "", SPECIAL[one]) if one in SPECIAL else Piece(one, chr(one))
            for one in self.ids
        ]


@dataclass(frozen=True)
class Play:
    """All outputs, and what happens: so many tokens of an output come, or the client reads."""

    scripts: tuple[Script, ...]
    asked: Asked
    turns: tuple[tuple[int, int, bool], ...]
    """Output, tokens, and whether the client reads then."""


@st.composite
def plays(draw: st.DrawFn) -> Play:
    stop_ids = draw(st.sampled_from([set(), {STOP}, {EOS}, {STOP, EOS}]))
    scripts = []
    for _ in range(draw(st.integers(1, 4))):
        reason = draw(st.sampled_from(["stop", "length", "repetition"]))
        ids = [ord(letter) for letter in draw(st.text("abc", max_size=8))]
        if draw(st.booleans()) and not stop_ids:
            ids.insert(draw(st.integers(0, len(ids))), EOS)
        if reason == "stop":
            at = draw(st.sampled_from([EOS, STOP]))
            ids = [*(one for one in ids if one != at), at]
        scripts.append(Script(tuple(ids), reason))
    asked = Asked(
        tuple(draw(st.lists(st.text("abcs", min_size=1, max_size=3), max_size=3))),
        frozenset(stop_ids),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
    )
    turn = st.tuples(st.integers(0, len(scripts) - 1), st.integers(0, 4), st.booleans())
    return Play(tuple(scripts), asked, tuple(draw(st.lists(turn, max_size=16))))


@dataclass
class Result:
    """All events, and what was put into each collector until they ended."""

    events: list[pb.GenerateResponse]
    put: list[list[int]]
    aborted: list[str]


async def perform(play: Play, end: EndReason | None) -> Result:
    asked = play.asked
    automaton = StopAutomaton(asked.stops) if asked.stops else None
    rules = StopRules(automaton, asked.stop_ids, asked.include, asked.min_tokens)
    request = Request(len(play.scripts), rules)
    left = [list(script.ids) for script in play.scripts]
    put: list[list[int]] = [[] for _ in left]
    done: set[int] = set()

    def give(index: int, count: int) -> None:
        if index in done:
            return
        head, left[index] = left[index][:count], left[index][count:]
        put[index] += head
        if left[index] or end is not None:
            request.collectors[index].put_ids(*head)
            return
        done.add(index)
        request.collectors[index].put_ids(*head, reason=play.scripts[index].reason)

    reading = asyncio.ensure_future(request.rest())
    for index, count, reads in play.turns:
        if end is not None:
            # The last token stays away, with the reason that would come with it.
            count = min(count, len(left[index]) - 1)
        if count >= 0:
            give(index, count)
        if reads:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    if end is None:
        for index in range(len(left)):
            give(index, len(left[index]))
    else:
        request.stream.end(end)
        for collector in request.collectors:
            collector.put_ids(reason="abort")
    events = await reading
    # Whatever an engine still says is not listened to.
    for collector in request.collectors:
        collector.put_ids(ord("a"), reason="length")
    return Result(events + await request.rest(), put, request.aborted)


def check_grammar(events: Sequence[pb.GenerateResponse], outputs: int) -> None:
    """The order of a stream of any request, by the contract alone."""
    kinds = [event.WhichOneof("event") for event in events]
    assert "prompt" not in kinds[1:]
    assert set(kinds) <= {"prompt", "token", "finished", "error"}
    assert kinds[-1] in ("finished", "error")
    assert "error" not in kinds[:-1]
    assert [event.HasField("usage") for event in events] == [False] * (len(events) - 1) + [True]
    finished: list[int] = []
    for event in events:
        assert event.request_id == "r"
        if event.HasField("token"):
            assert event.token.HasField("output_index")
            assert event.token.output_index not in finished
            assert event.token.output_index < outputs
            assert event.token.tokens or event.token.text
        elif event.HasField("finished"):
            assert event.finished.HasField("output_index")
            assert event.finished.output_index not in finished
            assert event.finished.HasField("stop_match") == (
                event.finished.reason == pb.FINISH_REASON_STOP
            )
            finished.append(event.finished.output_index)
    if kinds[-1] == "finished":
        assert sorted(finished) == list(range(outputs))
    else:
        assert len(finished) < outputs


def seen(events: Sequence[pb.GenerateResponse], index: int, generated: int) -> Seen:
    """What a client has of one output; events don't tell its own count."""
    tokens = [e.token for e in events if e.HasField("token") and e.token.output_index == index]
    (last,) = [
        e.finished for e in events if e.HasField("finished") and e.finished.output_index == index
    ]
    kind = last.stop_match.WhichOneof("match")
    return Seen(
        "".join(one.text for one in tokens),
        tuple((record.token_id, record.token) for one in tokens for record in one.tokens),
        REASONS[last.reason],
        None if kind is None else StopMatch(KINDS[kind], getattr(last.stop_match, kind)),
        generated,
    )


def expected(play: Play, result: Result, end: EndReason | None) -> list[Seen]:
    """What each output has to come to; one cut off ends as an abort, unless a stop came first."""
    seens = []
    for script, put in zip(play.scripts, result.put, strict=True):
        finish = Finish.STOP if script.reason == "stop" else Finish.LENGTH
        pieces = script.pieces
        if end is not None:
            finish, pieces = Finish.ABORT, pieces[: len(put)]
        seens.append(outcome(pieces, finish, play.asked))
    return seens


@given(plays())
def test_each_output_is_as_if_alone(play: Play) -> None:
    """The stream's grammar, every output's content, and a usage that adds up."""
    result = asyncio.run(perform(play, None))
    wanted = expected(play, result, None)

    check_grammar(result.events, len(play.scripts))
    for index, one in enumerate(wanted):
        assert seen(result.events, index, one.generated) == one
    usage = result.events[-1].usage
    assert usage.prompt_tokens == PROMPT_TOKENS
    assert usage.completion_tokens == sum(one.generated for one in wanted)
    assert usage.total_tokens == PROMPT_TOKENS + usage.completion_tokens
    # The engine is told of those that it does not know to have ended, once each.
    texts = [i for i, one in enumerate(wanted) if one.match and one.match.kind is StopKind.TEXT]
    assert set(result.aborted) <= {f"e{index}" for index in texts}
    assert len(set(result.aborted)) == len(result.aborted)


@given(plays())
def test_abort_cancels_what_has_not_ended(play: Play) -> None:
    """Each unfinished output ends as CANCELLED with all that it has, the last with usage."""
    result = asyncio.run(perform(play, EndReason.ABORTED))
    wanted = expected(play, result, EndReason.ABORTED)

    check_grammar(result.events, len(play.scripts))
    for index, one in enumerate(wanted):
        assert seen(result.events, index, one.generated) == one
    assert result.events[-1].usage.completion_tokens == sum(one.generated for one in wanted)
    assert set(result.aborted) == {f"e{index}" for index in range(len(wanted))}


@given(plays(), st.sampled_from([EndReason.DRAINED, EndReason.ENGINE_DEAD]))
def test_an_error_is_the_last_event_and_counts_too(play: Play, end: EndReason) -> None:
    """Outputs that ended before keep their finish; the error stands for all others."""
    result = asyncio.run(perform(play, end))
    wanted = expected(play, result, end)
    check_grammar(result.events, len(play.scripts))

    over = {e.finished.output_index for e in result.events if e.HasField("finished")}
    assert over == {i for i, one in enumerate(wanted) if one.finish is Finish.STOP}
    assert result.events[-1].HasField("error") == (len(over) < len(wanted))
    for index in over:
        assert seen(result.events, index, wanted[index].generated) == wanted[index]
    assert result.events[-1].usage.completion_tokens == sum(one.generated for one in wanted)

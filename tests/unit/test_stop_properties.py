"""The automaton, used as an output uses it, against searching the whole text for each stop."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from openengine_vllm.engine.stops import StopAutomaton
from tests.unit.output_oracle import may_grow

LETTERS = "ab€😀"


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Stops, and pieces of a text: the stops are parts of it, overlap, and begin one another."""
    text = draw(st.text(LETTERS, max_size=16))
    stops = draw(st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=3))
    for _ in range(draw(st.integers(0, 3)) if text else 0):
        start = draw(st.integers(0, len(text) - 1))
        part = text[start : start + draw(st.integers(1, 8))]
        stops.append(draw(st.sampled_from([part, part + "a", part[:-1] + "b", part * 2])))
    pieces = []
    while text:
        size = draw(st.integers(1, 6))
        pieces.append(text[:size])
        text = text[size:]
    return draw(st.permutations(stops)), pieces


def found(stops: Sequence[str], pieces: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop ends, and which it is, skipping what can be skipped."""
    automaton, state, end = StopAutomaton(stops), 0, 0
    for piece in pieces:
        if automaton.can_skip(state, piece):
            end += len(piece)
            continue
        for char in piece:
            state, end = automaton.advance(state, char), end + 1
            if (match := automaton.match[state]) is not None:
                return end, automaton.stop_text(match)
    return None


def naive(stops: Sequence[str], text: str) -> tuple[int, str] | None:
    """The same by searching; ``min`` keeps the first of those that end together."""
    ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    return min(ends, key=lambda one: one[0], default=None)


@given(searches())
def test_the_stop_that_ends_earliest_wins_then_the_first_of_the_list(
    search: tuple[list[str], list[str]],
) -> None:
    stops, pieces = search

    assert found(stops, pieces) == naive(stops, "".join(pieces))


@given(searches())
def test_depth_after_every_piece_is_the_tail_that_begins_a_stop(
    search: tuple[list[str], list[str]],
) -> None:
    """Also behind stops that were let pass, as they are before ``min_tokens``."""
    stops, pieces = search
    automaton, state, text = StopAutomaton(stops), 0, ""
    for piece in pieces:
        text += piece
        if not automaton.can_skip(state, piece):
            for char in piece:
                state = automaton.advance(state, char)
        assert automaton.depth[state] == may_grow(text, stops)


@given(searches(), st.integers(0, 6))
def test_a_stop_that_was_let_pass_does_not_hide_the_next(
    search: tuple[list[str], list[str]], passed: int
) -> None:
    stops, pieces = search
    text = "".join(pieces)
    automaton, state, ends = StopAutomaton(stops), 0, []
    for end, char in enumerate(text, 1):
        state = automaton.advance(state, char)
        if automaton.match[state] is not None and end > passed:
            ends.append(end)

    assert ends == [
        end
        for end in range(passed + 1, len(text) + 1)
        if any(text[:end].endswith(stop) for stop in stops)
    ]


@given(searches())
def test_the_order_of_the_list_decides_ties_alone(
    search: tuple[list[str], list[str]],
) -> None:
    stops, pieces = search
    other = sorted(stops, key=len)
    first, second = found(stops, pieces), found(other, pieces)

    assert (first and first[0]) == (second and second[0])
    if second is not None:
        # Of those that end there the shortest is first in the sorted list.
        text = "".join(pieces)[: second[0]]
        assert len(second[1]) == min(len(stop) for stop in stops if text.endswith(stop))

"""The automaton against plain string search."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openengine_vllm.engine.stops import StopAutomaton

letters = st.text("ab€", min_size=1, max_size=5)
stop_lists = st.lists(letters, min_size=1, max_size=5)


def states(automaton: StopAutomaton, text: str) -> list[int]:
    """The state after each character."""
    state, passed = 0, []
    for char in text:
        state = automaton.advance(state, char)
        passed.append(state)
    return passed


def first_ending(stops: Sequence[str], text: str) -> int | None:
    """The first stop of the list that ``text`` ends with."""
    return next((index for index, stop in enumerate(stops) if text.endswith(stop)), None)


def may_grow(stops: Sequence[str], text: str) -> int:
    """Length of the longest tail of ``text`` that begins a stop without being all of it."""
    return max(
        (length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length])),
        default=0,
    )


@given(stop_lists, st.text("ab€x", max_size=20))
def test_match_is_the_first_of_the_list_that_ends_here(stops: list[str], text: str) -> None:
    automaton = StopAutomaton(stops)

    for end, state in enumerate(states(automaton, text), 1):
        match = automaton.match[state]
        expected = first_ending(stops, text[:end])
        assert match == expected
        if match is not None:
            assert automaton.stop_text(match) == stops[match]


@given(stop_lists, st.text("ab€x", max_size=20))
def test_depth_is_what_may_still_grow_into_a_stop(stops: list[str], text: str) -> None:
    automaton = StopAutomaton(stops)

    for end, state in enumerate(states(automaton, text), 1):
        assert automaton.depth[state] == may_grow(stops, text[:end])


@given(stop_lists, st.text("ab€x", max_size=8), st.text("ab€x", max_size=8))
def test_skipped_text_leaves_the_start_state(stops: list[str], before: str, text: str) -> None:
    automaton = StopAutomaton(stops)
    state = [0, *states(automaton, before)][-1]

    if automaton.can_skip(state, text):
        assert set(states(automaton, text)) <= {0}
    else:
        assert state or any(stop[0] in text for stop in stops)


@pytest.mark.parametrize(
    ("stops", "text", "match"),
    [
        (["b", "ab"], "ab", 0),
        (["ab", "b"], "ab", 0),
        (["abc", "b"], "ab", 1),
        (["ab", "ab"], "ab", 0),
        (["aab", "aaab"], "aaab", 0),
        (["ca", "abcab", "b"], "abca", 0),
    ],
)
def test_stops_that_overlap(stops: list[str], text: str, match: int) -> None:
    automaton = StopAutomaton(stops)

    assert automaton.match[states(automaton, text)[-1]] == match


def test_a_whole_stop_is_not_held_back() -> None:
    """Where min_tokens lets a stop pass, nothing of it waits unless it can go on."""
    automaton = StopAutomaton(["ab", "abab"])

    assert [automaton.depth[state] for state in states(automaton, "abab")] == [1, 2, 3, 2]


def test_a_long_repetitive_stop_is_built_and_run() -> None:
    stop = "a" * 16_000 + "b"
    automaton = StopAutomaton([stop])

    passed = states(automaton, "a" * 20_000 + "b")

    assert automaton.depth[passed[-2]] == 16_000
    assert automaton.match[passed[-1]] == 0

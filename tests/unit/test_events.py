"""The bounded log of events, and its cursors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openengine_vllm.events import EventLog, FellBehindError

A, B = 1, 2


def test_cursors_read_from_now_on_each_at_its_own_pace() -> None:
    log = EventLog(4)
    log.append(A, b"0")
    early, late = log.cursor({A}), log.cursor({A})
    log.append(A, b"1")
    log.append(A, b"2")
    assert early.read(1) == [b"1"]
    assert early.read(9) == [b"2"]
    assert early.read(9) == []
    assert late.read(9) == [b"1", b"2"]


def test_a_reader_that_falls_behind_is_told_and_others_are_not() -> None:
    log = EventLog(2)
    slow, fast = log.cursor({A}), log.cursor({A})
    for name in (b"0", b"1", b"2"):
        log.append(A, name)
        assert fast.read(9) == [name]
    with pytest.raises(FellBehindError):
        slow.read(9)
    log.append(A, b"3")
    assert fast.read(9) == [b"3"]


@given(
    st.integers(1, 8),
    st.lists(st.one_of(st.sampled_from([A, B]), st.integers(0, 5).map(lambda n: -n - 1))),
    st.sets(st.sampled_from([A, B])),
)
def test_a_cursor_gives_its_kinds_in_order_or_says_that_it_lost_some(
    capacity: int, steps: list[int], kinds: set[int]
) -> None:
    """Positive steps append an event of that kind, negative ones read up to so many less one."""
    log = EventLog(capacity)
    cursor = log.cursor(kinds)
    made: list[bytes] = []
    read: list[bytes] = []
    behind = 0
    for number, step in enumerate([*steps, -1000]):
        if step > 0:
            log.append(step, b"%d" % number)
            made += [b"%d" % number] if step in kinds else []
            behind += 1
            continue
        if behind > capacity:
            with pytest.raises(FellBehindError):
                cursor.read(-step - 1)
            return
        found = cursor.read(-step - 1)
        assert len(found) <= -step - 1
        read += found
        assert read == made[: len(read)]
        behind = log.next - cursor._next
    assert read == made

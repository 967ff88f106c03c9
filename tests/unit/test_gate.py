"""Who may run together, and in which order the others are let in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openengine_vllm.engine.gate import BatchGate, BatchKind

RANKED, LISTED = BatchKind.RANKED, BatchKind.LISTED


async def settle() -> None:
    """Let every task run until all of them wait for something else."""
    for _ in range(10):
        await asyncio.sleep(0)


async def enter(gate: BatchGate, *kinds: BatchKind) -> list[asyncio.Task[None]]:
    """Have one task after the other ask to enter."""
    tasks = []
    for kind in kinds:
        tasks.append(asyncio.ensure_future(gate.enter(kind)))
        await settle()
    return tasks


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def inside(tasks: Sequence[asyncio.Task[None]]) -> list[int]:
    """Which of the tasks were let in."""
    return [index for index, task in enumerate(tasks) if task.done() and not task.cancelled()]


@pytest.mark.parametrize("kind", BatchKind)
async def test_one_kind_runs_together(kind: BatchKind) -> None:
    assert inside(await enter(BatchGate(), kind, kind, kind)) == [0, 1, 2]


@pytest.mark.parametrize(("first", "second"), [(RANKED, LISTED), (LISTED, RANKED)])
async def test_the_other_kind_waits_for_the_last_one(first: BatchKind, second: BatchKind) -> None:
    gate = BatchGate()
    tasks = await enter(gate, first, first, second, second)
    assert inside(tasks) == [0, 1]

    gate.leave()
    await settle()
    assert inside(tasks) == [0, 1]

    gate.leave()
    await settle()
    assert inside(tasks) == [0, 1, 2, 3]


async def test_nobody_overtakes() -> None:
    """One of the running kind waits behind an earlier one of the other kind."""
    gate = BatchGate()
    tasks = await enter(gate, RANKED, LISTED, RANKED, RANKED, LISTED)
    turns = [inside(tasks)]
    for running in (1, 1, 2):
        for _ in range(running):
            gate.leave()
        await settle()
        turns.append(inside(tasks))

    assert turns == [[0], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


async def test_an_empty_gate_takes_any_kind_again() -> None:
    gate = BatchGate()
    for kind in (RANKED, LISTED, RANKED):
        assert inside(await enter(gate, kind)) == [0]
        gate.leave()


async def test_a_cancelled_head_lets_in_those_behind_it() -> None:
    gate = BatchGate()
    tasks = await enter(gate, RANKED, LISTED, RANKED, LISTED)
    await cancel(tasks[1])
    await settle()

    assert inside(tasks) == [0, 2]
    gate.leave()
    await settle()
    assert inside(tasks) == [0, 2]
    gate.leave()
    await settle()
    assert inside(tasks) == [0, 2, 3]


async def test_a_cancelled_one_in_the_middle_is_passed_over() -> None:
    gate = BatchGate()
    tasks = await enter(gate, RANKED, LISTED, RANKED, LISTED)
    await cancel(tasks[2])
    gate.leave()
    await settle()

    assert inside(tasks) == [0, 1, 3]


@pytest.mark.parametrize("leave_first", [True, False])
async def test_a_leave_and_a_cancel_at_once(leave_first: bool) -> None:
    """The one that is let in does not run any more to see it: its turn must not be lost."""
    gate = BatchGate()
    tasks = await enter(gate, RANKED, LISTED, RANKED)
    if leave_first:
        gate.leave()
        tasks[1].cancel()
    else:
        tasks[1].cancel()
        gate.leave()
    await settle()

    assert tasks[1].cancelled()
    assert inside(tasks) == [0, 2]
    gate.leave()
    assert inside(await enter(gate, LISTED)) == [0]


@given(
    st.lists(
        st.one_of(st.sampled_from(BatchKind), st.tuples(st.booleans(), st.integers(0, 9))),
        max_size=30,
    )
)
def test_any_history(steps: list[BatchKind | tuple[bool, int]]) -> None:
    """Against a list in order of arrival, whose longest start of one kind is inside."""

    async def play() -> None:
        gate = BatchGate()
        queue: list[tuple[BatchKind, asyncio.Task[None]]] = []
        running: list[tuple[BatchKind, asyncio.Task[None]]] = []
        for step in steps:
            if isinstance(step, BatchKind):
                queue.append((step, asyncio.ensure_future(gate.enter(step))))
            else:
                leaves, index = step
                if leaves and running:
                    running.pop(index % len(running))
                    gate.leave()
                elif not leaves and queue:
                    queue.pop(index % len(queue))[1].cancel()
            await settle()
            while queue and (not running or queue[0][0] is running[0][0]):
                running.append(queue.pop(0))
            assert all(task.done() for _, task in running)
            assert not any(task.done() for _, task in queue)
        for _, task in queue:
            task.cancel()

    asyncio.run(play())

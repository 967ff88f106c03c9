"""Live requests: one namespace, a capacity, and exactly one end each."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from openengine_vllm.protocol.errors import OpenEngineError
from openengine_vllm.registry import EndReason, Entry, RequestRegistry


def test_a_live_id_is_taken_and_a_closed_one_is_free() -> None:
    registry = RequestRegistry(10)
    entry = registry.admit("a", 1)
    with pytest.raises(OpenEngineError) as caught:
        registry.admit("a", 1)
    registry.close(entry)

    assert caught.value.code_name == "DUPLICATE_REQUEST"
    assert caught.value.field == "request_id"
    assert registry.has_ended("a")
    again = registry.admit("a", 1)
    assert registry.find("a") is again
    assert not registry.has_ended("a")


def test_closing_an_old_entry_leaves_the_new_one_of_its_id() -> None:
    registry = RequestRegistry(10)
    old = registry.admit("a", 2)
    registry.close(old)
    new = registry.admit("a", 3)
    registry.close(old)
    registry.forget(old)

    assert registry.find("a") is new
    assert registry.sequences == 3


def test_capacity_counts_sequences() -> None:
    registry = RequestRegistry(4)
    registry.admit("a", 3)
    with pytest.raises(OpenEngineError) as caught:
        registry.admit("b", 2)

    assert caught.value.code_name == "OVERLOADED"
    assert caught.value.retryable
    assert registry.find("b") is None
    registry.admit("c", 1)
    assert registry.sequences == 4
    assert len(registry) == 2


def test_a_forgotten_request_leaves_no_trace() -> None:
    registry = RequestRegistry(4)
    entry = registry.admit("a", 3)
    registry.forget(entry)
    registry.forget(entry)

    assert registry.sequences == len(registry) == 0
    assert not registry.has_ended("a")


def test_only_the_last_ended_ids_are_remembered() -> None:
    registry = RequestRegistry(4, remembered=2)
    for name in ("a", "b", "c"):
        registry.close(registry.admit(name, 1))

    assert [registry.has_ended(name) for name in ("a", "b", "c")] == [False, True, True]


def test_forgetting_with_nothing_remembered() -> None:
    registry = RequestRegistry(4, remembered=0)

    registry.forget(registry.admit("a", 1))
    registry.close(registry.admit("a", 1))

    assert not registry.has_ended("a")


def test_the_first_reason_ends_a_request_once() -> None:
    registry = RequestRegistry(4)
    entry = registry.admit("a", 1)
    reasons: list[EndReason] = []
    entry.on_end(reasons.append)

    assert entry.end(EndReason.ABORTED)
    assert not entry.end(EndReason.DRAINED)
    entry.on_end(reasons.append)
    assert reasons == [EndReason.ABORTED, EndReason.ABORTED]


def test_a_closed_request_is_not_told_to_end() -> None:
    registry = RequestRegistry(4)
    entry = registry.admit("a", 1)
    reasons: list[EndReason] = []
    entry.on_end(reasons.append)
    registry.close(entry)

    assert not entry.end(EndReason.ABORTED)
    assert reasons == []


def test_iteration_bears_changes() -> None:
    registry = RequestRegistry(4)
    for name in ("a", "b"):
        registry.admit(name, 1)
    for entry in registry:
        registry.close(entry)

    assert len(registry) == 0


def test_watchers_hear_of_each_change() -> None:
    registry = RequestRegistry(4)
    lengths: list[int] = []

    def watcher() -> None:
        lengths.append(len(registry))

    registry.watch(watcher)
    entry = registry.admit("a", 1)
    registry.close(entry)
    registry.close(entry)
    registry.unwatch(watcher)
    registry.admit("b", 1)

    assert lengths == [1, 0]


class Machine(RuleBasedStateMachine):
    """Any order of calls keeps the counts and the names right."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = RequestRegistry(6, remembered=2)
        self.live: dict[str, Entry] = {}
        self.closed: list[Entry] = []

    @rule(name=st.sampled_from("abcd"), sequences=st.integers(1, 4))
    def admit(self, name: str, sequences: int) -> None:
        used = sum(entry.sequences for entry in self.live.values())
        if name in self.live or used + sequences > 6:
            with pytest.raises(OpenEngineError) as caught:
                self.registry.admit(name, sequences)
            code = "DUPLICATE_REQUEST" if name in self.live else "OVERLOADED"
            assert caught.value.code_name == code
        else:
            self.live[name] = self.registry.admit(name, sequences)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), forget=st.booleans())
    def end(self, data: st.DataObject, forget: bool) -> None:
        entry = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        (self.registry.forget if forget else self.registry.close)(entry)
        assert self.registry.has_ended(entry.request_id) != forget
        self.closed.append(entry)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def end_again(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.closed))
        self.registry.close(entry)
        self.registry.forget(entry)

    @invariant()
    def counts(self) -> None:
        assert self.registry.sequences == sum(entry.sequences for entry in self.live.values())
        assert {entry.request_id: entry for entry in self.registry} == self.live
        assert len(self.registry) == len(self.live)
        assert not any(self.registry.has_ended(name) for name in self.live)


TestMachine = Machine.TestCase

"""The process's states, and what each lets services do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from grpc import StatusCode

from openengine_vllm.lifecycle import Lifecycle, Serving
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError

SERVING = Serving(cast("Any", object()), pb.EngineInfo(), pb.ModelInfo(), False)


def ready() -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.ready(SERVING)
    return lifecycle


def draining() -> Lifecycle:
    lifecycle = ready()
    lifecycle.drain()
    return lifecycle


def dead() -> Lifecycle:
    lifecycle = ready()
    lifecycle.fail()
    return lifecycle


def refusal(use: Callable[[], object]) -> OpenEngineError:
    with pytest.raises(OpenEngineError) as caught:
        use()
    return caught.value


def test_starting() -> None:
    lifecycle = Lifecycle()

    assert lifecycle.state == pb.HEALTH_STATE_STARTING
    for error in (refusal(lambda: lifecycle.serving), refusal(lambda: lifecycle.accepting)):
        assert error.code_name == "OVERLOADED"
        assert error.status is StatusCode.UNAVAILABLE
        assert error.retryable


def test_ready() -> None:
    lifecycle = ready()

    assert lifecycle.state == pb.HEALTH_STATE_READY
    assert lifecycle.serving is lifecycle.accepting is SERVING


def test_draining_answers_and_takes_nothing_new() -> None:
    lifecycle = draining()

    assert lifecycle.state == pb.HEALTH_STATE_DRAINING
    assert lifecycle.serving is SERVING
    error = refusal(lambda: lifecycle.accepting)
    assert error.code_name == "DRAINING"
    assert error.status is StatusCode.UNAVAILABLE
    assert error.retryable


@pytest.mark.parametrize("before", [Lifecycle, ready, draining])
def test_dead_for_good(before: Callable[[], Lifecycle]) -> None:
    lifecycle = before()
    lifecycle.fail()
    lifecycle.drain()

    assert lifecycle.state == pb.HEALTH_STATE_NOT_READY
    for error in (refusal(lambda: lifecycle.serving), refusal(lambda: lifecycle.accepting)):
        assert error.code_name == "INTERNAL"
        assert error.status is StatusCode.UNAVAILABLE
        assert error.retryable


def test_a_drain_while_starting_changes_nothing() -> None:
    lifecycle = Lifecycle()
    lifecycle.drain()

    assert lifecycle.state == pb.HEALTH_STATE_STARTING


def test_death_during_a_drain() -> None:
    lifecycle = draining()
    lifecycle.fail()

    assert lifecycle.state == dead().state

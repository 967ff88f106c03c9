"""Reasoning tokens as vLLM's own parsers count them, on a real tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from openengine_vllm.engine.reasoning import ReasoningCounter, counter
from tests.support.models import THINK_END_ID, THINK_ID, model_dir

A = [300, 301, 302]
B = [400, 401]
OPEN, CLOSE = THINK_ID, THINK_END_ID


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(model_dir("tiny_llama_thinking")))


def made(name: str, tokenizer: Any) -> ReasoningCounter:
    count = counter(name, tokenizer)
    assert count is not None
    return count


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3", "step3"])
@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        # The prompt opens the reasoning, as chat templates do.
        ([*B, OPEN], [*A, CLOSE, *B], 3),
        ([*B, OPEN], A, 3),
        ([*B, OPEN, 310], [*A, CLOSE], 3),
        ([*B, OPEN], [CLOSE, *B], 0),
        # It was closed in the prompt.
        ([*B, OPEN, CLOSE], [*A, *B], 0),
        # Nothing opens it, and the output closes it.
        (B, [*A, CLOSE, *B], 3),
        (B, [], 0),
    ],
)
def test_where_the_prompt_matters(
    name: str, prompt: list[int], output: list[int], expected: int, tokenizer: Any
) -> None:
    assert made(name, tokenizer)(prompt, [output]) == expected


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (B, [OPEN, *A, CLOSE, *B], 3),
        (B, [OPEN, *A], 3),
        ([*B, OPEN, *A, CLOSE, *B], [OPEN, *A, CLOSE, *B], 3),
        ([*B, OPEN, CLOSE], [*B, OPEN, *A, CLOSE, *B], 3),
    ],
)
def test_where_the_output_opens_it(
    name: str, prompt: list[int], output: list[int], expected: int, tokenizer: Any
) -> None:
    assert made(name, tokenizer)(prompt, [output]) == expected


def test_outputs_add_up(tokenizer: Any) -> None:
    count = made("deepseek_r1", tokenizer)
    assert count([OPEN], [[*A, CLOSE], A, [CLOSE], []]) == 6


def test_a_parser_that_does_not_count_or_does_not_fit_tells_nothing(tokenizer: Any) -> None:
    with capture_logs() as logged:
        assert counter("granite", tokenizer) is None
        assert counter("deepseek_r1", _NoMarkers()) is None
    assert [entry["log_level"] for entry in logged] == ["info", "warning"]


def test_a_parser_that_fails_leaves_the_request_alone(tokenizer: Any) -> None:
    count = made("deepseek_r1", tokenizer)
    with capture_logs() as logged:
        assert count([OPEN], [None]) is None  # type: ignore[list-item]
    assert [entry["log_level"] for entry in logged] == ["error"]


class _NoMarkers:
    def get_vocab(self) -> dict[str, int]:
        return {}

"""``extra``: what of it is read, how it is checked, and what is never reached through it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from openengine_vllm.engine.extra import EXTRA_KEYS, NOTHING, extra_keys, plan_extra
from openengine_vllm.engine.requests import plan_generation
from openengine_vllm.limits import RequestLimits
from openengine_vllm.protocol import split
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError
from tests.unit.scripted_engine import FACTS

REASONING = replace(FACTS, thinking_budget=True)


REFUSED: tuple[tuple[str, Any], ...] = (
    ("logit_bias", {}),
    ("logit_bias", []),
    ("logit_bias", "7"),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"07": 1}),
    ("logit_bias", {"1000": 1}),
    ("logit_bias", {"99999999999999999999": 1}),
    ("logit_bias", {"7": 100.5}),
    ("logit_bias", {"7": "1"}),
    ("logit_bias", {"7": True}),
    ("logit_bias", {"7": None}),
    ("logit_bias", {"7": float("nan")}),
    ("logit_bias", {"7": float("inf")}),
    ("logit_bias", {str(token): 1 for token in range(1025)}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", 5),
    ("allowed_token_ids", [1000]),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [0.5]),
    ("allowed_token_ids", [True]),
    ("allowed_token_ids", ["1"]),
    ("allowed_token_ids", [float("inf")]),
    ("allowed_token_ids", [1] * 1025),
    ("bad_words", []),
    ("bad_words", "word"),
    ("bad_words", [" "]),
    ("bad_words", [1]),
    ("bad_words", ["x"] * 65),
    ("bad_words", ["x" * 401]),
    ("thinking_token_budget", -1),
    ("thinking_token_budget", 0.5),
    ("thinking_token_budget", "5"),
    ("thinking_token_budget", 2.0**31),
    ("skip_special_tokens", 1),
    ("skip_special_tokens", "false"),
    ("skip_special_tokens", None),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", 1000),
    ("truncate_prompt_tokens", 1.5),
)
"""Values that no engine with a vocabulary and a context of 1000 takes."""


def struct(**entries: Any) -> split.Struct:
    result = split.Struct()
    result.update(entries)
    return result


def read(**entries: Any) -> Any:
    return plan_extra(struct(**entries), REASONING, guided=False)


def test_what_is_read() -> None:
    options = read(
        logit_bias={"7": 100, "0": -0.5},
        allowed_token_ids=[1, 2.0],
        thinking_token_budget=0,
        skip_special_tokens=False,
        truncate_prompt_tokens=5,
    )
    assert options.sampling == {
        "logit_bias": {7: 100.0, 0: -0.5},
        "allowed_token_ids": [1, 2],
        "thinking_token_budget": 0,
    }
    assert (options.skip_special_tokens, options.truncate_prompt_tokens) == (False, 5)


def test_words_are_read() -> None:
    assert read(bad_words=["a", "b c"]).sampling == {"bad_words": ["a", "b c"]}


def test_minus_one_keeps_what_fits() -> None:
    assert read(truncate_prompt_tokens=-1).truncate_prompt_tokens == 999


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"other": 1},
        {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}},
        {"kv_transfer_params": {"a": 1}, "extra_args": {"kv_cache_report_mode": "full"}},
        {"n": 100000, "logprobs": -1, "prompt_logprobs": -1, "max_tokens": 0},
        {"nan": float("nan")},
    ],
)
def test_everything_else_is_ignored(entries: dict[str, Any]) -> None:
    assert read(**entries) is NOTHING


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_what_is_refused(key: str, value: Any) -> None:
    with pytest.raises(OpenEngineError) as caught:
        read(**{key: value})
    assert caught.value.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert (caught.value.field or "").startswith(f"extra.{key}")
    assert f"extra.{key}" in caught.value.message


@pytest.mark.parametrize("key", ["allowed_token_ids", "bad_words"])
def test_a_guide_and_a_mask_do_not_go_together(key: str) -> None:
    value: Any = [1] if key == "allowed_token_ids" else ["a"]
    with pytest.raises(OpenEngineError, match="guided"):
        plan_extra(struct(**{key: value}), FACTS, guided=True)


def test_what_would_leave_no_token_is_refused() -> None:
    """vLLM would go on with a token that is not allowed."""
    with pytest.raises(OpenEngineError, match="cannot be combined"):
        read(allowed_token_ids=[7], bad_words=["a"])
    request = pb.GenerateRequest(request_id="r", token_ids=pb.TokenIds(ids=[1]))
    request.stopping.min_tokens = 2
    request.stopping.conditions.add(stop_token_id=7)
    with pytest.raises(OpenEngineError, match="min_tokens forbids"):
        plan_generation(request, FACTS, RequestLimits(), struct(allowed_token_ids=[7]))
    plan_generation(request, FACTS, RequestLimits(), struct(allowed_token_ids=[7, 8]))


def test_what_an_engine_cannot_do_is_neither_told_of_nor_taken() -> None:
    assert set(extra_keys(REASONING)) == set(EXTRA_KEYS)
    assert "thinking_token_budget" not in extra_keys(FACTS)
    assert "bad_words" not in extra_keys(replace(REASONING, has_tokenizer=False))
    for key, value, facts in (
        ("thinking_token_budget", 5, FACTS),
        ("bad_words", ["a"], replace(FACTS, has_tokenizer=False)),
    ):
        with pytest.raises(OpenEngineError) as caught:
            plan_extra(struct(**{key: value}), facts, guided=False)
        assert caught.value.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE


def test_a_prompt_of_ids_may_be_longer_than_the_context() -> None:
    request = pb.GenerateRequest(request_id="r", token_ids=pb.TokenIds(ids=range(1, 1000)))
    request.token_ids.ids.extend([1, 2, 3])
    plan = plan_generation(request, FACTS, RequestLimits(), struct(truncate_prompt_tokens=4))
    assert plan.prompt_ids == [999, 1, 2, 3]


def test_many_stop_tokens_beside_min_tokens() -> None:
    """vLLM's GPU workers would stop for good."""
    request = pb.GenerateRequest(request_id="r", token_ids=pb.TokenIds(ids=[1]))
    for token_id in range(97):
        request.stopping.conditions.add(stop_token_id=token_id)
    plan_generation(request, FACTS, RequestLimits())
    request.stopping.min_tokens = 1
    with pytest.raises(OpenEngineError, match="97 stop token ids; 96"):
        plan_generation(request, FACTS, RequestLimits())

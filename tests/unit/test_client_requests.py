"""Requests from plain values: what is given is set, what is not is absent."""

from __future__ import annotations

import pytest

from openengine_vllm.client import GenerateOptions, generate_request
from openengine_vllm.protocol import v1 as pb


def test_nothing_is_set_that_was_not_given() -> None:
    request = generate_request("p", {"request_id": "r"})
    assert request == pb.GenerateRequest(request_id="r", prompt="p")
    for name in ("sampling", "stopping", "response", "kv", "guided"):
        assert not request.HasField(name)


def test_zero_and_false_are_not_absent() -> None:
    request = generate_request(
        "p", {"temperature": 0.0, "ignore_eos": False, "priority": 0, "max_tokens": 0}
    )
    assert request.sampling.HasField("temperature")
    assert request.stopping.HasField("ignore_eos")
    assert request.stopping.HasField("max_tokens")
    assert request.HasField("priority")


def test_ids_are_made_up_and_differ() -> None:
    first, second = generate_request("p", {}), generate_request("p", {})
    assert first.request_id != second.request_id
    assert len(first.request_id) >= 16


@pytest.mark.parametrize("ids", [[], (1, 2), range(3)])
def test_token_ids_are_a_prompt_even_when_there_are_none(ids: list[int]) -> None:
    request = generate_request(ids, {})
    assert request.WhichOneof("input") == "token_ids"
    assert list(request.token_ids.ids) == list(ids)


def test_logprobs_of_the_token_alone() -> None:
    request = generate_request("p", {"output_logprobs": 0})
    assert request.response == pb.ResponseOptions(return_output_logprobs=True)


@pytest.mark.parametrize("guide", ["json_schema", "regex"])
def test_a_guide_is_passed_on_even_when_empty(guide: str) -> None:
    request = generate_request("p", {guide: ""})  # type: ignore[misc]
    assert request.guided.WhichOneof("guide") == guide


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        ("p", {"max_tokens": -1}, "max_tokens"),
        ("p", {"priority": 2**31}, "priority"),
        ("p", {"seed": 2**64}, "seed"),
        ("p", {"stop_token_ids": [-1]}, "stop_token_id"),
        ("p", {"output_logprobs": -1}, "top_n"),
        ("p", {"model": "\ud800"}, "model"),
        ("p", {"regex": "a", "choices": ["b"]}, "choices, regex"),
        ([-1], {}, "ids"),
        ("\ud800", {}, "prompt"),
    ],
)
def test_what_no_message_can_hold_is_named(
    prompt: str | list[int], options: GenerateOptions, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        generate_request(prompt, options)

"""What comes over gRPC is what vLLM itself gives: tokens, text and ends, request by request.

`AsyncLLM` in its simplest mode (one final output) is the measure for all cases, and a stock
`vllm serve` for the greedy ones. Where the contract wants something else on purpose, `expected`
says so in terms of vLLM's answer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer

from tests.engine.cases import CASES, GREEDY, Case
from tests.engine.peers import Peer
from tests.engine.streams import Generation, Output
from tests.support.models import EOS_ID

# The first test waits for three engines to start, one after another.
pytestmark = pytest.mark.timeout(900)


class Expected(NamedTuple):
    """What an output has to be."""

    token_ids: list[int]
    text: str
    finish: str
    stop_match: tuple[str, str | int] | None


def expected(answer: dict[str, Any], options: dict[str, Any], tokenizer: Tokenizer) -> Expected:
    """What the contract makes of vLLM's answer for one output."""
    ids, text, reason = answer["token_ids"], answer["text"], answer["stop_reason"]
    if answer["finish_reason"] == "length":
        return Expected(ids, text, "LENGTH", None)
    assert answer["finish_reason"] == "stop"
    included = options.get("include_stop_in_output", False)
    if isinstance(reason, str):
        visible = [
            token_id
            for position, token_id in enumerate(ids)
            if _text_length(tokenizer, ids[:position]) < len(text)
        ]
        return Expected(visible, text, "STOP", ("stop_text", reason))
    stop = EOS_ID if reason is None else reason
    assert ids[-1] == stop
    if stop in options.get("stop_token_ids", ()):
        kept = ids if included else ids[:-1]
        return Expected(kept, text, "STOP", ("stop_token_id", stop))
    return Expected(ids, text, "STOP", ("eos_token_id", stop))


def _text_length(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Characters that are complete after these tokens."""
    return len(tokenizer.decode(ids).rstrip("\ufffd"))


def same(output: Output, wanted: Expected) -> None:
    """Assert that an output is what it has to be."""
    assert output.token_ids == wanted.token_ids
    assert output.text == wanted.text
    assert output.finish == wanted.finish
    assert output.stop_match == wanted.stop_match


async def _send(peer: Peer, case: Case, answer: dict[str, Any], tokenizer: Tokenizer) -> Generation:
    generation = await peer.generate(case.prompt_for(tokenizer), **answer["options"])
    assert generation.error is None
    assert generation.usage is not None
    assert generation.usage.prompt_tokens == len(answer["prompt_ids"])
    made = sum(len(output["token_ids"]) for output in answer["outputs"])
    assert generation.usage.completion_tokens == made
    return generation


@pytest.mark.parametrize("case", GREEDY, ids=lambda case: case.name)
def test_async_llm_and_vllm_serve_agree(
    case: Case, reference: dict[str, Any], completions: dict[str, dict[str, Any]]
) -> None:
    [output] = reference["answers"][case.name]["outputs"]
    [choice] = completions[case.name]["choices"]
    assert choice["token_ids"] == output["token_ids"]
    assert choice["text"] == output["text"]
    assert choice["finish_reason"] == output["finish_reason"]


@pytest.mark.parametrize("case", GREEDY, ids=lambda case: case.name)
async def test_greedy_equals_vllm(
    case: Case,
    reference: dict[str, Any],
    completions: dict[str, dict[str, Any]],
    tiny: Peer,
    tiny_tokenizer: Tokenizer,
) -> None:
    answer = reference["answers"][case.name]
    [choice] = completions[case.name]["choices"]
    generation = await _send(tiny, case, answer, tiny_tokenizer)
    [output] = answer["outputs"]
    wanted = expected(output, answer["options"], tiny_tokenizer)
    assert generation.only.token_ids == choice["token_ids"]
    if not case.splits_character:
        same(generation.only, wanted)
        assert generation.only.text == choice["text"]
        return
    # vLLM's text begins with what the prompt's unfinished character looks like.
    text = generation.only.text
    prompt = case.prompt_for(tiny_tokenizer)
    assert isinstance(prompt, list)
    assert choice["text"].endswith(text)
    repeated = choice["text"].removesuffix(text)
    assert tiny_tokenizer.decode(prompt).endswith(repeated)
    same(generation.only, wanted._replace(text=text))


@pytest.mark.parametrize("case", CASES[len(GREEDY) :], ids=lambda case: case.name)
async def test_request_equals_vllm(
    case: Case, reference: dict[str, Any], tiny: Peer, tiny_tokenizer: Tokenizer
) -> None:
    answer = reference["answers"][case.name]
    generation = await _send(tiny, case, answer, tiny_tokenizer)
    assert len(generation.outputs) == len(answer["outputs"])
    for output, wanted in zip(generation.outputs, answer["outputs"], strict=True):
        same(output, expected(wanted, answer["options"], tiny_tokenizer))


def test_cases_end_in_every_way(reference: dict[str, Any]) -> None:
    def reason(name: str) -> object:
        [output] = reference["answers"][name]["outputs"]
        return output["finish_reason"], output["stop_reason"]

    assert reason("eos-plain") == ("stop", None)
    assert reason("eos-ignored") == ("length", None)
    assert reason("eos-ignored-but-callers-stop") == ("stop", EOS_ID)
    assert reason("stop-inside")[0] == "stop"  # type: ignore[index]
    assert reason("stop-never") == ("length", None)
    assert reason("stop-id-later")[0] == "stop"  # type: ignore[index]
    assert reason("max-tokens-beyond-context") == ("length", None)


async def test_outputs_of_the_largest_seed_go_on_from_it(tiny: Peer) -> None:
    """vLLM refuses this (its seeds overflow); the outputs are those of seeds modulo 2^63."""
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12}
    both = await tiny.generate("Once", seed=2**64 - 1, num_sequences=2, **options)
    first = await tiny.generate("Once", seed=2**64 - 1, **options)
    second = await tiny.generate("Once", seed=0, **options)
    assert both.outputs[0].token_ids == first.only.token_ids
    assert both.outputs[1].token_ids == second.only.token_ids
    assert first.only.token_ids != second.only.token_ids

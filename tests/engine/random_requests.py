"""Two hundred requests over all options, drawn once and for all.

The same numbers come out in every process, so that the reference and the tests mean the same
requests. Options have the contract's names; what is to be known of each token goes by the names
of ResponseOptions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from openengine_vllm.protocol import v1 as pb
from tests.engine.cases import Case
from tests.support.models import VOCAB_SIZE

COUNT = 200
_SEED = 20261129
_WORDS = (
    "The quick brown fox jumps over the lazy dog. ",
    "Größe, façade, naïve ",
    "速い茶色の狐 ",
    "👩‍👩‍👧 👍🏽 ",
    '{"name": "fox", "legs": 4} ',
    "\n\n  ",
)
_GUIDES: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z]{3,9}( [0-9]+)?"},
    {"choice": {"choices": ["yes", "no", "über"]}},
    {"json_object": {}},
    {"json_schema": '{"type": "array", "items": {"type": "boolean"}, "maxItems": 4}'},
    {"ebnf_grammar": 'root ::= "a" root | "b"'},
)
_SALTS = ("", "tenant-a", "tenant-b")


def _sometimes(draw: random.Random, share: float, make: Callable[[], Any]) -> Any:
    return make() if draw.random() < share else None


def _prompt(draw: random.Random) -> str | Callable[[Any], list[int]]:
    if draw.random() < 0.5:
        return "".join(draw.choices(_WORDS, k=draw.randint(1, 12)))
    ids = [draw.randrange(7, VOCAB_SIZE) for _ in range(draw.choice((1, 2, 9, 60, 300)))]
    # Ends in a whole character, because vLLM repeats the text of an unfinished one.
    ids.append(draw.randrange(40, 60))
    return lambda tokenizer: ids


def _sampling(draw: random.Random) -> dict[str, Any]:
    options = {
        "presence_penalty": _sometimes(draw, 0.2, lambda: draw.uniform(-2, 2)),
        "frequency_penalty": _sometimes(draw, 0.2, lambda: draw.uniform(-2, 2)),
        "repetition_penalty": _sometimes(draw, 0.2, lambda: draw.uniform(0.5, 2)),
    }
    if draw.random() < 0.4:
        return {**options, "temperature": 0.0}
    return {
        **options,
        "temperature": draw.uniform(0.3, 2),
        "seed": draw.randrange(2**63),
        "num_sequences": _sometimes(draw, 0.3, lambda: draw.randint(1, 4)),
        "top_p": _sometimes(draw, 0.3, lambda: draw.uniform(0.05, 1)),
        "top_k": _sometimes(draw, 0.3, lambda: draw.choice((-1, 0, 1, 5, 50, 2**31 - 1))),
        "min_p": _sometimes(draw, 0.3, lambda: draw.uniform(0, 0.3)),
    }


def _stopping(draw: random.Random) -> dict[str, Any]:
    most = draw.randint(1, 40)
    return {
        "max_tokens": most,
        "min_tokens": _sometimes(draw, 0.2, lambda: draw.randint(0, most)),
        "ignore_eos": _sometimes(draw, 0.4, lambda: draw.random() < 0.7),
        "include_stop_in_output": _sometimes(draw, 0.4, lambda: draw.random() < 0.7),
    }


def _selection(draw: random.Random, *, prompt: bool) -> dict[str, Any]:
    kind = "top_n" if prompt else draw.choice(("top_n", "top_n", "token_ids", "all"))
    if kind == "top_n":
        return {"top_n": draw.choice((1, 2, 5, 20))}
    if kind == "all":
        return {"all": {}}
    return {"token_ids": {"ids": draw.sample(range(VOCAB_SIZE), draw.choice((1, 3, 128)))}}


def _response(draw: random.Random) -> dict[str, Any]:
    asks_prompt = draw.random() < 0.3
    return {
        "return_output_logprobs": _sometimes(draw, 0.4, lambda: True),
        "output_candidates": _sometimes(draw, 0.3, lambda: _selection(draw, prompt=False)),
        "return_prompt_logprobs": True if asks_prompt else None,
        "prompt_candidates": _sometimes(
            draw, 0.5 * asks_prompt, lambda: _selection(draw, prompt=True)
        ),
        "prompt_logprob_start": _sometimes(draw, 0.3 * asks_prompt, lambda: draw.randint(0, 1)),
    }


def _stop(draw: random.Random) -> Callable[[str], list[str]]:
    places = [(draw.random(), draw.randint(1, 9)) for _ in range(draw.randint(1, 3))]

    def make(text: str) -> list[str]:
        starts = [(int(place * len(text)), length) for place, length in places]
        return [text[start : start + length] for start, length in starts if text] or ["nothing"]

    return make


def _stop_ids(draw: random.Random) -> Callable[[list[int]], list[int]]:
    place, other = draw.random(), draw.randrange(VOCAB_SIZE)
    return lambda ids: [ids[int(place * len(ids))], other] if ids else [other]


def _case(number: int) -> Case:
    draw = random.Random(_SEED + number)
    options = {
        **_sampling(draw),
        **_stopping(draw),
        "response": {name: v for name, v in _response(draw).items() if v is not None},
        "guided": _sometimes(draw, 0.15, lambda: draw.choice(_GUIDES)),
        "priority": draw.randint(-3, 3),
        "cache_salt": draw.choice(_SALTS),
        "bypass_prefix_cache": _sometimes(draw, 0.3, lambda: draw.random() < 0.7),
    }
    return Case(
        f"random-{number}",
        _prompt(draw),
        {name: value for name, value in options.items() if value is not None},
        stop=_sometimes(draw, 0.35, lambda: _stop(draw)),
        stop_token_ids=_sometimes(draw, 0.2, lambda: _stop_ids(draw)),
    )


RANDOM = tuple(_case(number) for number in range(COUNT))
"""The requests; the engine has to run with priority scheduling and `--max-logprobs -1`."""


def message(case: Case, tokenizer: Any, options: dict[str, Any]) -> pb.GenerateRequest:
    """The request of a case, with the options that the reference came to."""
    prompt = case.prompt_for(tokenizer)
    given = dict(options)
    response, guide = given.pop("response"), given.pop("guided", None)
    request = pb.GenerateRequest(request_id=case.name, priority=given.pop("priority"))
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids.extend(prompt)
    for name in ("cache_salt", "bypass_prefix_cache"):
        if name in given:
            setattr(request.kv, name, given.pop(name))
    for text in given.pop("stop", ()):
        request.stopping.conditions.add(stop_text=text)
    for token_id in given.pop("stop_token_ids", ()):
        request.stopping.conditions.add(stop_token_id=token_id)
    for name in ("max_tokens", "min_tokens", "ignore_eos", "include_stop_in_output"):
        if name in given:
            setattr(request.stopping, name, given.pop(name))
    for name, value in given.items():
        setattr(request.sampling, name, value)
    request.response.MergeFrom(pb.ResponseOptions(**response))
    if guide:
        request.guided.MergeFrom(pb.GuidedDecoding(**guide))
    return request

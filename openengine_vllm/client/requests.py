"""Generate requests from plain Python values, as people write them in code and on a command line.

A pure function over the contract's message: whatever is not given stays absent, so that the
model's own defaults hold.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TypedDict, cast

from google.protobuf.message import Message

from openengine_vllm.protocol import v1 as pb

Prompt = str | Sequence[int]
"""Text, or the token ids that the model is to see as they are."""


class GenerateOptions(TypedDict, total=False):
    """What `GenerateRequest` offers, flat. An option that isn't given is absent in the request."""

    request_id: str
    model: str
    lora_name: str
    priority: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    num_sequences: int
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_in_output: bool
    output_logprobs: int
    """Candidates per output token, next to the token's own logprob, which comes alone with 0."""
    json_schema: str
    regex: str
    choices: Sequence[str]
    cache_salt: str


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "num_sequences",
)
_STOPPING = ("max_tokens", "min_tokens", "ignore_eos", "include_stop_in_output")
_TOP_LEVEL = ("model", "lora_name", "priority")


def new_request_id() -> str:
    """An id that no other request has."""
    return uuid.uuid4().hex


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The request for one prompt; an absent `request_id` is made up.

    Raises ValueError for a value that the message can't hold, such as a negative `max_tokens`,
    and for more than one of `json_schema`, `regex` and `choices`. Everything else is the
    server's to judge.
    """
    request = pb.GenerateRequest()
    _set(request, "request_id", options.get("request_id") or new_request_id())
    if isinstance(prompt, str):
        _set(request, "prompt", prompt)
    else:
        request.token_ids.SetInParent()
        _set(request.token_ids, "ids", list(prompt))
    given = cast(dict[str, object], options)
    for names, target in (
        (_TOP_LEVEL, request),
        (_SAMPLING, request.sampling),
        (_STOPPING, request.stopping),
    ):
        for name in names:
            if name in given:
                _set(target, name, given[name])
    for text in options.get("stop", ()):
        request.stopping.conditions.add(stop_text=_utf8(text))
    for token_id in options.get("stop_token_ids", ()):
        _set(request.stopping.conditions.add(), "stop_token_id", token_id)
    if "output_logprobs" in options:
        request.response.return_output_logprobs = True
        if options["output_logprobs"]:
            _set(request.response.output_candidates, "top_n", options["output_logprobs"])
    if "cache_salt" in options:
        _set(request.kv, "cache_salt", options["cache_salt"])
    _guide(request.guided, options)
    return request


def _set(message: Message, name: str, value: object) -> None:
    try:
        if isinstance(value, Sequence) and not isinstance(value, str):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, _utf8(value) if isinstance(value, str) else value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _guide(guided: pb.GuidedDecoding, options: GenerateOptions) -> None:
    guides = {"json_schema", "regex", "choices"} & options.keys()
    if len(guides) > 1:
        raise ValueError(f"only one of {', '.join(sorted(guides))} can guide the output")
    if "json_schema" in options:
        _set(guided, "json_schema", options["json_schema"])
    if "regex" in options:
        _set(guided, "regex", options["regex"])
    if "choices" in options:
        guided.choice.choices.extend(map(_utf8, options["choices"]))


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("the text is not valid Unicode") from error
    return text

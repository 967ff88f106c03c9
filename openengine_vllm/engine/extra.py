"""Parameters of vLLM's own, which requests of the split revision carry in ``extra``.

They are named as vLLM names them and checked like everything else; keys that are not among
:data:`EXTRA_KEYS` are ignored, as that revision says. What vLLM would take in such a place and
does harm with (`extra_args`, and with it the parameters of KV transfer) is not among them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from google.protobuf import json_format

from openengine_vllm import limits
from openengine_vllm.engine.checks import check_token_ids, rejected, unsupported
from openengine_vllm.engine.facts import ModelFacts
from openengine_vllm.protocol import split

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_LARGEST_BIAS: Final = 100


@dataclass(frozen=True, slots=True)
class ExtraOptions:
    """What ``extra`` asks for."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of vLLM's SamplingParams."""
    skip_special_tokens: bool = True
    """Whether the text leaves special tokens out."""
    truncate_prompt_tokens: int | None = None
    """The prompt's last tokens that are kept."""


NOTHING: Final = ExtraOptions()


def plan_extra(
    extra: split.Struct,
    model: ModelFacts,
    *,
    guided: bool = False,
    forbidden: Collection[int] = (),
) -> ExtraOptions:
    """Read the known keys.

    Args:
        guided: whether the output has a guide.
        forbidden: token ids that cannot come at first: stops, where there have to be tokens.

    Raises:
        OpenEngineError: with the path of the key at fault and what it allows.
    """
    known = {key: extra.fields[key] for key in EXTRA_KEYS if key in extra.fields}
    if not known:
        return NOTHING
    sampling: dict[str, Any] = {}
    for key, value in known.items():
        if (read := _SAMPLING.get(key)) is not None:
            sampling[key] = read(f"extra.{key}", _plain(f"extra.{key}", value), model)
    for mask in _MASKS:
        if guided and mask in sampling:
            raise rejected(f"extra.{mask}", "cannot be combined with guided")
    if all(mask in sampling for mask in _MASKS):
        # What a text is in tokens is known too late to see whether any token is left.
        raise rejected("extra.bad_words", "cannot be combined with extra.allowed_token_ids")
    allowed = sampling.get("allowed_token_ids")
    if allowed is not None and forbidden and not set(allowed).difference(forbidden):
        raise rejected(
            "extra.allowed_token_ids", "has stop tokens alone, which min_tokens forbids at first"
        )
    return ExtraOptions(
        sampling=sampling,
        skip_special_tokens=_flag(known, "skip_special_tokens", default=True),
        truncate_prompt_tokens=_truncation(known, model),
    )


def _plain(path: str, value: split.Value) -> Any:
    try:
        return json_format.MessageToDict(value)
    except (json_format.Error, ValueError):
        raise rejected(path, "holds a number that JSON does not have") from None


def _logit_bias(path: str, value: Any, model: ModelFacts) -> dict[int, float]:
    most = limits.MAX_LOGIT_BIAS
    if not isinstance(value, dict) or not 0 < len(value) <= most:
        raise rejected(path, f"must map 1 to {most} token ids to numbers")
    if not all(_TOKEN_ID.fullmatch(key) for key in value):
        raise rejected(path, "has keys that are no token ids")
    if not all(_is_number(bias) and abs(bias) <= _LARGEST_BIAS for bias in value.values()):
        raise rejected(path, f"must have values from {-_LARGEST_BIAS} to {_LARGEST_BIAS}")
    biases = {int(key): float(bias) for key, bias in value.items()}
    check_token_ids(biases, path, model)
    return biases


def _allowed_token_ids(path: str, value: Any, model: ModelFacts) -> list[int]:
    most = limits.MAX_ALLOWED_TOKEN_IDS
    if not isinstance(value, list) or not 0 < len(value) <= most:
        raise rejected(path, f"must be a list of 1 to {most} token ids")
    ids = [_integer(f"{path}[{index}]", item, 0) for index, item in enumerate(value)]
    check_token_ids(ids, path, model)
    return ids


def _bad_words(path: str, value: Any, model: ModelFacts) -> list[str]:
    most = limits.MAX_BAD_WORDS
    if not model.has_tokenizer:
        raise unsupported(path, "needs a tokenizer; this engine has none")
    if (
        not isinstance(value, list)
        or not 0 < len(value) <= most
        or not all(isinstance(word, str) and word.strip() for word in value)
    ):
        raise rejected(path, f"must be a list of 1 to {most} texts, none of them blank")
    size = sum(len(word.encode()) for word in value)
    if size > limits.MAX_BAD_WORDS_BYTES:
        raise rejected(path, f"has {size} bytes; {limits.MAX_BAD_WORDS_BYTES} are allowed")
    return cast("list[str]", value)


def _thinking_token_budget(path: str, value: Any, model: ModelFacts) -> int:
    if not model.thinking_budget:
        raise unsupported(path, "needs an engine with --reasoning-parser")
    return _integer(path, value, 0)


def _flag(known: Mapping[str, split.Value], key: str, *, default: bool) -> bool:
    if key not in known:
        return default
    if known[key].WhichOneof("kind") != "bool_value":
        raise rejected(f"extra.{key}", "must be true or false")
    return known[key].bool_value


def _truncation(known: Mapping[str, split.Value], model: ModelFacts) -> int | None:
    key = "truncate_prompt_tokens"
    if key not in known:
        return None
    path, longest = f"extra.{key}", model.max_model_len - 1
    tokens = _integer(path, _plain(path, known[key]), -1)
    if tokens == -1:
        return longest
    if not 1 <= tokens <= longest:
        raise rejected(path, f"is {tokens}; allowed are 1 to {longest}, and -1 for that")
    return tokens


def _integer(path: str, value: Any, least: int) -> int:
    if not _is_number(value) or value != int(value) or not least <= value < 2**31:
        raise rejected(path, f"must be an integer from {least} to {2**31 - 1}")
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_SAMPLING: Final[Mapping[str, Callable[[str, Any, ModelFacts], Any]]] = {
    "allowed_token_ids": _allowed_token_ids,
    "bad_words": _bad_words,
    "logit_bias": _logit_bias,
    "thinking_token_budget": _thinking_token_budget,
}
_MASKS: Final = ("allowed_token_ids", "bad_words")
"""What can leave a guide no token to go on with."""

EXTRA_KEYS: Final = (*_SAMPLING, "skip_special_tokens", "truncate_prompt_tokens")
"""The keys that are read."""


def extra_keys(model: ModelFacts) -> list[str]:
    """Those that this engine can honour."""
    missing = set() if model.thinking_budget else {"thinking_token_budget"}
    if not model.has_tokenizer:
        missing.add("bad_words")
    return [key for key in EXTRA_KEYS if key not in missing]

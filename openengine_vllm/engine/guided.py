"""The guide of a request: what is checked of it without compiling it, and what is supported.

One table says which guides each of vLLM's backends knows; requests are checked against it and
discovery tells of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from openengine_vllm import limits
from openengine_vllm.engine.checks import rejected, unsupported
from openengine_vllm.engine.facts import ModelFacts
from openengine_vllm.protocol import v1 as pb

GuideValue = str | tuple[str, ...] | bool

_MODES: Mapping[str, pb.GuidedDecodingMode.ValueType] = MappingProxyType(
    {
        "json_schema": pb.GUIDED_DECODING_MODE_JSON_SCHEMA,
        "regex": pb.GUIDED_DECODING_MODE_REGEX,
        "ebnf_grammar": pb.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
        "structural_tag": pb.GUIDED_DECODING_MODE_STRUCTURAL_TAG,
        "choice": pb.GUIDED_DECODING_MODE_CHOICE,
        "json_object": pb.GUIDED_DECODING_MODE_JSON_OBJECT,
    }
)
_LACKING: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "outlines": frozenset({"ebnf_grammar", "structural_tag", "json_object"}),
        "lm-format-enforcer": frozenset({"ebnf_grammar", "structural_tag"}),
    }
)

_NATIVE_PREFIX = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
_SOURCE = re.compile(r"\S+\.(?:cc|cpp|h|py|rs)(?::\d+)+:? ?")


@dataclass(frozen=True, slots=True)
class Guide:
    """A guide that is well formed as far as can be told without compiling it."""

    kind: str
    """The field of GuidedDecoding that is set."""
    value: GuideValue
    """The field's text, the choices, or true for a JSON object."""

    @property
    def field_path(self) -> str:
        """Where the guide is in the request."""
        return f"guided.{self.kind}"


def plan_guide(request: pb.GenerateRequest, model: ModelFacts) -> Guide | None:
    """The request's guide, or None without one.

    Raises:
        OpenEngineError: no guide is set, it is empty, too large or not JSON where it has to be,
            or this engine cannot follow it.
    """
    if not request.HasField("guided"):
        return None
    guided = request.guided
    if not model.guide_backend:
        raise unsupported("guided", "needs a tokenizer and a model that generates token by token")
    if guided.backend not in ("", model.guide_backend):
        raise unsupported(
            "guided.backend",
            f"is {guided.backend[:64]!r}; allowed are {model.guide_backend!r} and nothing",
        )
    kind = guided.WhichOneof("guide")
    if kind is None:
        raise rejected("guided", "must set one of " + ", ".join(_MODES))
    if kind not in _supported(model.guide_backend):
        raise unsupported(f"guided.{kind}", f"is not known to the backend {model.guide_backend}")
    return Guide(kind, _value(guided, kind))


def guide_modes(model: ModelFacts) -> list[pb.GuidedDecodingMode.ValueType]:
    """The kinds of guides that requests may use; none where guided decoding is unsupported."""
    if not model.guide_backend:
        return []
    return [_MODES[kind] for kind in _supported(model.guide_backend)]


def short_reason(reason: str) -> str:
    """What a compiler says, in one line of bounded length, without the paths of its sources."""
    text = _SOURCE.sub("", _NATIVE_PREFIX.sub("", reason))
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(text) > limits.MAX_GUIDE_REASON_LENGTH:
        text = text[: limits.MAX_GUIDE_REASON_LENGTH - 1] + "…"
    return text or "it does not compile"


def _supported(backend: str) -> list[str]:
    lacking = _LACKING.get(backend, frozenset())
    return [kind for kind in _MODES if kind not in lacking]


def _value(guided: pb.GuidedDecoding, kind: str) -> GuideValue:
    if kind == "json_object":
        return True
    if kind == "choice":
        return _choices(guided.choice)
    text: str = getattr(guided, kind)
    path = f"guided.{kind}"
    if not text.strip():
        raise rejected(path, "must not be empty")
    _check_size(path, len(text.encode()))
    if "\0" in text:
        raise rejected(path, "must not hold a NUL character")
    if kind in ("json_schema", "structural_tag"):
        _check_json(path, text)
    return text


def _choices(choice: pb.ChoiceConstraint) -> tuple[str, ...]:
    path = "guided.choice.choices"
    choices = tuple(choice.choices)
    if not choices:
        raise rejected(path, "must hold at least one choice")
    if len(choices) > limits.MAX_GUIDE_CHOICES:
        raise rejected(path, f"has {len(choices)} entries; {limits.MAX_GUIDE_CHOICES} are allowed")
    _check_size(path, sum(len(text.encode()) for text in choices))
    for position, text in enumerate(choices):
        if "\0" in text:
            raise rejected(f"{path}[{position}]", "must not hold a NUL character")
    return choices


def _check_size(path: str, size: int) -> None:
    if size > limits.MAX_GUIDE_BYTES:
        raise rejected(path, f"has {size} bytes; {limits.MAX_GUIDE_BYTES} are allowed")


def _check_json(path: str, text: str) -> None:
    try:
        value = json.loads(text, parse_constant=_no_constant)
        references = list(_references(value))
    except RecursionError:
        raise rejected(path, "is nested too deeply") from None
    except ValueError as error:
        raise rejected(path, f"is not JSON: {short_reason(str(error))}") from None
    if not isinstance(value, dict):
        raise rejected(path, "must be a JSON object")
    if not all(reference.startswith("#") for reference in references):
        raise rejected(path, "has a $ref to elsewhere; one has to begin with '#'")


def _references(value: object) -> Iterator[str]:
    """All that ``$ref`` names. What is elsewhere would be let through as anything at all."""
    inner: Iterable[object] = ()
    if isinstance(value, dict):
        inner = value.values()
        reference = value.get("$ref")
        if isinstance(reference, str):
            yield reference
    elif isinstance(value, list):
        inner = value
    for item in inner:
        yield from _references(item)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")

"""What is checked of a guide before it is compiled, and what is advertised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openengine_vllm import limits
from openengine_vllm.engine.guided import Guide, guide_modes, plan_guide, short_reason
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError
from tests.unit.scripted_engine import FACTS

MODEL = replace(FACTS, guide_backend="auto")
ALL_MODES = [number for number in pb.GuidedDecodingMode.values() if number]
GUIDES = [
    pb.GuidedDecoding(json_schema="{}"),
    pb.GuidedDecoding(regex="a"),
    pb.GuidedDecoding(ebnf_grammar='root ::= "a"'),
    pb.GuidedDecoding(structural_tag="{}"),
    pb.GuidedDecoding(choice=pb.ChoiceConstraint(choices=["a", ""])),
    pb.GuidedDecoding(json_object=pb.JsonObjectConstraint()),
]


def plan(guided: pb.GuidedDecoding, backend: str = "auto") -> Guide | None:
    return plan_guide(pb.GenerateRequest(guided=guided), replace(MODEL, guide_backend=backend))


def error(guided: pb.GuidedDecoding, backend: str = "auto") -> OpenEngineError:
    with pytest.raises(OpenEngineError) as caught:
        plan(guided, backend)
    return caught.value


def test_no_guide() -> None:
    assert plan_guide(pb.GenerateRequest(), MODEL) is None


@pytest.mark.parametrize("guided", GUIDES)
@pytest.mark.parametrize("backend", ["auto", "xgrammar", "guidance", "outlines"])
def test_what_is_advertised_is_what_is_accepted(guided: pb.GuidedDecoding, backend: str) -> None:
    kind = guided.WhichOneof("guide")
    assert kind is not None
    mode = pb.GuidedDecodingMode.Value(f"GUIDED_DECODING_MODE_{kind.upper()}")
    if mode in guide_modes(replace(MODEL, guide_backend=backend)):
        guide = plan(guided, backend)
        assert guide is not None
        assert guide.field_path == f"guided.{kind}"
    else:
        refused = error(guided, backend)
        assert refused.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE
        assert refused.field == f"guided.{kind}"
        assert backend in refused.message


def test_backends_that_know_everything_are_advertised_so() -> None:
    assert guide_modes(MODEL) == ALL_MODES
    assert guide_modes(replace(MODEL, guide_backend="")) == []


@pytest.mark.parametrize("name", ["", "auto"])
def test_own_backend_may_be_named(name: str) -> None:
    assert plan(pb.GuidedDecoding(regex="a", backend=name)) == Guide("regex", "a")


@pytest.mark.parametrize("name", ["Auto", "xgrammar", "auto ", "x" * 5000])
def test_other_backend_is_refused(name: str) -> None:
    refused = error(pb.GuidedDecoding(regex="a", backend=name))
    assert refused.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE
    assert refused.field == "guided.backend"
    assert "allowed are 'auto'" in refused.message


def test_engine_without_guides_refuses_them_all() -> None:
    refused = error(pb.GuidedDecoding(), "")
    assert refused.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE
    assert refused.field == "guided"


NESTED = '{"a":' * 50_000 + "1" + "}" * 50_000


@pytest.mark.parametrize(
    ("guided", "field", "says"),
    [
        (pb.GuidedDecoding(), "guided", "json_schema, regex"),
        (pb.GuidedDecoding(backend="auto"), "guided", "json_schema, regex"),
        *(
            (pb.GuidedDecoding(**{kind: text}), f"guided.{kind}", "empty")  # type: ignore[arg-type]
            for kind in ("json_schema", "regex", "ebnf_grammar", "structural_tag")
            for text in ("", " \n")
        ),
        (pb.GuidedDecoding(json_schema="{'a'}"), "guided.json_schema", "not JSON"),
        (pb.GuidedDecoding(json_schema='{"a": NaN}'), "guided.json_schema", "NaN"),
        (pb.GuidedDecoding(json_schema="9" * 5000), "guided.json_schema", "not JSON"),
        (pb.GuidedDecoding(json_schema="[1]"), "guided.json_schema", "object"),
        (
            pb.GuidedDecoding(json_schema='{"anyOf": [{"$ref": "http://x\\nlevel=error"}]}'),
            "guided.json_schema",
            "has a $ref to elsewhere",
        ),
        (pb.GuidedDecoding(json_schema="true"), "guided.json_schema", "object"),
        (pb.GuidedDecoding(structural_tag=NESTED[:200_000]), "guided.structural_tag", "nested"),
        (pb.GuidedDecoding(regex="a\0"), "guided.regex", "NUL"),
        (pb.GuidedDecoding(choice=pb.ChoiceConstraint()), "guided.choice.choices", "at least one"),
        (
            pb.GuidedDecoding(choice=pb.ChoiceConstraint(choices=["a", "\0"])),
            "guided.choice.choices[1]",
            "NUL",
        ),
    ],
)
def test_malformed_guide_is_refused(guided: pb.GuidedDecoding, field: str, says: str) -> None:
    refused = error(guided)
    assert refused.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert refused.field == field
    assert says in refused.message


def test_sizes_end_where_they_are_said_to() -> None:
    most = limits.MAX_GUIDE_BYTES
    assert plan(pb.GuidedDecoding(regex="é" * (most // 2))) is not None
    assert str(most) in error(pb.GuidedDecoding(regex="é" * (most // 2) + "a")).message
    halves = pb.ChoiceConstraint(choices=["a" * (most // 2)] * 2)
    assert plan(pb.GuidedDecoding(choice=halves)) is not None
    halves.choices.append("a")
    assert str(most) in error(pb.GuidedDecoding(choice=halves)).message
    many = pb.ChoiceConstraint(choices=["a"] * limits.MAX_GUIDE_CHOICES)
    assert plan(pb.GuidedDecoding(choice=many)) is not None
    many.choices.append("a")
    assert str(limits.MAX_GUIDE_CHOICES) in error(pb.GuidedDecoding(choice=many)).message


def test_reason_is_one_short_line_without_places_in_sources() -> None:
    native = "[12:34:56] /project/cpp/parser.cc:83: Check failed:\n  at 2\0"
    assert short_reason(native) == "Check failed: at 2"
    assert short_reason("in engine/core.py:12: oops") == "in oops"
    assert short_reason("Cannot find #/$defs/a in </a>") == "Cannot find #/$defs/a in </a>"
    assert len(short_reason("x" * 5000)) == limits.MAX_GUIDE_REASON_LENGTH
    assert short_reason(" \n") == "it does not compile"

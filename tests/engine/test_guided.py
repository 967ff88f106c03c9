"""Guided decoding on the demo model: what comes out, what is refused, and what a hostile guide
does to the others.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from openengine_vllm import limits
from openengine_vllm.protocol import v1 as pb
from tests.engine.peers import Peer, connected
from tests.engine.streams import Generation
from tests.engine.test_rejections import refusal
from tests.support.server import ServerProcess

# The model is made from its package first.
pytestmark = pytest.mark.timeout(600)

PROMPT = "The capital of France is"


@pytest.fixture
async def peer(demo: ServerProcess) -> AsyncIterator[Peer]:
    async with connected(demo) as peer:
        yield peer


def guided_request(guided: pb.GuidedDecoding, **options: Any) -> pb.GenerateRequest:
    tokens = options.pop("max_tokens", 200)
    stopping = pb.StoppingOptions(max_tokens=tokens, **options.pop("stopping", {}))
    return pb.GenerateRequest(
        request_id=f"{guided.WhichOneof('guide')} {id(guided)}",
        prompt=options.pop("prompt", PROMPT),
        sampling=pb.SamplingParams(**options or {"temperature": 0.0}),
        stopping=stopping,
        guided=guided,
    )


def schema(**properties: Any) -> str:
    names = list(properties)
    return json.dumps(
        {
            "type": "object",
            "properties": properties,
            "required": names,
            "additionalProperties": False,
        }
    )


WORD = {"type": "string", "maxLength": 12}
SCHEMAS = [
    schema(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 150}),
    schema(city={"enum": ["Paris", "Lyon", "Nice"]}, large={"type": "boolean"}),
    schema(tags={"type": "array", "items": WORD, "minItems": 2, "maxItems": 3}),
    schema(where=json.loads(schema(x={"type": "null"}, y={"const": 7}))),
    schema(it={"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/w"}]})[:-1]
    + ', "$defs": {"w": {"type": "string", "maxLength": 5}}}',
]
REGEXES = [r"\d{3}-\d{4}", r"[A-Z][a-z]{2,8}", r"(yes|no)(!|\?)", r"v\d+\.\d+\.\d{1,3}", r"é{3}ß"]
CHOICES = [["yes", "no"], ["Paris"], ['q"\\\n', "tab\t"], ["é", "ß", "字"], ["a", "ab", "abc"]]
GRAMMARS: list[tuple[str, Callable[[str], bool]]] = [
    ('root ::= "a" "b" "c"', lambda text: text == "abc"),
    (
        'root ::= "(" inner ")"\ninner ::= "x" | "(" "y" ")"',
        lambda text: text in ("(x)", "((y))"),
    ),
    (
        'root ::= term (" + " term){1,2}\nterm ::= [0-9]{1,3}',
        lambda text: all(term.isdecimal() for term in text.split(" + ")) and " + " in text,
    ),
    (
        'root ::= "<b>" [a-z]{1,10} "</b>"',
        lambda text: text.startswith("<b>") and text.endswith("</b>") and text[3:-4].islower(),
    ),
    (
        'root ::= pair ", " pair\npair ::= [a-z]{1,5} "=" ("true" | "false")',
        lambda text: (
            [pair.split("=")[1] in ("true", "false") for pair in text.split(", ")] == [True, True]
        ),
    ),
]


def tag(content: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": content})


TAGGED = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "json_schema", "json_schema": json.loads(SCHEMAS[1])},
    "end": "</f>",
}
TAGS: list[tuple[str, Callable[[str], bool]]] = [
    (tag({"type": "const_string", "value": "hi"}), lambda text: text == "hi"),
    (tag(TAGGED), lambda text: city(text.removeprefix("<f>").removesuffix("</f>"))),
    (tag({"type": "json_schema", "json_schema": json.loads(SCHEMAS[1])}), lambda t: city(t)),
    (
        tag(
            {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "a: "},
                    {"type": "const_string", "value": "b"},
                ],
            }
        ),
        lambda text: text == "a: b",
    ),
    (
        tag(
            {
                "type": "triggered_tags",
                "triggers": ["<f>"],
                "tags": [TAGGED],
                "at_least_one": True,
                "stop_after_first": True,
            }
        ),
        lambda text: city(text.removeprefix("<f>").removesuffix("</f>")),
    ),
]


def city(text: str) -> bool:
    value = json.loads(text)
    return value["city"] in ("Paris", "Lyon", "Nice") and isinstance(value["large"], bool)


def is_valid(text: str, json_schema: str) -> bool:
    value, wanted = json.loads(text), json.loads(json_schema)
    jsonschema = importlib.import_module("jsonschema")  # it has no types
    jsonschema.validate(value, wanted)
    return True


def choice(choices: list[str]) -> pb.GuidedDecoding:
    return pb.GuidedDecoding(choice=pb.ChoiceConstraint(choices=choices))


Case = tuple[pb.GuidedDecoding, Callable[[str], bool]]


def _schema_case(text: str) -> Case:
    return pb.GuidedDecoding(json_schema=text), lambda output: is_valid(output, text)


def _regex_case(text: str) -> Case:
    return pb.GuidedDecoding(regex=text), lambda output: bool(re.fullmatch(text, output))


def _choice_case(choices: list[str]) -> Case:
    return choice(choices), lambda output: output in choices


CASES: dict[str, list[Case]] = {
    "json_schema": [_schema_case(text) for text in SCHEMAS],
    "regex": [_regex_case(text) for text in REGEXES],
    "ebnf_grammar": [(pb.GuidedDecoding(ebnf_grammar=text), check) for text, check in GRAMMARS],
    "structural_tag": [(pb.GuidedDecoding(structural_tag=text), check) for text, check in TAGS],
    "choice": [_choice_case(choices) for choices in CHOICES],
}


def finished_text(generation: Generation) -> str:
    assert generation.error is None
    output = generation.only
    assert output.finish == "STOP"
    assert output.stop_match is not None
    assert output.stop_match[0] == "eos_token_id"
    return output.text


@pytest.mark.parametrize("mode", CASES)
async def test_output_follows_its_guide(mode: str, peer: Peer) -> None:
    for guided, follows in CASES[mode]:
        text = finished_text(await peer.send(guided_request(guided)))
        assert follows(text), (guided, text)


@pytest.mark.parametrize("key", ["name", "city", "size", "title", "id"])
async def test_json_object_is_an_object(key: str, peer: Peer) -> None:
    guided = pb.GuidedDecoding(json_object=pb.JsonObjectConstraint(), backend="auto")
    prompt = f'Write one short JSON object like {{"{key}": 1}} and nothing else.\n{{"{key}": 1}}\n'
    output = (await peer.send(guided_request(guided, prompt=prompt))).only
    if output.finish == "STOP":
        assert isinstance(json.loads(output.text), dict)
    else:
        assert output.text.lstrip().startswith("{")


async def test_outputs_of_a_seeded_request_follow_the_guide_and_differ(peer: Peer) -> None:
    guided = pb.GuidedDecoding(regex="[a-z]{12}")
    request = guided_request(guided, temperature=1.0, seed=7, num_sequences=3)
    first, again = await peer.send(request), await peer.send(request)
    texts = [output.text for output in first.outputs]
    assert all(re.fullmatch("[a-z]{12}", text) for text in texts)
    assert len(set(texts)) == 3
    assert [output.text for output in again.outputs] == texts


async def test_stop_text_ends_a_guided_output(peer: Peer) -> None:
    stopping = {"conditions": [pb.StopCondition(stop_text="-")]}
    request = guided_request(pb.GuidedDecoding(regex=r"\d{3}-\d{4}"), stopping=stopping)
    output = (await peer.send(request)).only
    assert re.fullmatch(r"\d{3}", output.text)
    assert output.stop_match == ("stop_text", "-")


async def test_stop_token_waits_for_the_end_of_the_guide(peer: Peer) -> None:
    plain = (await peer.send(guided_request(choice(["Paris"])))).only
    stopping = {"conditions": [pb.StopCondition(stop_token_id=plain.token_ids[0])]}
    output = (await peer.send(guided_request(choice(["Paris"]), stopping=stopping))).only
    assert output.finish == "STOP"
    assert "Paris".startswith(output.text)


async def test_output_cut_by_length_begins_a_valid_one(peer: Peer) -> None:
    request = guided_request(pb.GuidedDecoding(regex=r"(ab){40}"), max_tokens=5)
    output = (await peer.send(request)).only
    assert output.finish == "LENGTH"
    assert output.text
    assert ("ab" * 40).startswith(output.text)


async def test_min_tokens_and_ignore_eos_go_with_a_guide(peer: Peer) -> None:
    for stopping in ({"min_tokens": 8}, {"ignore_eos": True}):
        request = guided_request(choice(["yes", "no"]), stopping=stopping, max_tokens=10)
        output = (await peer.send(request)).only
        assert output.text.startswith(("yes", "no"))


MALFORMED = {
    "unset": (pb.GuidedDecoding(), "guided", "json_schema"),
    "schema-empty": (pb.GuidedDecoding(json_schema=" "), "guided.json_schema", "empty"),
    "schema-not-json": (pb.GuidedDecoding(json_schema="{"), "guided.json_schema", "JSON"),
    "schema-list": (pb.GuidedDecoding(json_schema="[]"), "guided.json_schema", "object"),
    "schema-type": (pb.GuidedDecoding(json_schema='{"type": "t"}'), "guided.json_schema", "type"),
    "schema-ref": (pb.GuidedDecoding(json_schema='{"$ref": "#/a"}'), "guided.json_schema", "#/a"),
    "schema-range": (
        pb.GuidedDecoding(json_schema='{"type": "integer", "minimum": 2, "maximum": 1}'),
        "guided.json_schema",
        "minimum",
    ),
    "schema-beyond-backend": (
        pb.GuidedDecoding(json_schema='{"type": "integer", "multipleOf": 5}'),
        "guided.json_schema",
        "xgrammar",
    ),
    "schema-deep": (
        pb.GuidedDecoding(json_schema='{"items":' * 500 + "{}" + "}" * 500),
        "guided.json_schema",
        "nest",
    ),
    "schema-too-deep": (
        pb.GuidedDecoding(json_schema='{"items":' * 20000 + "{}" + "}" * 20000),
        "guided.json_schema",
        "nested",
    ),
    "regex-empty": (pb.GuidedDecoding(regex=""), "guided.regex", "empty"),
    "regex-nul": (pb.GuidedDecoding(regex="a\0"), "guided.regex", "NUL"),
    "regex-open": (pb.GuidedDecoding(regex="("), "guided.regex", "parenthesis"),
    "regex-lookahead": (pb.GuidedDecoding(regex="(?=a)b"), "guided.regex", "Lookahead"),
    "regex-reference": (pb.GuidedDecoding(regex=r"(a)\1"), "guided.regex", "reference"),
    "regex-size": (
        pb.GuidedDecoding(regex="a" * (limits.MAX_GUIDE_BYTES + 1)),
        "guided.regex",
        str(limits.MAX_GUIDE_BYTES),
    ),
    "grammar-unknown-rule": (
        pb.GuidedDecoding(ebnf_grammar="root ::= other"),
        "guided.ebnf_grammar",
        "other",
    ),
    "grammar-no-root": (pb.GuidedDecoding(ebnf_grammar='a ::= "b"'), "guided.ebnf_grammar", "root"),
    "grammar-no-text": (
        pb.GuidedDecoding(ebnf_grammar='root ::= root "a"'),
        "guided.ebnf_grammar",
        "no text",
    ),
    "tag-format": (pb.GuidedDecoding(structural_tag="{}"), "guided.structural_tag", "format"),
    "tag-triggers": (
        pb.GuidedDecoding(structural_tag='{"structures": []}'),
        "guided.structural_tag",
        "triggers",
    ),
    "choices-none": (choice([]), "guided.choice.choices", "at least one"),
    "choices-many": (
        choice(["a"] * (limits.MAX_GUIDE_CHOICES + 1)),
        "guided.choice.choices",
        str(limits.MAX_GUIDE_CHOICES),
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_guide_is_refused_before_any_event(name: str, peer: Peer) -> None:
    guided, field, says = MALFORMED[name]
    error = await refusal(peer.stub.Generate(guided_request(guided)))
    assert error.status is grpc.StatusCode.INVALID_ARGUMENT
    assert error.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert error.field == field
    assert says in error.message
    assert "\n" not in error.message
    assert ".cc" not in error.message
    assert await peer.is_ready()
    assert finished_text(await peer.send(guided_request(choice(["yes"])))) == "yes"


async def test_other_backend_is_refused(peer: Peer) -> None:
    guided = pb.GuidedDecoding(regex="a", backend="guidance")
    error = await refusal(peer.stub.Generate(guided_request(guided)))
    assert error.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE
    assert error.field == "guided.backend"
    assert "'auto'" in error.message


EXPONENTIAL = "\n".join(
    ["root ::= r0", *(f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(2000)), 'r2000 ::= "b"']
)
HOSTILE = [
    pb.GuidedDecoding(ebnf_grammar=EXPONENTIAL),
    pb.GuidedDecoding(regex="a{1,100000}"),
    pb.GuidedDecoding(regex="(a+)+b"),
    pb.GuidedDecoding(regex="((a{1,1000}){1,1000}){1,1000}"),
    pb.GuidedDecoding(regex="(.*a){20}"),
    pb.GuidedDecoding(ebnf_grammar='root ::= root root | "a" | ""'),
    pb.GuidedDecoding(ebnf_grammar="root ::= " + "(" * 20000 + '"a"' + ")" * 20000),
]


async def test_server_serves_while_hostile_guides_compile(peer: Peer) -> None:
    async def attack(guided: pb.GuidedDecoding) -> None:
        call = peer.stub.Generate(guided_request(guided, max_tokens=30))
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise

    attacks = [asyncio.ensure_future(attack(guided)) for guided in HOSTILE]
    served = 0
    while not all(task.done() for task in attacks):
        assert await peer.is_ready()
        assert (await peer.generate(PROMPT, max_tokens=1)).error is None
        served += 1
        await asyncio.sleep(0.1)
    await asyncio.gather(*attacks)
    # The exponential grammar is compiled up to its limit, many times what one token takes.
    assert served > 1
    assert finished_text(await peer.send(guided_request(choice(["yes"])))) == "yes"


async def test_capabilities_name_every_mode(peer: Peer) -> None:
    capabilities = (await peer.client.model_info("demo")).generation.guided_decoding
    assert capabilities.supported
    assert list(capabilities.modes) == [
        number for name, number in pb.GuidedDecodingMode.items() if number
    ]

"""Each field of a GenerateRequest at the ends of its range and beyond, and at random."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode
from hypothesis import given, settings
from hypothesis import strategies as st

from openengine_vllm import limits
from openengine_vllm.engine.facts import ModelFacts
from openengine_vllm.engine.requests import (
    SEED_MASK,
    GenerationPlan,
    check_prompt_length,
    check_request_id,
    plan_generation,
)
from openengine_vllm.limits import RequestLimits
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError

MODEL = ModelFacts(
    served_names=("model", "alias"),
    max_model_len=100,
    vocab_size=1000,
    has_tokenizer=True,
    generates=True,
    prefix_caching=True,
    priority_scheduling=True,
    data_parallel_ranks=(2, 3),
)
LIMITS = RequestLimits(max_sequences=4, max_stop_conditions=3, max_stop_bytes=10)
INT32 = (-(2**31), 2**31 - 1)
UINT32 = 2**32 - 1
UINT64 = 2**64 - 1


def request(**fields: Any) -> pb.GenerateRequest:
    base: dict[str, Any] = {"request_id": "r", "token_ids": pb.TokenIds(ids=[1, 2, 3])}
    if "prompt" in fields:
        del base["token_ids"]
    return pb.GenerateRequest(**{**base, **fields})


def sampling_with(name: str, value: Any) -> pb.SamplingParams:
    fields: dict[str, Any] = {name: value}
    return pb.SamplingParams(**fields)


def plan(message: pb.GenerateRequest, model: ModelFacts = MODEL) -> GenerationPlan:
    return plan_generation(message, model, LIMITS)


def rejection(message: pb.GenerateRequest, model: ModelFacts = MODEL) -> OpenEngineError:
    with pytest.raises(OpenEngineError) as caught:
        plan(message, model)
    return caught.value


def check_invalid(error: OpenEngineError, field: str, *says: str) -> None:
    assert error.code_name == "INVALID_ARGUMENT"
    assert error.status is StatusCode.INVALID_ARGUMENT
    assert not error.retryable
    assert error.field == field
    assert field in error.message
    for part in says:
        assert part in error.message


def check_unsupported(error: OpenEngineError, field: str) -> None:
    assert error.code_name == "UNSUPPORTED_FEATURE"
    assert error.status is StatusCode.INVALID_ARGUMENT
    assert error.field == field
    assert field in error.message


# Sampling: name, values that are taken, values that are not, and what the message says.
NOT_FINITE = (math.nan, -math.nan, math.inf, -math.inf)
SMALLEST = math.ulp(0.0)
SAMPLING: list[tuple[str, tuple[float, ...], tuple[float, ...], str]] = [
    ("temperature", (0, -0.0, SMALLEST, 2), (-SMALLEST, math.nextafter(2, 3), -1e308), "0 to 2"),
    ("top_p", (SMALLEST, 0.5, 1), (0, -0.0, -1, math.nextafter(1, 2)), "above 0 and up to 1"),
    ("min_p", (0, 1), (-SMALLEST, math.nextafter(1, 2), -1e308), "0 to 1"),
    ("frequency_penalty", (-2, 0, 2), (math.nextafter(-2, -3), 2.1, 1e308), "-2 to 2"),
    ("presence_penalty", (-2, 0, 2), (math.nextafter(-2, -3), 2.1, -1e308), "-2 to 2"),
    ("repetition_penalty", (2.0**-126, 1, 3.4e38), (0, -0.0, -1, SMALLEST, 1e308), "above 0"),
]
FLOATS_TAKEN = [(name, value) for name, taken, _, _ in SAMPLING for value in taken]
FLOATS_REFUSED = [
    (name, value, text) for name, _, refused, text in SAMPLING for value in (*refused, *NOT_FINITE)
]


@pytest.mark.parametrize(("name", "value"), FLOATS_TAKEN)
def test_sampling_value_is_taken(name: str, value: float) -> None:
    message = request(sampling=sampling_with(name, value))

    assert plan(message).sampling[name] == value


@pytest.mark.parametrize(("name", "value", "text"), FLOATS_REFUSED)
def test_sampling_value_is_refused(name: str, value: float, text: str) -> None:
    error = rejection(request(sampling=sampling_with(name, value)))

    check_invalid(error, f"sampling.{name}", text, str(value))


@pytest.mark.parametrize("value", [-1, 0, 1, INT32[1]])
def test_top_k_is_taken(value: int) -> None:
    assert plan(request(sampling=pb.SamplingParams(top_k=value))).sampling["top_k"] == value


@pytest.mark.parametrize("value", [-2, INT32[0]])
def test_top_k_is_refused(value: int) -> None:
    error = rejection(request(sampling=pb.SamplingParams(top_k=value)))

    check_invalid(error, "sampling.top_k", "-1 or 0", str(value))


def test_absent_sampling_is_the_models_default() -> None:
    model = replace(MODEL, default_sampling={"temperature": 0.6, "top_k": 20, "max_tokens": 7})

    chosen = plan(request(sampling=pb.SamplingParams(temperature=0, top_p=0.5)), model)

    assert {name: chosen.sampling.get(name) for name in ("temperature", "top_k", "top_p")} == {
        "temperature": 0,
        "top_k": 20,
        "top_p": 0.5,
    }
    assert "max_tokens" not in chosen.sampling
    assert "min_p" not in chosen.sampling
    assert chosen.max_tokens == 7


@pytest.mark.parametrize(
    ("seed", "folded"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, 0), (UINT64, SEED_MASK)]
)
def test_every_seed_is_taken(seed: int, folded: int) -> None:
    assert plan(request(sampling=pb.SamplingParams(seed=seed))).seed == folded


def test_outputs_of_a_seeded_request_differ() -> None:
    seeded = plan(request(sampling=pb.SamplingParams(seed=UINT64, num_sequences=3)))
    free = plan(request(sampling=pb.SamplingParams(num_sequences=3)))

    assert [seeded.seed_for(index) for index in range(3)] == [SEED_MASK, 0, 1]
    assert free.seed_for(2) is None


@pytest.mark.parametrize("value", [1, LIMITS.max_sequences])
def test_num_sequences_is_taken(value: int) -> None:
    assert plan(request(sampling=pb.SamplingParams(num_sequences=value))).sequences == value


@pytest.mark.parametrize("value", [0, LIMITS.max_sequences + 1, UINT32])
def test_num_sequences_is_refused(value: int) -> None:
    error = rejection(request(sampling=pb.SamplingParams(num_sequences=value)))

    check_invalid(error, "sampling.num_sequences", "1 to 4", str(value))


def test_one_sequence_is_the_default() -> None:
    assert plan(request()).sequences == 1


def test_greedy_sampling_has_one_output() -> None:
    greedy = pb.SamplingParams(num_sequences=2, temperature=0)
    by_model = replace(MODEL, default_sampling={"temperature": 0})

    check_invalid(rejection(request(sampling=greedy)), "sampling.num_sequences", "1", "temperature")
    check_invalid(
        rejection(request(sampling=pb.SamplingParams(num_sequences=2)), by_model),
        "sampling.num_sequences",
    )
    assert plan(request(sampling=pb.SamplingParams(num_sequences=1, temperature=0))).sequences == 1


# Lengths.


@pytest.mark.parametrize("value", [1, 99, 100, UINT32])
def test_max_tokens_is_taken(value: int) -> None:
    assert plan(request(stopping=pb.StoppingOptions(max_tokens=value))).max_tokens == value


def test_max_tokens_0_is_refused() -> None:
    error = rejection(request(stopping=pb.StoppingOptions(max_tokens=0)))

    check_invalid(error, "stopping.max_tokens", "at least 1")


def test_absent_max_tokens_means_up_to_the_context() -> None:
    assert plan(request()).max_tokens is None


@pytest.mark.parametrize("value", [0, 1, 97])
def test_min_tokens_is_taken(value: int) -> None:
    made = plan(request(stopping=pb.StoppingOptions(min_tokens=value)))

    assert made.min_tokens == made.rules.min_tokens == made.sampling["min_tokens"] == value


@pytest.mark.parametrize("value", [100, UINT32])
def test_min_tokens_over_the_context_is_refused(value: int) -> None:
    error = rejection(request(stopping=pb.StoppingOptions(min_tokens=value)))

    check_invalid(error, "stopping.min_tokens", "99", str(value))


def test_min_tokens_over_max_tokens_is_refused() -> None:
    stopping = pb.StoppingOptions(min_tokens=6, max_tokens=5)
    by_model = replace(MODEL, default_sampling={"max_tokens": 5})

    check_invalid(rejection(request(stopping=stopping)), "stopping.min_tokens", "6", "5")
    check_invalid(
        rejection(request(stopping=pb.StoppingOptions(min_tokens=6)), by_model),
        "stopping.min_tokens",
    )
    stopping.max_tokens = 6
    assert plan(request(stopping=stopping)).min_tokens == 6


@pytest.mark.parametrize(("length", "minimum"), [(1, 0), (99, 1), (1, 99), (50, 50)])
def test_prompt_that_leaves_room(length: int, minimum: int) -> None:
    check_prompt_length(length, minimum, "prompt", MODEL)


@pytest.mark.parametrize(
    ("length", "minimum", "field", "says"),
    [
        (0, 0, "prompt", "at least one token"),
        (100, 0, "prompt", "100 tokens"),
        (10**9, 0, "prompt", "100 tokens"),
        (50, 51, "stopping.min_tokens", "only 50"),
    ],
)
def test_prompt_that_leaves_no_room(length: int, minimum: int, field: str, says: str) -> None:
    with pytest.raises(OpenEngineError) as caught:
        check_prompt_length(length, minimum, "prompt", MODEL)

    check_invalid(caught.value, field, says)


# Stops.


def conditions(*stops: str | int) -> pb.StoppingOptions:
    return pb.StoppingOptions(
        conditions=[
            pb.StopCondition(stop_text=stop)
            if isinstance(stop, str)
            else pb.StopCondition(stop_token_id=stop)
            for stop in stops
        ]
    )


def test_stops_become_rules() -> None:
    stopping = conditions("ab", 999, 0)
    stopping.include_stop_in_output = True
    stopping.ignore_eos = True

    made = plan(request(stopping=stopping))

    assert made.rules.token_ids == {0, 999}
    assert made.sampling["stop_token_ids"] == [0, 999]
    assert made.sampling["ignore_eos"] is True
    assert made.rules.include_in_output
    assert made.rules.automaton is not None
    assert made.rules.automaton.stop_text(0) == "ab"


def test_no_stops() -> None:
    made = plan(request())

    assert made.rules.automaton is None
    assert made.rules.token_ids == frozenset()
    assert not made.rules.include_in_output
    assert made.sampling["ignore_eos"] is False


@pytest.mark.parametrize(
    ("stops", "field", "says"),
    [
        ((0, 1000), "stopping.conditions[1].stop_token_id", "0 to 999"),
        ((UINT32,), "stopping.conditions[0].stop_token_id", str(UINT32)),
        (("a", ""), "stopping.conditions[1].stop_text", "empty"),
        (("a", "b", "c", 1), "stopping.conditions", "3 are allowed"),
        (("€€€", "ab"), "stopping.conditions", "11 bytes"),
    ],
)
def test_stops_are_refused(stops: tuple[str | int, ...], field: str, says: str) -> None:
    check_invalid(rejection(request(stopping=conditions(*stops))), field, says)


def test_stops_at_their_limits() -> None:
    assert plan(request(stopping=conditions("€€€", "a", 999))).rules.automaton is not None


def test_a_condition_that_sets_nothing_is_refused() -> None:
    stopping = pb.StoppingOptions(conditions=[pb.StopCondition(stop_text="a"), pb.StopCondition()])

    check_invalid(rejection(request(stopping=stopping)), "stopping.conditions[1]", "stop_text")


def test_stop_texts_need_a_tokenizer() -> None:
    bare = replace(MODEL, has_tokenizer=False)

    check_unsupported(
        rejection(request(stopping=conditions("a")), bare), "stopping.conditions[0].stop_text"
    )
    assert plan(request(stopping=conditions(1)), bare).rules.token_ids == {1}


# Prompt.


def test_prompt_by_ids() -> None:
    made = plan(request(token_ids=pb.TokenIds(ids=[0, 999])))

    assert made.prompt_ids == [0, 999]
    assert made.prompt is None


def test_prompt_by_text() -> None:
    made = plan(request(prompt="hello"))

    assert made.prompt == "hello"
    assert made.prompt_ids is None


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "at least one"),
        ([1, 1000], "0 to 999"),
        ([UINT32], str(UINT32)),
        ([1] * 100, "100 tokens"),
    ],
)
def test_prompt_ids_are_refused(ids: list[int], says: str) -> None:
    check_invalid(rejection(request(token_ids=pb.TokenIds(ids=ids))), "token_ids.ids", says)


def test_prompt_that_is_empty_or_absent_is_refused() -> None:
    check_invalid(rejection(request(prompt="")), "prompt", "empty")
    check_invalid(rejection(pb.GenerateRequest(request_id="r")), "input", "token_ids")


def test_prompt_text_needs_a_tokenizer() -> None:
    bare = replace(MODEL, has_tokenizer=False)

    check_unsupported(rejection(request(prompt="hello"), bare), "prompt")
    assert plan(request(), bare).prompt_ids == [1, 2, 3]


def test_a_prompt_is_not_in_the_message() -> None:
    error = rejection(request(prompt="secret", stopping=pb.StoppingOptions(max_tokens=0)))

    assert "secret" not in error.message


# Identity, model, the rest.


@pytest.mark.parametrize("value", ["a", "x" * 256, "日本 €", "a/b.0"])
def test_request_id_is_taken(value: str) -> None:
    assert check_request_id(value) == value
    assert plan(request(request_id=value)).request_id == value


@pytest.mark.parametrize("value", ["", "x" * 257, "a\n", "\x00", "a\u200b", "\ufeff", "a\x7f"])
def test_request_id_is_refused(value: str) -> None:
    check_invalid(rejection(request(request_id=value)), "request_id", "1 to 256 printable")


@pytest.mark.parametrize("value", ["", "model", "alias"])
def test_model_is_served(value: str) -> None:
    assert plan(request(model=value)).request_id == "r"


def test_model_is_not_served() -> None:
    error = rejection(request(model="other"))

    assert error.code_name == "MODEL_NOT_FOUND"
    assert error.status is StatusCode.NOT_FOUND
    assert error.field == "model"
    assert "other" in error.message


def test_a_pooling_model_does_not_generate() -> None:
    error = rejection(request(), replace(MODEL, generates=False))

    assert error.code_name == "UNSUPPORTED_FEATURE"
    assert error.status is StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("value", [*INT32, -1, 1])
def test_priority(value: int) -> None:
    without = replace(MODEL, priority_scheduling=False)

    assert plan(request(priority=value)).priority == value
    check_unsupported(rejection(request(priority=value), without), "priority")


def test_priority_0_asks_for_nothing() -> None:
    without = replace(MODEL, priority_scheduling=False)

    assert plan(request(priority=0), without).priority == plan(request(), without).priority == 0


def test_cache_salt() -> None:
    longest = "€" * (limits.MAX_CACHE_SALT_BYTES // 3)
    without = replace(MODEL, prefix_caching=False)

    assert plan(request(kv=pb.KvOptions(cache_salt=longest))).cache_salt == longest
    assert plan(request(kv=pb.KvOptions(cache_salt=""))).cache_salt is None
    check_invalid(
        rejection(request(kv=pb.KvOptions(cache_salt=longest + "€"))), "kv.cache_salt", "1024"
    )
    check_unsupported(rejection(request(kv=pb.KvOptions(cache_salt="s")), without), "kv.cache_salt")


def test_cache_bypass() -> None:
    assert plan(request(kv=pb.KvOptions(bypass_prefix_cache=True))).bypass_prefix_cache
    assert not plan(request(kv=pb.KvOptions(bypass_prefix_cache=False))).bypass_prefix_cache
    assert not plan(request()).bypass_prefix_cache


@pytest.mark.parametrize("value", [2, 3])
def test_rank_is_served(value: int) -> None:
    assert plan(request(kv=pb.KvOptions(data_parallel_rank=value))).data_parallel_rank == value


@pytest.mark.parametrize("value", [0, 4, UINT32])
def test_rank_is_not_served(value: int) -> None:
    error = rejection(request(kv=pb.KvOptions(data_parallel_rank=value)))

    check_invalid(error, "kv.data_parallel_rank", "2, 3", str(value))


def test_no_rank_is_asked_for() -> None:
    assert plan(request()).data_parallel_rank is None


def test_a_session_is_for_a_decode_engine() -> None:
    error = rejection(request(kv=pb.KvOptions(session=pb.KvSessionRef(session_id="s"))))

    assert error.code_name == "ROLE_MISMATCH"
    assert error.status is StatusCode.FAILED_PRECONDITION
    assert "AGGREGATED" in error.message


@pytest.mark.parametrize(
    "field",
    [
        b"\x28\x01",  # 5: a varint
        b"\xf2\x01\x01s",  # 30: a string
        b"\x2d\x00\x00\x00\x00",  # 5: fixed32
    ],
)
def test_unknown_fields_in_kv_are_refused(field: bytes) -> None:
    kv = pb.KvOptions.FromString(pb.KvOptions(cache_salt="s").SerializeToString() + field)

    check_invalid(rejection(request(kv=kv)), "kv", "does not define")


def test_unknown_fields_elsewhere_are_ignored() -> None:
    message = pb.GenerateRequest.FromString(request().SerializeToString() + b"\xc2\x3e\x01s")

    assert plan(message) == plan(request())


def test_metadata() -> None:
    most = {str(index): "" for index in range(limits.MAX_METADATA_ENTRIES)}
    longest = "€" * ((limits.MAX_METADATA_BYTES - 1) // 3)

    assert plan(request(metadata=most)).request_id == "r"
    assert plan(request(metadata={"k": longest})).request_id == "r"
    check_invalid(rejection(request(metadata={**most, "x": ""})), "metadata", "64 allowed")
    check_invalid(rejection(request(metadata={"k": longest + "€"})), "metadata", "16384")


UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("media", {"media": [pb.MediaItem(url="http://x/")]}),
    ("lora_name", {"lora_name": "a"}),
    ("guided", {"guided": pb.GuidedDecoding(regex="a")}),
]


@pytest.mark.parametrize(("field", "fields"), UNSUPPORTED, ids=[field for field, _ in UNSUPPORTED])
def test_what_is_not_supported_is_refused(field: str, fields: dict[str, Any]) -> None:
    check_unsupported(rejection(request(**fields)), field)


def test_options_that_ask_for_nothing_are_taken() -> None:
    response = pb.ResponseOptions(return_prompt_logprobs=False, return_output_logprobs=False)

    assert plan(request(response=response, kv=pb.KvOptions())) == plan(request())


# Anything at all.

EDGES: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from([*INT32, -2, -1, 0, 1, 50]),
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([0, 1, 2, 5, 99, 100, 1000, UINT32]),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([0, 1, 2**63, UINT64]),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(-1, 4),
}
STRINGS = st.one_of(
    st.sampled_from(["", "r", "model", "x" * 300, "\x00"]),
    st.text(st.characters(codec="utf-8"), max_size=5),
)


def scalar(draw: st.DrawFn, field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw(st.binary(max_size=3))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return draw(STRINGS)
    return draw(EDGES[field.cpp_type])


def fill(draw: st.DrawFn, message: Message, depth: int = 0) -> None:
    """Set a few fields of a message to values that are rarely usual."""
    fields: tuple[Any, ...] = tuple(message.DESCRIPTOR.fields)
    for field in draw(st.lists(st.sampled_from(fields), max_size=4)) if fields else ():
        value = getattr(message, field.name)
        repeated = hasattr(value, "extend")
        if field.message_type is None:
            if repeated:
                value.append(scalar(draw, field))
            else:
                setattr(message, field.name, scalar(draw, field))
        elif field.message_type.GetOptions().map_entry:
            value[draw(STRINGS)] = draw(STRINGS)
        elif field.message_type.file.package != "google.protobuf" and depth < 4:
            part = GetMessageClass(field.message_type)()
            fill(draw, part, depth + 1)
            if repeated:
                value.append(part)
            else:
                value.CopyFrom(part)


@st.composite
def messages(draw: st.DrawFn) -> pb.GenerateRequest:
    message = request() if draw(st.booleans()) else pb.GenerateRequest()
    fill(draw, message)
    return message


models = st.builds(
    replace,
    st.just(MODEL),
    has_tokenizer=st.booleans(),
    generates=st.sampled_from([True, True, True, False]),
    prefix_caching=st.booleans(),
    priority_scheduling=st.booleans(),
    default_sampling=st.sampled_from([{}, {"temperature": 0.0}, {"max_tokens": 5}]),
)


def planned_or_refused(
    message: pb.GenerateRequest, model: ModelFacts
) -> GenerationPlan | OpenEngineError:
    try:
        return plan(message, model)
    except OpenEngineError as error:
        return error


@settings(max_examples=500)
@given(messages(), models)
def test_any_message_is_planned_or_refused_by_the_contract(
    message: pb.GenerateRequest, model: ModelFacts
) -> None:
    before = message.SerializeToString(deterministic=True)
    made = planned_or_refused(message, model)
    if isinstance(made, OpenEngineError):
        assert made.status in (
            StatusCode.INVALID_ARGUMENT,
            StatusCode.NOT_FOUND,
            StatusCode.FAILED_PRECONDITION,
        )
        assert made.message.isprintable()
    else:
        assert (made.prompt is None) != (made.prompt_ids is None)
        assert 1 <= made.sequences <= LIMITS.max_sequences
        assert all(math.isfinite(v) for v in made.sampling.values() if isinstance(v, float))
        assert made.seed is None or 0 <= made.seed <= SEED_MASK
        assert made.max_tokens is None or made.min_tokens <= made.max_tokens
    assert message.SerializeToString(deterministic=True) == before


@settings(max_examples=200)
@given(st.binary(max_size=60), st.integers(0, 15))
def test_any_kv_bytes(data: bytes, field: int) -> None:
    """Whatever another revision puts into ``kv`` is read or refused, never overlooked."""
    try:
        kv = pb.KvOptions.FromString(bytes([field << 3 | 2, len(data)]) + data)
    except DecodeError:
        return
    known = {item.number for item in pb.KvOptions.DESCRIPTOR.fields}
    try:
        plan(request(kv=kv))
    except OpenEngineError:
        return
    assert field in known


def test_plans_go_into_vllms_sampling_params() -> None:
    """All at once, at an end of each range."""
    from vllm import SamplingParams

    for index in (0, -1):
        values: dict[str, Any] = {name: taken[index] for name, taken, _, _ in SAMPLING}
        values["temperature"] = 2
        made = plan(
            request(
                sampling=pb.SamplingParams(**values, top_k=(-1, INT32[1])[index], seed=UINT64),
                stopping=conditions(0, 999),
            )
        )
        params = SamplingParams(**made.sampling, seed=made.seed, max_tokens=5, detokenize=False)

        assert params.seed == SEED_MASK
        assert params.stop_token_ids == [0, 999]

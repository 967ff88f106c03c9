"""Translation between the revisions: nothing shared is lost, nothing is read as something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st

from openengine_vllm.engine.requests import GenerationPlan, plan_generation
from openengine_vllm.limits import RequestLimits
from openengine_vllm.protocol import split, split_messages
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError
from openengine_vllm.protocol.translation import unchanged
from tests.support.random_messages import messages
from tests.unit.scripted_engine import FACTS

CHANGED = {
    "EngineError",
    "GenerateRequest",
    "GenerateResponse",
    "KvOptions",
    "LoadInfo",
    "ModelInfo",
    "ParallelismInfo",
    "SubscribeKvEventsResponse",
}
"""What both have and do not define alike; two of them only for the EngineError in them."""


def of(module: Any) -> dict[str, type[Message]]:
    return {
        name: value
        for name in dir(module)
        if isinstance(value := getattr(module, name), type) and issubclass(value, Message)
    }


def test_what_has_changed() -> None:
    ours, theirs = of(pb), of(split)
    alike = {
        name
        for name in ours.keys() & theirs.keys()
        if unchanged(ours[name].DESCRIPTOR, theirs[name].DESCRIPTOR)
    }
    assert (ours.keys() & theirs.keys()) - alike == CHANGED
    assert theirs.keys() - ours.keys() == {
        "DeploymentCapacity",
        "GetServerInfoRequest",
        "ServerInfo",
    }


def assert_same(one: Message, other: Message, names: set[str]) -> None:
    """Equal fields of messages of two revisions, compared by their bytes."""
    for name in names:
        first, second = getattr(one, name), getattr(other, name)
        if isinstance(first, Message):
            assert one.HasField(name) == other.HasField(name)
            assert first.SerializeToString(deterministic=True) == second.SerializeToString(
                deterministic=True
            )
        elif hasattr(first, "extend") and first and isinstance(first[0], Message):
            assert [part.SerializeToString(deterministic=True) for part in first] == [
                part.SerializeToString(deterministic=True) for part in second
            ]
        else:
            assert first == second
            if one.DESCRIPTOR.fields_by_name[name].has_presence:
                assert one.HasField(name) == other.HasField(name)


@given(messages(split.GenerateRequest.DESCRIPTOR))
def test_requests(request: split.GenerateRequest) -> None:
    result = split_messages.generate_request(request)
    names = {field.name for field in split.GenerateRequest.DESCRIPTOR.fields} - {"kv", "extra"}
    assert_same(request, result, names)
    assert request.HasField("kv") == result.HasField("kv")
    assert_same(request.kv, result.kv, {"session", "bypass_prefix_cache", "cache_salt"})
    assert not result.kv.HasField("data_parallel_rank")
    assert not result.HasField("priority")
    assert not result.metadata


@given(messages(pb.LoadInfo.DESCRIPTOR))
def test_load(load: pb.LoadInfo) -> None:
    result = split_messages.load_info(load)
    assert_same(load, result, {field.name for field in load.DESCRIPTOR.fields} - {"attributes"})
    assert {key: value.string_value for key, value in result.attributes.fields.items()} == dict(
        load.attributes
    )


@given(messages(pb.ModelInfo.DESCRIPTOR), messages(pb.EngineInfo.DESCRIPTOR))
def test_discovery(model: pb.ModelInfo, engine: pb.EngineInfo) -> None:
    capacity = {"kv_block_size", "total_kv_blocks", "max_running_requests", "max_batched_tokens"}
    shared = {field.name for field in model.DESCRIPTOR.fields} - capacity - {"tasks"}
    assert_same(model, split_messages.model_info(model), shared)
    info = split_messages.server_info(engine, model)
    assert_same(model, info.capacity, capacity)
    assert int(info.engine_role) == int(engine.role)
    own = {"role", "parallelism", "schema_release"}
    assert_same(engine, info, {field.name for field in engine.DESCRIPTOR.fields} - own)
    assert_same(
        engine.parallelism,
        info.parallelism,
        {field.name for field in engine.parallelism.DESCRIPTOR.fields},
    )


def contract_plan(kv: bytes) -> GenerationPlan:
    request = pb.GenerateRequest(request_id="r", token_ids=pb.TokenIds(ids=[1]))
    request.kv.MergeFromString(kv)
    return plan_generation(request, FACTS, RequestLimits())


def split_plan(kv: bytes) -> GenerationPlan:
    request = split.GenerateRequest(request_id="r", token_ids=split.TokenIds(ids=[1]))
    request.kv.MergeFromString(kv)
    asked = split_messages.generate_request(request)
    return plan_generation(asked, FACTS, RequestLimits(), request.extra)


def taken(plan: Callable[[bytes], GenerationPlan], kv: bytes) -> GenerationPlan | None:
    """The plan of a request with these options; None if they are refused as invalid."""
    try:
        return plan(kv)
    except OpenEngineError as error:
        if error.code != pb.ERROR_CODE_INVALID_ARGUMENT:
            raise
        return None


SALTS = st.none() | st.text(min_size=1, max_size=8)


@given(st.none() | st.booleans(), SALTS)
def test_the_other_revision_s_options_on_the_contract_s_path(
    bypass: bool | None, salt: str | None
) -> None:
    sent = split.KvOptions(bypass_prefix_cache=bypass, cache_salt=salt).SerializeToString()
    plan = taken(contract_plan, sent)
    if plan is None:
        assert bypass or salt
        return
    # A bypass that is off is the number of the only rank, which changes nothing.
    assert not bypass
    assert not salt
    assert (plan.bypass_prefix_cache, plan.cache_salt) == (False, None)


@given(st.none() | st.integers(0, 2**32 - 1), st.none() | st.booleans(), SALTS)
def test_the_contract_s_options_on_the_other_path(
    rank: int | None, bypass: bool | None, salt: str | None
) -> None:
    sent = pb.KvOptions(
        data_parallel_rank=rank, bypass_prefix_cache=bypass, cache_salt=salt
    ).SerializeToString()
    plan = taken(split_plan, sent)
    if plan is None:
        assert bypass is not None or salt
        return
    # A rank alone reads as a bypass, which costs time and no answer; nothing else gets through.
    assert bypass is None
    assert salt is None
    assert (plan.data_parallel_rank, plan.cache_salt) == (None, None)


@pytest.mark.parametrize("name", sorted(CHANGED))
@given(data=st.data())
def test_a_message_of_one_revision_is_not_one_of_the_other(name: str, data: st.DataObject) -> None:
    """What a class of the other revision does not read stays visible as unknown."""
    ours, theirs = of(pb)[name], of(split)[name]
    message = data.draw(messages(theirs.DESCRIPTOR))  # type: ignore[arg-type]
    parsed = ours.FromString(message.SerializeToString())
    known = {field.number for field in ours.DESCRIPTOR.fields}
    foreign = [field for field, _ in message.ListFields() if field.number not in known]
    assert len(UnknownFieldSet(parsed)) >= len(foreign)

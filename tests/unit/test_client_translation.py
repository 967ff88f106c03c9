"""What the client makes of the contract's messages for the split revision, and back."""

from __future__ import annotations

import json
import math

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from openengine_vllm.protocol import split, split_messages
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.call_metadata import add_to_generate, read_call_metadata
from openengine_vllm.protocol.errors import OpenEngineError
from openengine_vllm.protocol.translation import unchanged
from tests.support.random_messages import messages


def same(one: Message, other: Message) -> None:
    """Equal by their bytes, in which all that differs shows."""
    assert one.SerializeToString(deterministic=True) == other.SerializeToString(deterministic=True)


def served(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """What a server of the split revision has in its hands, in the contract's words."""
    sent = split_messages.split_generate_request(request).SerializeToString()
    came = split_messages.generate_request(split.GenerateRequest.FromString(sent))
    add_to_generate(came, read_call_metadata(split_messages.call_keys(request)))
    return came


@given(messages(pb.GenerateRequest.DESCRIPTOR))
def test_a_request_comes_as_it_was_asked(request: pb.GenerateRequest) -> None:
    request.ClearField("metadata")
    if request.kv.HasField("session") and request.kv.HasField("data_parallel_rank"):
        # The revision refuses two ranks; the contract takes what a client says.
        request.kv.session.dp_rank = request.kv.data_parallel_rank
    same(served(request), request)


@pytest.mark.parametrize("priority", [-(2**31), -1, 0, 2**31 - 1])
@pytest.mark.parametrize("rank", [0, 2**32 - 1])
def test_ends_of_the_keys(priority: int, rank: int) -> None:
    kv = pb.KvOptions(data_parallel_rank=rank)
    request = pb.GenerateRequest(request_id="r", priority=priority, kv=kv)
    assert served(request) == request


def test_what_is_absent_has_no_key() -> None:
    assert split_messages.call_keys(pb.GenerateRequest(kv=pb.KvOptions(cache_salt="s"))) == ()


def test_metadata_is_not_lost_in_silence() -> None:
    request = pb.GenerateRequest(request_id="r", metadata={"tenant": "a"})
    with pytest.raises(OpenEngineError, match="split revision") as caught:
        split_messages.split_generate_request(request)
    assert caught.value.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE
    assert caught.value.field == "metadata"


@given(messages(pb.EngineInfo.DESCRIPTOR), messages(pb.ModelInfo.DESCRIPTOR))
def test_discovery_comes_back(engine: pb.EngineInfo, model: pb.ModelInfo) -> None:
    server = split_messages.server_info(engine, model)
    engine.schema_release = server.schema_release
    same(split_messages.contract_engine_info(server), engine)
    told = split_messages.contract_model_info(split_messages.model_info(model), server)
    # Tasks are not in the split revision.
    model.ClearField("tasks")
    same(told, model)


def test_capacity_that_is_not_told_stays_absent() -> None:
    told = split_messages.contract_model_info(split.ModelInfo(), split.ServerInfo())
    assert told == pb.ModelInfo()
    server = split.ServerInfo(capacity=split.DeploymentCapacity(total_kv_blocks=0))
    told = split_messages.contract_model_info(split.ModelInfo(), server)
    assert told.HasField("total_kv_blocks")
    assert not told.HasField("kv_block_size")


@given(messages(pb.LoadInfo.DESCRIPTOR))
def test_load_comes_back(load: pb.LoadInfo) -> None:
    same(split_messages.contract_load_info(split_messages.load_info(load)), load)


@given(st.floats(), st.text(max_size=5))
def test_attributes_of_other_kinds(number: float, text: str) -> None:
    load = split.LoadInfo()
    attributes = load.attributes
    attributes["text"], attributes["number"] = text, number
    attributes["yes"], attributes["nothing"] = True, None
    attributes["list"] = [text, {"n": number}]
    told = split_messages.contract_load_info(load).attributes
    assert told["text"] == text
    assert (told["yes"], told["nothing"]) == ("true", "null")
    inner, parts = json.loads(told["number"]), json.loads(told["list"])
    assert parts[0] == text
    for value in (inner, parts[1]["n"], float(told["number"])):
        assert value == number or (math.isnan(value) and math.isnan(number))


def test_whole_numbers_are_written_as_such() -> None:
    load = split.LoadInfo()
    load.attributes["preemptions"] = 12
    assert split_messages.contract_load_info(load).attributes == {"preemptions": "12"}


RPCS = {"Generate", "Health", "Abort", "LoadLora", "UnloadLora", "ListLoras"} | {
    "GetKvEventSources",
    "SubscribeKvEvents",
}
"""Those whose responses, and all requests but Generate's, are read as the contract's."""


@pytest.mark.parametrize("rpc", sorted(RPCS))
def test_what_passes_as_it_is(rpc: str) -> None:
    contract = pb.SERVICE.methods_by_name[rpc]
    service = split.INFERENCE_SERVICE if rpc == "Generate" else split.CONTROL_SERVICE
    method = service.methods_by_name[rpc]
    if rpc != "Generate":
        assert unchanged(method.input_type, contract.input_type)
    for field in method.output_type.fields:
        other = contract.output_type.fields_by_name[field.name]
        assert field.number == other.number
        if field.message_type is not None and field.message_type.name != "EngineError":
            assert unchanged(field.message_type, other.message_type)
    assert len(method.output_type.fields) == len(contract.output_type.fields)


def test_errors_have_a_part_of_the_contract_s_fields() -> None:
    ours = {(f.name, f.number, f.type) for f in pb.EngineError.DESCRIPTOR.fields}
    assert {(f.name, f.number, f.type) for f in split.EngineError.DESCRIPTOR.fields} < ours

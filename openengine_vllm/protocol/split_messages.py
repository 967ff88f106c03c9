"""The messages that the split revision changes, from and to those of the contract."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf import json_format

from openengine_vllm.protocol import errors, split
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.call_metadata import PRIORITY_KEY, RANK_KEY
from openengine_vllm.protocol.revision import SPLIT
from openengine_vllm.protocol.translation import check_known, copy_shared


def generate_request(request: split.GenerateRequest) -> pb.GenerateRequest:
    """The request without its ``extra``, for which the contract has no place.

    Raises:
        OpenEngineError: ``kv`` holds fields that the revision does not define. Under the
            contract's numbers they would be another option, or a salt that is lost.
    """
    result = pb.GenerateRequest()
    copy_shared(request, result)
    if request.HasField("kv"):
        check_known(request.kv, "kv")
        result.kv.SetInParent()
        copy_shared(request.kv, result.kv)
    return result


def server_info(engine: pb.EngineInfo, model: pb.ModelInfo | None = None) -> split.ServerInfo:
    """What the contract tells of the engine, with the capacity that it tells of the model."""
    result = split.ServerInfo(engine_role=split.EngineRole.ValueType(engine.role))
    copy_shared(engine, result)
    result.schema_release = SPLIT.schema_release
    if engine.HasField("parallelism"):
        result.parallelism.SetInParent()
        copy_shared(engine.parallelism, result.parallelism)
    if model is not None:
        result.capacity.SetInParent()
        copy_shared(model, result.capacity)
    return result


def model_info(model: pb.ModelInfo) -> split.ModelInfo:
    """What one model can do."""
    result = split.ModelInfo()
    copy_shared(model, result)
    return result


def load_info(load: pb.LoadInfo) -> split.LoadInfo:
    """How busy the engine is; the attributes are texts in both revisions."""
    result = split.LoadInfo()
    copy_shared(load, result)
    if load.attributes:
        json_format.ParseDict(dict(load.attributes), result.attributes)
    return result


# The other way round, for clients that speak the contract.


def split_generate_request(request: pb.GenerateRequest) -> split.GenerateRequest:
    """The request without priority and rank, which travel as :func:`call_keys`.

    Raises:
        OpenEngineError: UNSUPPORTED_FEATURE for ``metadata``, which could only be lost.
    """
    if request.metadata:
        raise errors.unsupported_option("metadata", "the split revision has no place for metadata")
    result = split.GenerateRequest()
    copy_shared(request, result)
    if request.HasField("kv"):
        result.kv.SetInParent()
        copy_shared(request.kv, result.kv)
    return result


def call_keys(request: pb.GenerateRequest) -> tuple[tuple[str, str], ...]:
    """What the split revision has as metadata of the call and not in the request."""
    keys = []
    if request.HasField("priority"):
        keys.append((PRIORITY_KEY, str(request.priority)))
    if request.kv.HasField("data_parallel_rank"):
        keys.append((RANK_KEY, str(request.kv.data_parallel_rank)))
    return tuple(keys)


def contract_engine_info(server: split.ServerInfo) -> pb.EngineInfo:
    """Who answers; ``capacity`` belongs to the model, and for ``extra`` there is no place."""
    result = pb.EngineInfo(role=pb.EngineRole.ValueType(server.engine_role))
    copy_shared(server, result)
    if server.HasField("parallelism"):
        result.parallelism.SetInParent()
        copy_shared(server.parallelism, result.parallelism)
    return result


def contract_model_info(model: split.ModelInfo, server: split.ServerInfo) -> pb.ModelInfo:
    """What one model can do, with the capacity that the server tells of."""
    result = pb.ModelInfo()
    copy_shared(model, result)
    copy_shared(server.capacity, result)
    return result


def contract_load_info(load: split.LoadInfo) -> pb.LoadInfo:
    """How busy the engine is; attributes that are no texts become JSON."""
    result = pb.LoadInfo()
    copy_shared(load, result)
    for name, value in load.attributes.fields.items():
        result.attributes[name] = _text(value)
    return result


def _text(value: split.Value) -> str:
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _plain(value: split.Value) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return {name: _plain(part) for name, part in value.struct_value.fields.items()}
        case "list_value":
            return [_plain(part) for part in value.list_value.values]
    return None

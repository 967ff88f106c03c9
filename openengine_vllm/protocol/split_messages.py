"""The messages that the split revision changes, from and to those of the contract."""

from __future__ import annotations

from google.protobuf import json_format

from openengine_vllm.protocol import split
from openengine_vllm.protocol import v1 as pb
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

"""The generated protocol package: complete, isolated from protobuf's default pool, and true to
the wire numbers of the contract."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import any_pb2, descriptor_pb2, json_format, struct_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from openengine_vllm.protocol import revision
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.message_classes import publish
from openengine_vllm.protocol.v1 import service_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]

STRUCT_CONTENT: dict[str, Any] = {
    "number": 1.5,
    "true": True,
    "null": None,
    "string": "x",
    "list": [1.0, {"key": "value"}],
    "struct": {"empty": []},
}

METHODS = {
    "Generate": ("GenerateRequest", "GenerateResponse", True),
    "Embed": ("EmbedRequest", "EmbedResponse", False),
    "Classify": ("ClassifyRequest", "ClassifyResponse", False),
    "Score": ("ScoreRequest", "ScoreResponse", False),
    "GetEngineInfo": ("GetEngineInfoRequest", "EngineInfo", False),
    "GetModelInfo": ("GetModelInfoRequest", "ModelInfo", False),
    "GetLoad": ("GetLoadRequest", "LoadInfo", False),
    "Health": ("HealthRequest", "HealthResponse", False),
    "Abort": ("AbortRequest", "AbortResponse", False),
    "Drain": ("DrainRequest", "DrainResponse", True),
    "LoadLora": ("LoadLoraRequest", "LoadLoraResponse", False),
    "UnloadLora": ("UnloadLoraRequest", "UnloadLoraResponse", False),
    "ListLoras": ("ListLorasRequest", "ListLorasResponse", False),
    "GetKvConnectorInfo": ("GetKvConnectorInfoRequest", "KvConnectorInfo", False),
    "GetKvEventSources": ("GetKvEventSourcesRequest", "GetKvEventSourcesResponse", False),
    "SubscribeKvEvents": ("SubscribeKvEventsRequest", "SubscribeKvEventsResponse", True),
    "SubscribeRuntimeEvents": (
        "SubscribeRuntimeEventsRequest",
        "SubscribeRuntimeEventsResponse",
        True,
    ),
}


def schema_files() -> list[FileDescriptor]:
    """The files of the schema itself, found through the imports of the service's."""
    found: dict[str, FileDescriptor] = {}
    pending = [pb.SERVICE.file]
    while pending:
        file = pending.pop()
        if file.package == "openengine.v1" and file.name not in found:
            found[file.name] = file
            pending.extend(file.dependencies)
    return list(found.values())


MESSAGES = sorted(
    (message for file in schema_files() for message in file.message_types_by_name.values()),
    key=lambda message: message.full_name,
)


def run_python(code: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


class TestSurface:
    def test_every_definition_is_exported(self) -> None:
        enums = [enum for file in schema_files() for enum in file.enum_types_by_name.values()]
        assert (len(MESSAGES), len(enums)) == (92, 16)
        for message in MESSAGES:
            assert getattr(pb, message.name).DESCRIPTOR is message
            assert message.name in pb.__all__
        for enum in enums:
            assert getattr(pb, enum.name).DESCRIPTOR is enum
            for value in enum.values:
                assert getattr(pb, value.name) == value.number
                assert value.name in pb.__all__

    def test_methods(self) -> None:
        assert pb.SERVICE.full_name == revision.SERVICE_NAME
        assert {
            method.name: (method.input_type.name, method.output_type.name, method.server_streaming)
            for method in pb.SERVICE.methods
        } == METHODS
        assert not any(method.client_streaming for method in pb.SERVICE.methods)

    def test_stub_calls_the_service_s_methods(self) -> None:
        calls: dict[str, tuple[type, bool]] = {}

        class Channel:
            def unary_unary(self, path: str, **options: Any) -> None:
                calls[path] = (type(options["response_deserializer"](b"")), False)

            def unary_stream(self, path: str, **options: Any) -> None:
                calls[path] = (type(options["response_deserializer"](b"")), True)

        service_pb2_grpc.OpenEngineStub(Channel())  # type: ignore[arg-type]
        assert calls == {
            f"/{revision.SERVICE_NAME}/{name}": (getattr(pb, response), streams)
            for name, (_, response, streams) in METHODS.items()
        }

    def test_servicer_has_every_method(self) -> None:
        assert METHODS.keys() <= vars(service_pb2_grpc.OpenEngineServicer).keys()

    def test_revision(self) -> None:
        for known in revision.REVISIONS.values():
            assert re.fullmatch(r"[0-9a-f]{40}", known.schema_release)
        assert 1 <= revision.MINIMUM_CLIENT_REVISION <= revision.SCHEMA_REVISION

    def test_classes_know_their_module(self) -> None:
        assert pb.GenerateRequest.__module__ == "openengine_vllm.protocol.v1.generate_request_pb2"
        assert pb.Struct.__module__ == "openengine_vllm.protocol.v1.struct_pb2"


def filled(descriptor: Descriptor, variant: int, depth: int) -> Message:
    """A message with every field set; of a oneof, the variant so many places on.

    Below the depth, fields that are messages stay unset.
    """
    message = GetMessageClass(descriptor)()
    if isinstance(message, pb.Struct):
        message.update(STRUCT_CONTENT)
        return message
    for field in descriptor.fields:
        group = field.containing_oneof
        if group is not None and group.fields[variant % len(group.fields)] is not field:
            continue
        fill(message, field, variant, depth)
    return message


def fill(message: Message, field: FieldDescriptor, variant: int, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        if value.message_type is None:
            getattr(message, field.name)[scalar(key)] = scalar(value)
        elif depth:
            item = filled(value.message_type, variant, depth - 1)
            getattr(message, field.name)[scalar(key)].CopyFrom(item)
    elif field.message_type is not None:
        if depth:
            item = filled(field.message_type, variant, depth - 1)
            if field.is_repeated:
                getattr(message, field.name).extend([item, item])
            else:
                getattr(message, field.name).CopyFrom(item)
    elif field.is_repeated:
        getattr(message, field.name).extend([scalar(field), scalar(field)])
    else:
        setattr(message, field.name, scalar(field))


def scalar(field: FieldDescriptor) -> object:
    """A value that differs from the default and from that of the field's neighbours."""
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return True
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        text = f"{field.name} \N{SNOWMAN}"
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return -field.number - 0.5
    largest = {
        FieldDescriptor.CPPTYPE_INT32: -(2**31),
        FieldDescriptor.CPPTYPE_INT64: -(2**63),
        FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
        FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1,
    }[field.cpp_type]
    return largest + field.number if largest < 0 else largest - field.number


def variants(descriptor: Descriptor) -> int:
    """How many variants the largest oneof at or below the message has."""
    seen: set[str] = set()

    def reachable(message: Descriptor) -> Iterator[Descriptor]:
        if message.full_name not in seen:
            seen.add(message.full_name)
            yield message
            for field in message.fields:
                if field.message_type is not None:
                    yield from reachable(field.message_type)

    return max(
        (len(oneof.fields) for message in reachable(descriptor) for oneof in message.oneofs),
        default=1,
    )


class TestMessages:
    @pytest.mark.parametrize("descriptor", MESSAGES, ids=lambda descriptor: descriptor.name)
    def test_round_trip(self, descriptor: Descriptor) -> None:
        cls = getattr(pb, descriptor.name)
        for variant in range(variants(descriptor)):
            message = filled(descriptor, variant, depth=6)
            assert isinstance(message, cls)
            assert bool(message.ListFields()) == bool(descriptor.fields)
            assert cls.FromString(message.SerializeToString()) == message
            assert json_format.ParseDict(json_format.MessageToDict(message), cls()) == message

    def test_wire_numbers(self) -> None:
        request = pb.GenerateRequest(
            request_id="r",
            token_ids=pb.TokenIds(ids=[1, 300]),
            sampling=pb.SamplingParams(seed=0, num_sequences=2),
            kv=pb.KvOptions(data_parallel_rank=0, cache_salt="s"),
            lora_name="l",
            priority=-1,
        )
        assert request.SerializeToString().hex(" ") == (
            "0a 01 72 "  # 1: request_id
            "22 05 0a 03 01 ac 02 "  # 4: token_ids
            "2a 04 40 00 48 02 "  # 5: sampling
            "42 05 10 00 22 01 73 "  # 8: kv
            "5a 01 6c "  # 11: lora_name
            "60 ff ff ff ff ff ff ff ff ff 01"  # 12: priority
        )
        response = pb.GenerateResponse(
            finished=pb.GenerationFinished(output_index=0, reason=pb.FINISH_REASON_STOP),
            usage=pb.Usage(total_tokens=3),
        )
        assert response.SerializeToString().hex(" ") == "2a 04 08 00 10 01 52 02 18 03"

    def test_presence_tells_zero_from_absent(self) -> None:
        assert not pb.TokenOutput().HasField("output_index")
        assert pb.TokenOutput.FromString(
            pb.TokenOutput(output_index=0).SerializeToString()
        ).HasField("output_index")

    def test_error_travels_in_any(self) -> None:
        error = pb.EngineError(code=pb.ERROR_CODE_OVERLOADED, retry_after_ms=0)
        error.details.update({"field": "sampling.top_p"})
        packed = any_pb2.Any()
        packed.Pack(error)
        assert packed.type_url == "type.googleapis.com/openengine.v1.EngineError"
        unpacked = pb.EngineError()
        assert packed.Unpack(unpacked)
        assert unpacked == error
        assert json_format.MessageToDict(packed, descriptor_pool=pb.POOL)["details"] == {
            "field": "sampling.top_p"
        }


class TestStruct:
    def test_behaves_like_protobuf_s_own(self) -> None:
        struct = pb.Struct()
        struct.update(STRUCT_CONTENT)
        assert struct["string"] == "x"
        assert "null" in struct
        assert json_format.MessageToDict(struct) == STRUCT_CONTENT
        assert json_format.ParseDict(STRUCT_CONTENT, pb.Struct()) == struct
        own = struct_pb2.Struct()
        own.update(STRUCT_CONTENT)
        assert pb.Struct.FromString(own.SerializeToString()) == struct

    def test_as_a_field(self) -> None:
        session = json_format.ParseDict({"attributesStruct": STRUCT_CONTENT}, pb.KvSessionRef())
        assert isinstance(session.attributes_struct, pb.Struct)
        session.attributes_struct["more"] = [1, 2]
        assert session.attributes_struct.get_or_create_list("more")[1] == 2
        copy = pb.KvSessionRef(attributes_struct=session.attributes_struct)
        assert json_format.MessageToDict(copy)["attributesStruct"] == {
            **STRUCT_CONTENT,
            "more": [1.0, 2.0],
        }

    def test_is_not_protobuf_s_own(self) -> None:
        with pytest.raises(TypeError, match="same class"):
            pb.EngineError().details.CopyFrom(struct_pb2.Struct())  # type: ignore[arg-type]


class TestIsolation:
    def test_nothing_in_the_default_pool(self) -> None:
        names = [file.name for file in schema_files()]
        assert len(names) == 20
        run_python(
            """
import sys
from google.protobuf import descriptor_pool
from openengine_vllm.protocol import v1
from openengine_vllm.protocol.v1 import service_pb2_grpc

default = descriptor_pool.Default()
def known(find, name):
    try:
        return bool(find(name))
    except KeyError:
        return False

assert not [name for name in sys.argv[1:] if known(default.FindFileByName, name)]
for name in v1.POOL.FindFileByName("openengine/v1/service.proto").services_by_name:
    assert not known(default.FindServiceByName, f"openengine.v1.{name}")
assert known(v1.POOL.FindMessageTypeByName, "openengine.v1.GenerateRequest")
assert not known(default.FindMessageTypeByName, "openengine.v1.GenerateRequest")
""",
            *names,
        )

    def test_light_to_import(self) -> None:
        loaded = run_python(
            "import sys, openengine_vllm.protocol.v1; print(*sys.modules, sep='\\n')"
        ).split()
        assert "openengine_vllm.protocol.v1.generation_pb2" in loaded
        assert not {"grpc", "vllm", "torch", "numpy"} & set(loaded)

    @pytest.mark.parametrize("order", ["other first", "ours first"])
    def test_beside_another_distribution(self, order: str, tmp_path: Path) -> None:
        package = tmp_path / "openengine" / "v1"
        package.mkdir(parents=True)
        (tmp_path / "openengine" / "__init__.py").touch()
        (package / "__init__.py").touch()
        (package / "generation_pb2.py").write_text(
            """
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

file = descriptor_pb2.FileDescriptorProto(
    name="openengine/v1/generation.proto", package="openengine.v1", syntax="proto3"
)
file.message_type.add(name="GenerateRequest").field.add(
    name="other", number=1, type=descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
)
DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
GenerateRequest = message_factory.GetMessageClass(
    descriptor_pool.Default().FindMessageTypeByName("openengine.v1.GenerateRequest")
)
"""
        )
        imports = [
            "from openengine.v1 import generation_pb2 as other",
            "from openengine_vllm.protocol import v1 as ours",
        ]
        if order == "ours first":
            imports.reverse()
        run_python(
            f"""
import sys
sys.path.insert(0, sys.argv[1])
{imports[0]}
{imports[1]}
assert other.__file__.startswith(sys.argv[1])
assert other.GenerateRequest(other=3).SerializeToString() == b"\\x08\\x03"
assert ours.GenerateRequest(request_id="r").SerializeToString() == b"\\x0a\\x01r"
assert ours.GenerateRequest is not other.GenerateRequest
""",
            str(tmp_path),
        )

    def test_beside_another_revision(self) -> None:
        file = descriptor_pb2.FileDescriptorProto(
            name="openengine/v1/errors.proto", package="openengine.v1", syntax="proto3"
        )
        file.enum_type.add(name="ErrorCode").value.add(name="ERROR_CODE_OTHER", number=0)
        outer = file.message_type.add(name="EngineError")
        outer.field.add(
            name="reason",
            number=7,
            type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
            label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
        )
        outer.nested_type.add(name="Inner")
        pool = DescriptorPool()
        pool.Add(file)
        namespace: dict[str, object] = {"__name__": "another.revision"}
        publish(pool.FindFileByName(file.name), namespace)

        other: Any = namespace["EngineError"]
        assert other is not pb.EngineError
        assert (other.__module__, other.Inner.__module__) == ("another.revision",) * 2
        assert other(reason="x").SerializeToString() == b"\x3a\x01x"
        assert namespace["ERROR_CODE_OTHER"] == 0
        assert pb.ErrorCode.keys()[0] == "ERROR_CODE_UNSPECIFIED"
        assert "reason" not in pb.EngineError.DESCRIPTOR.fields_by_name

"""Messages of one revision of the schema put into another's classes.

Nothing is read under the other revision's numbers: a field is taken over by its name, and only
where both revisions define it, and all that it holds, alike.
"""

from __future__ import annotations

from functools import cache

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from openengine_vllm.protocol import errors


def check_known(message: Message, path: str) -> None:
    """Refuse a message with fields that its revision does not define: another's, by all odds.

    Raises:
        OpenEngineError: INVALID_ARGUMENT.
    """
    if len(UnknownFieldSet(message)):
        raise errors.invalid_argument(
            path, f"{path} holds fields that this revision of the schema does not define"
        )


def copy_shared(source: Message, target: Message) -> None:
    """Set in ``target`` every field of ``source`` that means the same in both."""
    shared = _shared(source.DESCRIPTOR, target.DESCRIPTOR)
    for field, value in source.ListFields():
        repeated = shared.get(field.name)
        if repeated is None:
            continue
        if field.message_type is None:
            if repeated:
                getattr(target, field.name).extend(value)
            else:
                setattr(target, field.name, value)
        elif repeated:
            for item in value:
                getattr(target, field.name).add().MergeFromString(item.SerializeToString())
        else:
            part = getattr(target, field.name)
            part.SetInParent()  # it may be empty, and is present all the same
            part.MergeFromString(value.SerializeToString())


@cache
def unchanged(one: Descriptor, other: Descriptor) -> bool:
    """Whether two revisions define a message, and everything in it, alike."""
    return _alike(one, other, ())


@cache
def _shared(source: Descriptor, target: Descriptor) -> dict[str, bool]:
    """Names of the fields that both define alike, and whether they are repeated."""
    return {
        name: field.label == FieldDescriptorProto.LABEL_REPEATED
        for name, field in _fields(source).items()
        if _same_field(name, source, target, ())
    }


def _alike(one: Descriptor, other: Descriptor, outer: tuple[Descriptor, ...]) -> bool:
    if one in outer:
        return True
    fields, others = _fields(one), _fields(other)
    return fields.keys() == others.keys() and all(
        field.number == others[name].number and _same_field(name, one, other, (*outer, one))
        for name, field in fields.items()
    )


def _same_field(
    name: str, one: Descriptor, other: Descriptor, outer: tuple[Descriptor, ...]
) -> bool:
    field, twin = _fields(one)[name], _fields(other).get(name)
    if twin is None or (field.type, field.label, field.proto3_optional, field.type_name) != (
        twin.type,
        twin.label,
        twin.proto3_optional,
        twin.type_name,
    ):
        return False
    part = one.fields_by_name[name].message_type
    twin_part = other.fields_by_name[name].message_type
    return part is None or twin_part is None or _alike(part, twin_part, outer)


@cache
def _fields(descriptor: Descriptor) -> dict[str, FieldDescriptorProto]:
    proto = DescriptorProto()
    descriptor.CopyToProto(proto)
    return {field.name: field for field in proto.field}

"""Random messages of any type, for property-based tests."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(max_size=5),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=5),
    FieldDescriptor.TYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
}
_DEPTH = 3


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Any:
    """Messages with any of their fields set, and nothing of what lies deeper than three levels."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw(st.booleans()):
            _set(draw, message, field, depth)
    return message


def _set(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        keys = draw(st.lists(st.text(max_size=3), max_size=2, unique=True))
        for key in keys:
            if kind.fields_by_name["value"].message_type is None:
                getattr(message, field.name)[key] = draw(st.text(max_size=3))
        return
    repeated = hasattr(getattr(message, field.name), "extend")
    if kind is None:
        value = _scalar(draw, field)
        if repeated:
            getattr(message, field.name).extend([value])
        else:
            setattr(message, field.name, value)
    elif depth < _DEPTH:
        part = draw(messages(kind, depth + 1))
        if repeated:
            getattr(message, field.name).append(part)
        else:
            getattr(message, field.name).CopyFrom(part)


def _scalar(draw: st.DrawFn, field: FieldDescriptor) -> Any:
    if field.enum_type is not None:
        return draw(st.sampled_from([value.number for value in field.enum_type.values]))
    return draw(_SCALARS[field.type])

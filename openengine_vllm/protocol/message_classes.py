"""Message classes for descriptors that live in a pool of their own.

Code from protoc's Python plugin registers in protobuf's process-wide pool, where a second
definition of the same name is an error. This module gives the generated modules the same
contents from any pool, so that several revisions of the schema, and other distributions'
copies of it, work in one process.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass


def publish(file: FileDescriptor, namespace: dict[str, object]) -> None:
    """Puts the file's message classes, enum types and enum values into a module's namespace.

    The namespace's `__name__` becomes the module of the classes. Nothing is registered
    anywhere else.
    """
    for enum in file.enum_types_by_name.values():
        namespace[enum.name] = EnumTypeWrapper(enum)
        namespace.update((value.name, value.number) for value in enum.values)
    for message in file.message_types_by_name.values():
        namespace[message.name] = _message_class(message, str(namespace["__name__"]))


def _message_class(descriptor: Descriptor, module: str) -> type[Message]:
    cls = GetMessageClass(descriptor)
    cls.__module__ = module
    for nested in descriptor.nested_types:
        setattr(cls, nested.name, _message_class(nested, module))
    return cls

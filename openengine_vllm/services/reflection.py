"""gRPC server reflection over the schema's own descriptors and those of the health service.

A revision of the schema lives in a private descriptor pool, so a pool of it and the others is put
together here. Reflection knows a message by its name alone, and the revisions give one name to
messages that differ: only one of them can be described.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from openengine_vllm.protocol import split
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.revision import Revision

DESCRIPTORS: Final[Mapping[str, ServiceDescriptor]] = {
    service.full_name: service
    for service in (pb.SERVICE, split.INFERENCE_SERVICE, split.CONTROL_SERVICE)
}
"""Every service of every revision, by full name."""


def add_reflection(server: grpc.aio.Server, revision: Revision) -> None:
    """Let clients list and describe this revision's services, and those beside them."""
    pool = DescriptorPool()
    added: set[str] = set()
    others = (health.SERVICE_NAME, reflection.SERVICE_NAME)
    for name in revision.services:
        _add(pool, DESCRIPTORS[name].file, added)
    for name in others:
        _add(pool, descriptor_pool.Default().FindFileContainingSymbol(name), added)
    names = (*revision.services, *others)
    reflection.enable_server_reflection(names, server, pool=pool)


def _add(pool: DescriptorPool, file: FileDescriptor, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add(pool, dependency, added)
    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    pool.Add(proto)

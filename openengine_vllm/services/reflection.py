"""gRPC server reflection over the schema's own descriptors and those of the health service.

The schema lives in a private descriptor pool, so a pool of both is put together here.
"""

from __future__ import annotations

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from openengine_vllm.protocol import v1 as pb


def add_reflection(server: grpc.aio.Server) -> None:
    """Let clients list and describe the server's services."""
    pool = DescriptorPool()
    added: set[str] = set()
    others = (health.SERVICE_NAME, reflection.SERVICE_NAME)
    _add(pool, pb.SERVICE.file, added)
    for name in others:
        _add(pool, descriptor_pool.Default().FindFileContainingSymbol(name), added)
    names = (pb.SERVICE.full_name, *others)
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

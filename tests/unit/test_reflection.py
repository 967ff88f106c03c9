"""Reflection through its own client, which knows nothing of the schema beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from threading import Event, Thread

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc import aio
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.revision import OPENENGINE
from openengine_vllm.services.reflection import add_reflection


@contextmanager
def reflecting() -> Iterator[str]:
    """A server in a thread, as the reflection client blocks; its address."""
    ready, address = Event(), futures.Future[str]()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        server = aio.server()
        add_reflection(server, OPENENGINE)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        address.set_result(f"127.0.0.1:{port}")
        ready.set()
        await stop.wait()
        await server.stop(None)

    thread = Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        yield address.result(60)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def database() -> Iterator[ProtoReflectionDescriptorDatabase]:
    with reflecting() as address, grpc.insecure_channel(address) as channel:
        yield ProtoReflectionDescriptorDatabase(channel)


def test_the_services_are_listed(database: ProtoReflectionDescriptorDatabase) -> None:
    assert set(database.get_services()) == {
        "openengine.v1.OpenEngine",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


def test_the_schema_is_resolved_as_it_is(database: ProtoReflectionDescriptorDatabase) -> None:
    service = DescriptorPool(database).FindServiceByName("openengine.v1.OpenEngine")

    assert [method.name for method in service.methods] == [
        method.name for method in pb.SERVICE.methods
    ]
    assert proto(service.file) == proto(pb.SERVICE.file)
    generate = service.methods_by_name["Generate"]
    assert proto(generate.input_type.file) == proto(pb.GenerateRequest.DESCRIPTOR.file)
    assert generate.server_streaming


def test_health_is_resolved(database: ProtoReflectionDescriptorDatabase) -> None:
    service = DescriptorPool(database).FindServiceByName("grpc.health.v1.Health")

    assert {"Check", "Watch"} <= {method.name for method in service.methods}
    assert "status" in service.methods_by_name["Check"].output_type.fields_by_name


def test_every_message_is_found_by_its_name(database: ProtoReflectionDescriptorDatabase) -> None:
    pool = DescriptorPool(database)
    for method in pb.SERVICE.methods:
        for message in (method.input_type, method.output_type):
            assert pool.FindMessageTypeByName(message.full_name).full_name == message.full_name


def test_what_is_not_there_is_not_found(database: ProtoReflectionDescriptorDatabase) -> None:
    with pytest.raises(KeyError):
        DescriptorPool(database).FindServiceByName("openengine.v1.Nothing")


def proto(file: object) -> FileDescriptorProto:
    copy = FileDescriptorProto()
    file.CopyToProto(copy)  # type: ignore[attr-defined]
    return copy

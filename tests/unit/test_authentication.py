"""API keys on a running server: every way in without one is shut, for every service."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import structlog
from google.protobuf.descriptor import MethodDescriptor
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from openengine_vllm import logs
from openengine_vllm.client import Client, OpenEngineError
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.channel import client_options
from openengine_vllm.protocol.errors import STATUS_DETAILS_KEY
from openengine_vllm.services.reflection import DESCRIPTORS
from tests.support.calls import standard_status
from tests.unit.live_server import LiveServer, live_server
from tests.unit.scripted_engine import request

KEY = "the-secret-key"
METHODS = {
    f"{name}/{method.name}": method
    for name, service in DESCRIPTORS.items()
    for method in service.methods
}
SERVING = health_pb2.HealthCheckResponse.SERVING
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
BOUND = 60
"""Seconds that anything may take."""

Metadata = Sequence[tuple[str, str | bytes]]

GOOD: Metadata = (("authorization", f"Bearer {KEY}"),)

WRONG: dict[str, Metadata] = {
    "no key": (),
    "an empty header": (("authorization", ""),),
    "an empty key": (("authorization", "Bearer "),),
    "another key": (("authorization", "Bearer another-secret"),),
    "another scheme": (("authorization", f"Basic {KEY}"),),
    "no scheme": (("authorization", KEY),),
    "another header": (("x-api-key", KEY),),
    "a binary header": (("authorization-bin", f"Bearer {KEY}".encode()),),
    "twice": (*GOOD, *GOOD),
    "a wrong and the right one": (("authorization", "Bearer no"), *GOOD),
    "joined by a comma": (("authorization", f"Bearer no, Bearer {KEY}"),),
    "a prefix": (("authorization", f"Bearer {KEY[:-1]}"),),
    "a suffix": (("authorization", f"Bearer {KEY[1:]}"),),
    "more behind it": (("authorization", f"Bearer {KEY}x"),),
    "another case": (("authorization", f"Bearer {KEY.upper()}"),),
}


@pytest.fixture
async def server() -> AsyncIterator[LiveServer]:
    async with live_server("--api-key", KEY, "--reflection", "on") as live:
        yield live


@pytest.fixture
async def channel(server: LiveServer) -> AsyncIterator[aio.Channel]:
    async with aio.insecure_channel(server.address, options=client_options()) as opened:
        yield opened


MALFORMED = b"\xff"
"""A message that a handler refuses, if the call gets that far."""


async def call(channel: aio.Channel, method: MethodDescriptor, metadata: Metadata) -> StatusCode:
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.server_streaming:
        streaming: aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
        stream = streaming(MALFORMED, metadata=metadata, timeout=BOUND)
        return await stream.code()
    unary: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
    return await unary(MALFORMED, metadata=metadata, timeout=BOUND).code()


@pytest.mark.parametrize("metadata", WRONG.values(), ids=WRONG.keys())
async def test_no_method_answers(
    server: LiveServer, channel: aio.Channel, metadata: Metadata
) -> None:
    for method in METHODS.values():
        assert await call(channel, method, metadata) is StatusCode.UNAUTHENTICATED, method.name
    assert server.untouched


async def test_bytes_that_are_no_ascii_are_no_key(server: LiveServer) -> None:
    # No client of gRPC's sends them, so these are frames of HTTP/2 by hand.
    assert await status_by_hand(server.port, f"Bearer {KEY}".encode()) == "12"
    for wrong in (f"Bearer {KEY}\u00fc".encode(), f"Bearer {KEY}".encode() + b"\xff"):
        assert await status_by_hand(server.port, wrong) != "12"
    assert await status_by_hand(server.port, b"Bearer " + KEY.encode()[:-1]) == "16"


async def test_the_key_opens_everything(server: LiveServer, channel: aio.Channel) -> None:
    for method in METHODS.values():
        assert await call(channel, method, GOOD) is not StatusCode.UNAUTHENTICATED, method.name
    async with Client(server.address, api_key=KEY) as client:
        assert (await client.health()).state == pb.HEALTH_STATE_READY


async def test_a_stream_with_the_key_runs(server: LiveServer) -> None:
    async with Client(server.address, api_key=KEY) as client:
        running = asyncio.ensure_future(client.complete(request("r")))
        [collector] = await server.engine.accepted("r")
        collector.put("ab", "length")
        assert (await running).outputs[0].text == "ab"


@pytest.mark.parametrize(
    "path",
    [
        "/openengine.v1.OpenEngine/NoSuch",
        "/other.Service/Method",
        "/grpc.health.v1.Healthy/Check",
        "//grpc.health.v1.Health/Check",
        "/nothing",
    ],
)
async def test_what_is_not_there_is_shut_as_well(channel: aio.Channel, path: str) -> None:
    method: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
    assert await method(b"", timeout=BOUND).code() is StatusCode.UNAUTHENTICATED
    known = await method(b"", metadata=GOOD, timeout=BOUND).code()
    assert known is StatusCode.UNIMPLEMENTED


async def test_the_answer_says_the_same_to_all(channel: aio.Channel) -> None:
    method: aio.UnaryUnaryMultiCallable[bytes, bytes]
    method = channel.unary_unary(f"/{pb.SERVICE.full_name}/Health")
    texts = set()
    for metadata in WRONG.values():
        refused = method(b"", metadata=metadata, timeout=BOUND)
        texts.add(await refused.details())
        assert STATUS_DETAILS_KEY not in dict(await refused.trailing_metadata() or ())
    assert texts == {"a valid API key is required"}


async def test_nothing_is_read_from_a_caller_without_a_key(channel: aio.Channel) -> None:
    method: aio.StreamStreamMultiCallable[bytes, bytes]
    method = channel.stream_stream(f"/{pb.SERVICE.full_name}/Generate")
    # The request never comes.
    stream = method(timeout=BOUND)
    assert await stream.code() is StatusCode.UNAUTHENTICATED


async def test_health_for_supervisors_is_open(channel: aio.Channel) -> None:
    assert await standard_status(channel) == SERVING
    assert await standard_status(channel, pb.SERVICE.full_name) == SERVING
    watch: aio.UnaryStreamMultiCallable[
        health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
    ] = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    stream = watch(health_pb2.HealthCheckRequest(), timeout=BOUND)
    async for response in stream:
        assert response.status == SERVING
        break
    stream.cancel()


async def reflected(channel: aio.Channel, metadata: Metadata) -> StatusCode:
    method: aio.StreamStreamMultiCallable[
        reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse
    ] = channel.stream_stream(
        REFLECTION,
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    stream = method(iter(asked), metadata=metadata, timeout=BOUND)
    with suppress(aio.AioRpcError):
        async for response in stream:
            assert pb.SERVICE.full_name in str(response)
    return await stream.code()


async def test_reflection_wants_the_key(channel: aio.Channel) -> None:
    assert await reflected(channel, ()) is StatusCode.UNAUTHENTICATED
    assert await reflected(channel, GOOD) is StatusCode.OK


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        ((), StatusCode.OK),
        (("--reflection", "off"), StatusCode.UNIMPLEMENTED),
        (("--host", "0.0.0.0"), StatusCode.UNIMPLEMENTED),
        (("--host", "0.0.0.0", "--reflection", "on"), StatusCode.OK),
    ],
)
async def test_reflection_is_for_this_machine_unless_told(
    flags: tuple[str, ...], status: StatusCode
) -> None:
    async with (
        live_server(*flags) as server,
        aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        assert await reflected(channel, ()) is status


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ((), 0),
        (("--host", "0.0.0.0"), 1),
        (("--host", "0.0.0.0", "--api-key", KEY), 0),
    ],
)
async def test_an_open_server_is_warned_of_once(
    flags: tuple[str, ...], warned: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_server(*flags) as server, aio.insecure_channel(server.address) as channel:
        for _ in range(2):
            await call(channel, METHODS["openengine.v1.OpenEngine/Health"], ())
    written = "".join(capsys.readouterr())
    assert written.count("anyone who can reach the address can use the engine") == warned
    assert KEY not in written


@pytest.fixture
def _log_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("_log_as_before")
@pytest.mark.parametrize(
    ("format_", "shown"), [("logfmt", "request_id=r"), ("json", '"request_id": "r"')]
)
async def test_neither_key_nor_prompt_is_logged(
    format_: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("debug", format_)
    async with live_server("--api-key", KEY) as server:
        async with Client(server.address, api_key=KEY) as client:
            running = asyncio.ensure_future(client.complete(request("r")))
            [collector] = await server.engine.accepted("r")
            collector.put("hush", "length")
            assert (await running).outputs[0].text == "hush"
        async with Client(server.address, api_key=KEY + "x") as client:
            with pytest.raises(OpenEngineError):
                await client.health()
    written = "".join(capsys.readouterr())
    assert shown in written
    assert KEY not in written
    assert "hush" not in written


async def test_a_unix_socket_is_its_owners_and_wants_the_key(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with live_server("--uds", str(path), "--api-key", KEY) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with Client(server.address, api_key=KEY) as client:
            assert (await client.health()).state == pb.HEALTH_STATE_READY
        async with Client(server.address) as client:
            with pytest.raises(OpenEngineError) as caught:
                await client.health()
    assert caught.value.status is StatusCode.UNAUTHENTICATED


async def status_by_hand(port: int, authorization: bytes) -> str:
    """The gRPC status of a call to no known method, "" if the server ends it without one."""
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/other.Service/Method"),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"authorization", authorization),
    ]
    # Literals without indexing, none of 127 bytes or more (RFC 7541, 6.2.2).
    block = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in headers
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 5, 1, block))
    try:
        async with asyncio.timeout(BOUND):
            while True:
                header = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(header[:3], "big"))
                kind, stream = header[3], int.from_bytes(header[5:], "big")
                if kind in (3, 7) or (kind == 1 and stream == 1 and header[4] & 1):
                    _, name, rest = payload.partition(b"grpc-status")
                    return rest[1 : 1 + rest[0]].decode() if name else ""
    except asyncio.IncompleteReadError:
        return ""
    finally:
        writer.close()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload

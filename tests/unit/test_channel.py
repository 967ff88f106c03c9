"""Each channel argument has its effect: shown on real connections, against gRPC's defaults.

gRPC ignores a name that it doesn't know, so only behaviour tells whether an argument works.
Pings are counted, not waited for: a proxy between client and server reads HTTP/2 frames.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio

from openengine_vllm.protocol import channel as channel_module
from openengine_vllm.protocol.channel import client_options, server_options
from tests.support.certificates import self_signed

Options = Sequence[tuple[str, Any]]
Call = aio.UnaryUnaryMultiCallable[bytes, bytes]

MORE_THAN_SENT = 3
"""Pings; gRPC's default client stops after two that no data came between."""
MORE_THAN_TAKEN = 5
"""Pings; gRPC's default server ends the connection on the fourth."""
BOUND = 30
"""Seconds; gRPC's own ping timeout, which the tests must not reach, is 60."""


def fast_client() -> Options:
    return client_options(keepalive_seconds=0.1, keepalive_timeout_seconds=0.1)


def fast_server() -> Options:
    return server_options(keepalive_seconds=0.1, keepalive_timeout_seconds=0.1)


LONGEST_PENDING = "grpc.server_max_unrequested_time_in_server"


class Recorder(grpc.GenericRpcHandler):
    """Answers `Echo` at once and `Hold` when it is released, and notes what happened."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.release = asyncio.Event()
        self.cancelled = asyncio.Event()

    def service(
        self, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        handler = {"/test/Echo": self._echo, "/test/Hold": self._hold}[details.method]
        return grpc.unary_unary_rpc_method_handler(handler)

    async def _echo(self, request: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        self.log.append("echo")
        return request

    async def _hold(self, request: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        name = request.decode()
        self.log.append(f"{name} began")
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        self.log.append(f"{name} ended")
        return b"done"


class FrameCounter:
    """Counts the PING frames, acknowledgements left out, in one direction of a connection."""

    def __init__(self, preface: int) -> None:
        self.pings = 0
        self._skip = preface
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while True:
            if self._skip:
                gone = min(self._skip, len(self._buffer))
                del self._buffer[:gone]
                self._skip -= gone
            if self._skip or len(self._buffer) < 9:
                return
            length, kind, flags = self._buffer[:3], self._buffer[3], self._buffer[4]
            self.pings += kind == 6 and not flags & 1
            self._skip = 9 + int.from_bytes(length, "big")


class Proxy:
    """Passes one connection on, until it is told to swallow everything."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._swallow = False
        self._changed = asyncio.Event()
        self.from_client = FrameCounter(preface=24)
        self.from_server = FrameCounter(preface=0)

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]

    def swallow(self) -> None:
        self._swallow = True

    async def pings(self, counter: FrameCounter, more: int) -> None:
        """Returns once so many more pings went by than now."""
        goal = counter.pings + more
        async with asyncio.timeout(BOUND):
            while counter.pings < goal:
                self._changed.clear()
                await self._changed.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        with suppress(ConnectionError):
            await asyncio.gather(
                self._pump(reader, to_server, self.from_client),
                self._pump(upstream, writer, self.from_server),
            )

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counter: FrameCounter
    ) -> None:
        try:
            while data := await reader.read(65536):
                counter.feed(data)
                self._changed.set()
                if not self._swallow:
                    writer.write(data)
        finally:
            writer.close()


@asynccontextmanager
async def serving(options: Options) -> AsyncIterator[tuple[int, Recorder]]:
    server = aio.server(options=options)
    recorder = Recorder()
    server.add_generic_rpc_handlers((recorder,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port, recorder
    finally:
        await server.stop(None)


@asynccontextmanager
async def connected(port: int, options: Options) -> AsyncIterator[Callable[[str], Call]]:
    # A pool of its own, or channels with equal arguments share one connection.
    options = [*options, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield lambda method: channel.unary_unary(f"/test/{method}")


@asynccontextmanager
async def proxied(
    server: Options, client: Options
) -> AsyncIterator[tuple[Proxy, Recorder, Callable[[str], Call]]]:
    async with serving(server) as (port, recorder):
        proxy = Proxy(port)
        async with proxy.listen() as front, connected(front, client) as call:
            yield proxy, recorder, call


def tcp_user_timeouts(port: int) -> dict[str, int]:
    """TCP_USER_TIMEOUT in milliseconds of both ends, which are open files of this process."""
    timeouts = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not os.readlink(link).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as end:
                if end.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ports = {"server": end.getsockname()[1], "client": end.getpeername()[1]}
                for side, its_port in ports.items():
                    if its_port == port:
                        timeouts[side] = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    return timeouts


async def status_of(call: aio.UnaryUnaryCall[bytes, bytes]) -> StatusCode:
    async with asyncio.timeout(BOUND):
        return await call.code()


async def test_a_client_may_ping_through_a_long_silence() -> None:
    async with proxied(server_options(), fast_client()) as (proxy, recorder, call):
        held = call("Hold")(b"prefill")
        await proxy.pings(proxy.from_client, MORE_THAN_TAKEN)
        recorder.release.set()
        assert await held == b"done"


async def test_a_server_with_grpcs_defaults_would_end_that_call() -> None:
    async with proxied([], fast_client()) as (_, _, call):
        held = call("Hold")(b"prefill")
        assert await status_of(held) is StatusCode.UNAVAILABLE
        assert "Too many pings" in (await held.details() or "")


async def test_a_client_notices_that_its_server_vanished() -> None:
    async with proxied(server_options(), fast_client()) as (proxy, _, call):
        held = call("Hold")(b"prefill")
        await proxy.pings(proxy.from_client, MORE_THAN_SENT)
        proxy.swallow()
        assert await status_of(held) is StatusCode.UNAVAILABLE


async def test_a_server_notices_that_its_client_vanished() -> None:
    async with proxied(fast_server(), []) as (proxy, recorder, call):
        held = call("Hold")(b"generate")
        await proxy.pings(proxy.from_server, MORE_THAN_SENT)
        assert not held.done()
        proxy.swallow()
        async with asyncio.timeout(BOUND):
            await recorder.cancelled.wait()


async def test_the_kernel_gives_up_with_the_keepalive() -> None:
    server = server_options(keepalive_seconds=60, keepalive_timeout_seconds=7)
    client = client_options(keepalive_seconds=60, keepalive_timeout_seconds=9)
    async with serving(server) as (port, _), connected(port, client) as call:
        assert await call("Echo")(b"x") == b"x"
        assert tcp_user_timeouts(port) == {"server": 7000, "client": 9000}


@pytest.mark.parametrize("side", ["client", "server"])
async def test_an_idle_connection_is_watched_too(side: str) -> None:
    server = fast_server() if side == "server" else server_options()
    client = fast_client() if side == "client" else []
    async with proxied(server, client) as (proxy, _, call):
        assert await call("Echo")(b"x") == b"x"
        await proxy.pings(getattr(proxy, f"from_{side}"), MORE_THAN_SENT)
        assert await call("Echo")(b"y") == b"y"


async def test_the_servers_receive_limit_is_exact() -> None:
    async with (
        serving(server_options(max_receive_bytes=1000)) as (port, _),
        connected(port, client_options()) as call,
    ):
        assert len(await call("Echo")(b"x" * 1000)) == 1000
        assert await status_of(call("Echo")(b"x" * 1001)) is StatusCode.RESOURCE_EXHAUSTED


async def test_the_defaults_pass_what_grpcs_own_would_not() -> None:
    message = b"x" * (4 * 1024 * 1024 + 1)
    async with (
        serving(server_options()) as (port, _),
        connected(port, client_options()) as call,
        connected(port, []) as default_call,
    ):
        assert await call("Echo")(message) == message
        assert await status_of(default_call("Echo")(message)) is StatusCode.RESOURCE_EXHAUSTED
    async with serving([]) as (port, _), connected(port, client_options()) as call:
        assert await status_of(call("Echo")(message)) is StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("server", "client"),
    [
        (server_options(max_send_bytes=1000), client_options()),
        (server_options(), client_options(max_receive_bytes=1000)),
        (server_options(), client_options(max_send_bytes=1000)),
    ],
    ids=["server sends", "client receives", "client sends"],
)
async def test_the_other_size_limits_are_exact(server: Options, client: Options) -> None:
    async with serving(server) as (port, _), connected(port, client) as call:
        assert len(await call("Echo")(b"x" * 1000)) == 1000
        assert await status_of(call("Echo")(b"x" * 1001)) is StatusCode.RESOURCE_EXHAUSTED


async def test_metadata_has_one_limit_not_two() -> None:
    def entry(size: int) -> tuple[tuple[str, str]]:
        return (("key", "v" * size),)

    async with (
        serving(server_options(max_metadata_bytes=4096)) as (port, _),
        connected(port, client_options()) as call,
    ):
        # Between gRPC's soft and hard limit a call fails or not by chance.
        for _ in range(8):
            assert await call("Echo")(b"x", metadata=entry(3000)) == b"x"
        for _ in range(8):
            refused = call("Echo")(b"x", metadata=entry(4096))
            assert await status_of(refused) is StatusCode.RESOURCE_EXHAUSTED
    async with serving(server_options()) as (port, _), connected(port, client_options()) as call:
        for _ in range(8):
            assert await call("Echo")(b"x", metadata=entry(15_000)) == b"x"


async def test_calls_beyond_the_stream_limit_wait_in_the_client() -> None:
    async with (
        serving(server_options(max_concurrent_streams=1)) as (port, recorder),
        connected(port, client_options()) as call,
        connected(port, client_options()) as other,
    ):
        assert await call("Echo")(b"") == b""
        first, second = call("Hold")(b"first"), call("Hold")(b"second")
        # A whole call on another connection, so that the second one had every chance.
        assert await other("Echo")(b"") == b""
        recorder.release.set()
        assert await first == b"done"
        assert await second == b"done"
        log = [line for line in recorder.log if line != "echo"]
        assert log == ["first began", "first ended", "second began", "second ended"]


async def test_connections_beyond_the_limit_are_closed() -> None:
    async with serving(server_options(max_connections=2)) as (port, _):
        held = [await accepted(port) for _ in range(2)]
        assert await ends(port)
        held[0].close()
        async with connected(port, client_options()) as call:
            assert await call("Echo")(b"x", wait_for_ready=True, timeout=BOUND) == b"x"
            assert not held[1].is_closing()
        held[1].close()


async def test_a_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    options = server_options(max_connections=1, handshake_seconds=0.1)
    async with serving(options) as (port, _):
        assert await ends(port)
    key, certificate = (file.read_bytes() for file in self_signed(tmp_path))
    server = aio.server(options=options)
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    assert await ends(port)
    await server.stop(None)


async def accepted(port: int) -> asyncio.StreamWriter:
    """A connection on which the server has spoken HTTP/2."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(BOUND):
        await reader.readexactly(9)
    return writer


async def ends(port: int) -> bool:
    """Whether the server closes a connection that says nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(BOUND):
        with suppress(ConnectionError):
            await reader.read()
    writer.close()
    return True


async def test_no_call_of_a_burst_is_lost_before_the_server_sees_it() -> None:
    async with (
        serving(server_options()) as (port, _),
        connected(port, client_options()) as call,
    ):
        burst = [call("Echo")(b"") for _ in range(4000)]  # gRPC's own limits are 1000 and 3000
        assert {await status_of(one) for one in burst} == {StatusCode.OK}


@pytest.mark.parametrize(
    ("options", "some_are_lost"),
    [([(LONGEST_PENDING, 1)], True), (server_options(), False)],
    ids=["with a bound", "ours"],
)
async def test_calls_wait_for_a_busy_loop(options: Options, some_are_lost: bool) -> None:
    """gRPC's own bound is 30 s; what becomes of calls beyond one is seen with 1 s."""
    async with (
        serving(options) as (port, _),
        connected(port, client_options()) as call,
    ):
        await call("Echo")(b"")
        burst = [call("Echo")(b"") for _ in range(50)]
        waiting = [asyncio.ensure_future(status_of(one)) for one in burst]
        await asyncio.sleep(0)
        time.sleep(2.5)  # noqa: ASYNC251 - the loop is to be busy
        statuses = set(await asyncio.gather(*waiting))
    assert statuses <= {StatusCode.OK, StatusCode.CANCELLED}
    assert (StatusCode.CANCELLED in statuses) == some_are_lost
    assert dict(server_options())[LONGEST_PENDING] > 30


async def test_a_port_in_use_cannot_be_bound() -> None:
    async with serving(server_options()) as (port, _):
        server = aio.server(options=server_options())
        with pytest.raises(RuntimeError, match="Failed to bind"):
            server.add_insecure_port(f"127.0.0.1:{port}")


async def test_a_client_goes_past_the_environments_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(server_options()) as (port, _), serving([]) as (elsewhere, _):
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("grpc_proxy", f"http://127.0.0.1:{elsewhere}")
        options = [*client_options(), ("grpc.use_local_subchannel_pool", 1)]
        async with aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            call: Call = channel.unary_unary("/test/Echo")
            assert await call(b"x") == b"x"


def test_the_default_request_size_is_finite_and_holds_media() -> None:
    assert channel_module.DEFAULT_MAX_RECEIVE_BYTES == 64 * 1024 * 1024
    assert dict(server_options())["grpc.max_receive_message_length"] == 64 * 1024 * 1024

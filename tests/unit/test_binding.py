"""Listening addresses, and the one reason when one cannot be had."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from grpc import aio

from openengine_vllm.binding import BindError, bind, bind_tcp
from openengine_vllm.protocol.channel import server_options
from openengine_vllm.settings import ServerSettings
from tests.unit.test_settings import parse

DEFAULTS = parse("--port", "0")


@asynccontextmanager
async def bound(settings: ServerSettings) -> AsyncIterator[str]:
    """A server that listens there; its address."""
    server = aio.server(options=server_options())
    address = bind(server, settings)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def connects(address: str) -> bool:
    async with aio.insecure_channel(address) as channel:
        await channel.channel_ready()
    return True


def at(path: Path) -> ServerSettings:
    return replace(DEFAULTS, uds=str(path))


async def test_a_free_port() -> None:
    async with bound(DEFAULTS) as address:
        host, port = address.rsplit(":", 1)
        assert host == "127.0.0.1"
        assert int(port) > 0
        assert await connects(address)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
async def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback")
    async with bound(replace(DEFAULTS, host="::1")) as address:
        assert address.startswith("[::1]:")
        assert await connects(address)


async def test_a_host_name() -> None:
    async with bound(replace(DEFAULTS, host="localhost")) as address:
        assert await connects(address)


async def test_a_busy_port() -> None:
    async with bound(DEFAULTS) as address:
        port = int(address.rsplit(":", 1)[1])
        with pytest.raises(BindError, match=f":{port}: Address already in use"):
            bind(aio.server(options=server_options()), replace(DEFAULTS, port=port))
        assert await connects(address)


async def test_a_port_is_free_again_at_once() -> None:
    async with bound(DEFAULTS) as address:
        port = int(address.rsplit(":", 1)[1])
        assert await connects(address)
    async with bound(replace(DEFAULTS, port=port)) as again:
        assert again == address
        assert await connects(again)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a" * 70, "..", "1.2.3.4.5"])
async def test_a_host_that_is_not_here(host: str) -> None:
    with pytest.raises(BindError, match="cannot listen on ") as caught:
        bind(aio.server(), replace(DEFAULTS, host=host))

    assert "\n" not in str(caught.value)


async def test_a_unix_socket_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    before = os.umask(0)
    os.umask(before)
    async with bound(at(path)) as address:
        assert address == f"unix:{path}"
        assert await connects(address)
        mode = path.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
    after = os.umask(before)
    assert after == before


async def test_a_unix_socket_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with bound(at(path)) as address:
        with pytest.raises(BindError, match="another server uses it"):
            bind(aio.server(), at(path))
        assert await connects(address)


async def test_a_unix_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()

    async with bound(at(path)) as address:
        assert await connects(address)


async def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")

    with pytest.raises(BindError, match="not a socket"):
        bind(aio.server(), at(path))
    assert path.read_text() == "precious"


async def test_a_folder_that_is_absent(tmp_path: Path) -> None:
    with pytest.raises(BindError, match="is not a directory"):
        bind(aio.server(), at(tmp_path / "no" / "s"))


async def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(BindError, match="cannot listen on unix:"):
        bind(aio.server(), at(tmp_path / ("s" * 150)))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_http_gets_a_port_that_does_not_answer_yet(host: str) -> None:
    with bind_tcp(host, 0) as listener:
        address = listener.getsockname()
        with socket.socket(listener.family) as client, pytest.raises(ConnectionRefusedError):
            client.connect(address)
        listener.listen()
        with pytest.raises(BindError, match=rf"cannot listen on 127\.0\.0\.1:{address[1]}: "):
            bind_tcp("127.0.0.1", address[1])


def test_http_on_a_host_that_is_not_ours() -> None:
    with pytest.raises(BindError, match="cannot listen on 192\\.0\\.2\\.1:0: "):
        bind_tcp("192.0.2.1", 0)

"""The metrics' HTTP endpoint: what it answers, what it refuses, and what it takes from others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from openengine_vllm.binding import BindError, address_of, bind_tcp
from openengine_vllm.metrics.endpoint import (
    MOST_CONNECTIONS,
    MOST_HEAD_BYTES,
    MetricsEndpoint,
    served_metrics,
)
from openengine_vllm.metrics.exposition import exposition
from openengine_vllm.metrics.instruments import Gauge, InstrumentSet
from openengine_vllm.metrics.server_metrics import ServerMetrics
from tests.support.scrape import Scrape, http
from tests.unit.live_server import live_server
from tests.unit.test_cli import program


@contextlib.asynccontextmanager
async def endpoint(text: bytes = b"x 1\n") -> AsyncIterator[str]:
    async def make() -> bytes:
        if not text:
            raise ValueError("nothing to show")
        return text

    listener = bind_tcp("127.0.0.1", 0)
    address = address_of(listener)
    served = MetricsEndpoint(make)
    await served.start(listener)
    try:
        yield address
    finally:
        served.close()


@pytest.mark.parametrize("target", ["/metrics", "/metrics?name[]=x"])
async def test_the_text(target: str) -> None:
    async with endpoint() as address:
        reply = await http(address, f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (reply.status, reply.body) == (200, "x 1\n")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert reply.headers["content-length"] == "4"


async def test_a_head_request() -> None:
    async with endpoint() as address:
        reply = await http(address, "HEAD /metrics HTTP/1.0\r\n\r\n")
    assert (reply.status, reply.body, reply.headers["content-length"]) == (200, "", "4")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET / HTTP/1.1\r\n\r\n", 404),
        ("GET /metrics/ HTTP/1.1\r\n\r\n", 404),
        ("GET /../metrics HTTP/1.1\r\n\r\n", 404),
        ("POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
        ("GET /metrics\r\n\r\n", 400),
        ("PRI * HTTP/2.0\r\n\r\n", 400),
        ("\r\n\r\n", 400),
        ("GET /metrics HTTP/1.1\r\nX: " + "x" * 2 * MOST_HEAD_BYTES, 431),
    ],
)
async def test_nothing_else(request_: str, status: int) -> None:
    async with endpoint() as address:
        assert (await http(address, request_)).status == status


async def test_a_failure_is_logged_and_not_shown() -> None:
    with capture_logs() as logged:
        async with endpoint(b"") as address:
            reply = await http(address)
    assert (reply.status, reply.body) == (500, "Internal Server Error\n")
    assert logged[0]["event"] == "metrics failed"


async def test_connections_are_bounded_and_the_rest_go_on() -> None:
    async with endpoint() as address:
        host, port = address.rsplit(":", 1)
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(MOST_CONNECTIONS)]
        reader, refused = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        refused.close()
        reader, writer = idle[0]
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"x 1" in await reader.read()
        for _, writer in idle:
            writer.close()


async def test_a_client_that_leaves_does_no_harm() -> None:
    async with endpoint() as address:
        host, port = address.rsplit(":", 1)
        for sent in (b"", b"GET /met"):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            writer.close()
            await writer.wait_closed()
        assert (await http(address)).status == 200


async def test_the_loop_goes_on_while_a_large_text_is_made() -> None:
    registry = CollectorRegistry()
    for number in range(300):
        gauge = Gauge(f"g{number}", "A gauge.", "", ("label",))
        for label in range(50):
            gauge.cell(str(label)).value += label
        registry.register(gauge)
    turns = 0
    done = False

    async def others() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(others())
    text = await exposition(registry)
    done = True
    await task
    assert len(Scrape(text.decode()).samples) == 300 * 50
    assert turns > 5


async def test_registries_follow_each_other() -> None:
    first, second = InstrumentSet(), InstrumentSet()
    first.add(Gauge("a", "A.", ""))
    second.add(Gauge("b", "B.", ""))
    text = await exposition(first.registry, second.registry)
    assert [line for line in text.decode().splitlines() if line[0] != "#"] == ["a 0.0", "b 0.0"]


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
async def test_an_open_endpoint_is_warned_of(host: str, warned: bool) -> None:
    with capture_logs() as logged:
        async with served_metrics(ServerMetrics(), host, 0) as address:
            assert (await http(address)).status == 200
    assert logged[0]["event"] == "metrics"
    assert logged[0]["url"] == f"http://{address}/metrics"
    assert any(entry["log_level"] == "warning" for entry in logged) == warned


async def test_a_busy_port_stops_the_start_before_anything_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BindError) as caught:
            async with live_server("--metrics-port", str(port)):
                raise AssertionError("it started")
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port} for metrics: Address already in use"
    )


def test_the_program_says_so_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = program("--model", "x", "--port", "0", "--metrics-port", str(port))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == (
        f"openengine-vllm: error: cannot listen on 127.0.0.1:{port} for metrics: "
        "Address already in use"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", ".."])
def test_a_host_that_is_not_here(host: str) -> None:
    with pytest.raises(BindError, match=r"cannot listen on .*:0 for metrics: .") as caught:
        bind_tcp(host, 0, "metrics")
    assert "\n" not in str(caught.value)


async def test_a_port_is_free_again_at_once() -> None:
    async with endpoint() as address:
        await http(address)
    with bind_tcp("127.0.0.1", int(address.rsplit(":", 1)[1])) as listener:
        listener.listen()
        assert address_of(listener) == address

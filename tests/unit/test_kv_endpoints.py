"""Endpoints: read, and turned into what somebody else can connect to."""

from __future__ import annotations

import socket

import pytest
import zmq

from openengine_vllm.kv_events import endpoints
from openengine_vllm.kv_events.endpoints import (
    EndpointError,
    TcpEndpoint,
    advertised,
    check_connectable,
    free_ports,
    is_bound_by_vllm,
    local_form,
    loopback_bind,
    parse_tcp,
)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("tcp://1.2.3.4:5", TcpEndpoint("1.2.3.4", 5)),
        ("tcp://*:5557", TcpEndpoint("*", 5557)),
        ("tcp://[::1]:5557", TcpEndpoint("::1", 5557)),
        ("tcp://*:0;127.0.0.1:7", TcpEndpoint("127.0.0.1", 7)),
        ("tcp://host:70000", None),
        ("tcp://host", None),
        ("tcp://host:*", None),
        ("ipc:///x", None),
        ("", None),
    ],
)
def test_parsing(text: str, parsed: TcpEndpoint | None) -> None:
    assert parse_tcp(text) == parsed


def test_forms() -> None:
    assert local_form("tcp://*:5") == "tcp://127.0.0.1:5"
    assert local_form("tcp://[::]:5") == "tcp://[::1]:5"
    assert local_form("ipc:///x") == "ipc:///x"
    assert local_form(loopback_bind(5)) == "tcp://127.0.0.1:5"
    assert check_connectable("ipc:///x") == "ipc:///x"
    assert is_bound_by_vllm(loopback_bind(5))
    assert not is_bound_by_vllm("tcp://127.0.0.1:5")


@pytest.mark.parametrize("text", ["tcp://*:5", "tcp://0.0.0.0:5", "tcp://h:0", "udp://h:1", "h:1"])
def test_what_cannot_be_connected_to(text: str) -> None:
    with pytest.raises(EndpointError):
        check_connectable(text)


@pytest.mark.parametrize("bound", ["tcp://*:5", "tcp://0.0.0.0:5", "tcp://[::]:5"])
def test_a_wildcard_is_never_advertised(bound: str) -> None:
    told = advertised(bound, None)
    assert told is not None
    assert not told.is_wildcard
    assert advertised(bound, "router.example") == TcpEndpoint("router.example", 5)


def test_loopback_stays_loopback() -> None:
    assert advertised("tcp://127.0.0.1:5", "router.example") == TcpEndpoint("127.0.0.1", 5)
    assert advertised("tcp://10.0.0.1:5", None) == TcpEndpoint("10.0.0.1", 5)
    assert advertised("ipc:///x", "router.example") is None


def test_our_endpoint_binds_loopback_alone_and_counts_up() -> None:
    """As vLLM's publisher uses it: bound as it is, the last number a port."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.PUB)
    port = free_ports(1)
    publisher.bind(loopback_bind(port))
    assert publisher.getsockopt_string(zmq.LAST_ENDPOINT) == f"tcp://127.0.0.1:{port}"
    context.destroy(linger=0)


def test_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports(3)
    with socket.socket() as one:
        one.bind(("127.0.0.1", first + 1))
        one.listen()
        monkeypatch.setattr(endpoints, "_PORTS", range(first, first + 4))
        with pytest.raises(EndpointError, match="no 3 adjacent"):
            free_ports(3)
    assert free_ports(3) == first
    with pytest.raises(EndpointError):
        free_ports(3, taken=[first])

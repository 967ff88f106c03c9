"""Addresses: of ZMQ endpoints as they are written, and as somebody else can connect to them."""

from __future__ import annotations

import ipaddress
import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from openengine_vllm.hosts import is_loopback

_TCP = "tcp://"
_ANY = ("*", "0.0.0.0", "::", "")
_PORTS = range(20_000, 32_000)
"""Below what systems give to outgoing connections."""
_ATTEMPTS = 200


class EndpointError(ValueError):
    """Not an endpoint that can be used; the message says why."""


@dataclass(frozen=True, slots=True)
class TcpEndpoint:
    """A host and a port."""

    host: str
    """A name or an address, without brackets; possibly a wildcard."""
    port: int

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for all of a machine's addresses."""
        return self.host in _ANY

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{_TCP}{host}:{self.port}"


def parse_tcp(endpoint: str) -> TcpEndpoint | None:
    """The host and port of a ``tcp://`` endpoint, also with a source address; None for others."""
    if not endpoint.startswith(_TCP):
        return None
    host, colon, port = endpoint.removeprefix(_TCP).rpartition(";")[2].rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        return None
    return TcpEndpoint(host.removeprefix("[").removesuffix("]"), int(port))


def check_connectable(endpoint: str) -> str:
    """An endpoint that a socket can connect to, as it is.

    Raises:
        EndpointError: it is none, and why.
    """
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return endpoint
    parsed = parse_tcp(endpoint)
    if parsed is None or not parsed.port:
        raise EndpointError(f"{endpoint!r} is not tcp://HOST:PORT or ipc://PATH")
    if parsed.is_wildcard:
        raise EndpointError(f"{endpoint!r} has a wildcard where the publisher's host belongs")
    return endpoint


def is_bound_by_vllm(endpoint: str) -> bool:
    """Whether vLLM's publisher binds this endpoint; it connects to any other."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def local_form(endpoint: str) -> str:
    """How a process on the same machine reaches what is bound as ``endpoint``."""
    parsed = parse_tcp(endpoint)
    if parsed is None:
        return endpoint
    if not parsed.is_wildcard:
        return str(parsed)
    return str(TcpEndpoint("::1" if parsed.host == "::" else "127.0.0.1", parsed.port))


def loopback_bind(port: int) -> str:
    """An endpoint that vLLM's publisher binds on the loopback interface alone.

    It would connect to a plain address; the source address with its wildcard makes it bind.
    """
    return f"{_TCP}*:0;127.0.0.1:{port}"


def advertised(endpoint: str, advertise_host: str | None) -> TcpEndpoint | None:
    """How others reach what is bound as ``endpoint``; None if they cannot.

    Args:
        advertise_host: stands for whatever is bound but the loopback interface.
    """
    parsed = parse_tcp(endpoint)
    if parsed is None:
        return None
    return TcpEndpoint(advertised_host(parsed.host, advertise_host), parsed.port)


def advertised_host(host: str, advertise_host: str | None) -> str:
    """A host that others can connect to, for one that is bound."""
    if is_loopback(host):
        return host
    if advertise_host:
        return advertise_host
    return primary_address(host == "::") if host in _ANY else host


def primary_address(ipv6: bool = False) -> str:
    """The address from which this machine reaches others; loopback if it reaches none."""
    # No packet is sent: connecting a datagram socket only looks up the route.
    attempts = ((socket.AF_INET6, "2001:db8::1"), (socket.AF_INET, "192.0.2.1"))
    for family, peer in attempts if ipv6 else reversed(attempts):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((peer, 9))
                address = str(probe.getsockname()[0])
        except OSError:
            continue
        if not ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
            return address
    return "::1" if ipv6 else "127.0.0.1"


def free_ports(count: int, taken: Iterable[int] = ()) -> int:
    """The first of ``count`` adjacent ports that are free on the loopback interface.

    Raises:
        EndpointError: there are none to be found.
    """
    avoid = frozenset(taken)
    for _ in range(_ATTEMPTS):
        first = random.randrange(_PORTS.start, _PORTS.stop - count)
        ports = range(first, first + count)
        if avoid.isdisjoint(ports) and all(map(_is_free, ports)):
            return first
    raise EndpointError(f"no {count} adjacent free ports in {_PORTS.start}-{_PORTS.stop - 1}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True

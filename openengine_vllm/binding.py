"""Opening the server's listening address, with one clear reason when that fails.

gRPC itself says only that it could not bind, shares a busy TCP port unless told not to, and
takes over a Unix socket's path from a server that still uses it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import grpc

from openengine_vllm.settings import ServerSettings

_SOCKET_UMASK = 0o177
_SOCKET_PATH_BYTES = 107

AddPort: TypeAlias = Callable[[str], int]
"""Opens an address and returns its port."""


class BindError(Exception):
    """The address cannot be served; the message says why."""


def bind(
    server: grpc.aio.Server,
    settings: ServerSettings,
    credentials: grpc.ServerCredentials | None = None,
) -> str:
    """Bind the server to its address and return it as clients dial it.

    Args:
        credentials: for TLS; plaintext without.

    Raises:
        BindError: with the reason.
    """

    def add_port(address: str) -> int:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)

    if settings.uds is not None:
        return _bind_uds(add_port, Path(settings.uds))
    return _bind_tcp(add_port, settings.host, settings.port)


def bind_tcp(host: str, port: int, purpose: str = "") -> socket.socket:
    """A socket of the address, which does not listen yet; 0 is a free port.

    Args:
        purpose: what the error names it by.

    Raises:
        BindError: with the reason.
    """
    shown = _shown(host)
    with _told(f"{shown}:{port}{purpose and f' for {purpose}'}"):
        _try_tcp(host, port)
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    return listener


def address_of(listener: socket.socket) -> str:
    """The address of a bound socket, as it is dialled."""
    host, port = listener.getsockname()[:2]
    return f"{_shown(host)}:{port}"


@contextlib.contextmanager
def _told(where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise BindError(f"cannot listen on {where}: {reason}") from error


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _bind_tcp(add_port: AddPort, host: str, port: int) -> str:
    shown = _shown(host)
    with _told(f"{shown}:{port}"):
        _try_tcp(host, port)
    try:
        bound = add_port(f"{shown}:{port}")
    except RuntimeError as error:
        raise BindError(f"cannot listen on {shown}:{port}: {error}") from error
    return f"{shown}:{bound}"


def _try_tcp(host: str, port: int) -> None:
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
            probe.listen(1)


def _bind_uds(add_port: AddPort, path: Path) -> str:
    _clear_stale_socket(path)
    old = os.umask(_SOCKET_UMASK)
    try:
        add_port(f"unix:{path}")
    except RuntimeError as error:
        raise BindError(f"cannot listen on unix:{path}: {error}") from error
    finally:
        os.umask(old)
    return f"unix:{path}"


def _clear_stale_socket(path: Path) -> None:
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        raise BindError(
            f"cannot listen on unix:{path}: the path is longer than {_SOCKET_PATH_BYTES} bytes"
        )
    if not path.parent.is_dir():
        raise BindError(f"cannot listen on unix:{path}: {path.parent} is not a directory")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise BindError(f"cannot listen on unix:{path}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise BindError(f"cannot listen on unix:{path}: the path exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
    raise BindError(f"cannot listen on unix:{path}: another server uses it")

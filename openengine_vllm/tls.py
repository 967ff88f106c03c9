"""TLS for the listening address, from files that may be replaced while the server runs."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, cast

import grpc
import structlog

from openengine_vllm.settings import TlsFiles

_log = structlog.get_logger(__name__)

_Signature: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class TlsError(Exception):
    """The files can't be served with; the message says why."""


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that follow their files: each new connection gets what is there by then.

    With a client CA, clients without a certificate of that CA are turned away. Files that can't
    be used, also for a moment while they are being replaced, leave the last good ones in force.

    Raises:
        TlsError: the files can't be used as they are now.
    """
    store = _CertificateStore(files)
    # Its stubs leave out that None stands for what was there before.
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", store.renewed)
    return grpc.dynamic_ssl_server_credentials(
        store.first, fetch, require_client_authentication=files.client_ca is not None
    )


class _CertificateStore:
    """Reads the files again when they have changed. gRPC asks it from threads of its own."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._seen = self._signature()
        self.first = _load(files)

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """What the files hold, if that is new and can be used."""
        with self._lock:
            signature = self._signature()
            if signature == self._seen:
                return None
            # Taken before reading: a change in between is another change, for the next one.
            self._seen = signature
            try:
                configuration = _load(self._files)
            except TlsError as error:
                _log.warning("keeping the last good certificate", reason=str(error))
                return None
            _log.info("certificate loaded anew", file=str(self._files.certificate))
            return configuration

    def _signature(self) -> _Signature:
        return tuple(_file_signature(path) for path in self._files.paths)


def _file_signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def _load(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    certificate = _read("--tls-cert", files.certificate)
    key = _read("--tls-key", files.key)
    _check_pair(files)
    authorities = None
    if files.client_ca is not None:
        authorities = _read("--tls-client-ca", files.client_ca)
        _check_authorities(files.client_ca, authorities)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{flag} {path}: {error.strerror}") from error


def _check_pair(files: TlsFiles) -> None:
    # gRPC itself would only say that it can't bind.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.certificate, files.key, password="")
    except (OSError, ValueError) as error:
        raise TlsError(
            f"--tls-cert {files.certificate}, --tls-key {files.key}: need a certificate and its "
            f"private key, PEM without a passphrase{_reason(error)}"
        ) from error


def _check_authorities(path: Path, content: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cadata=content.decode("ascii"))
        if not context.cert_store_stats()["x509_ca"]:
            raise ValueError
    except (OSError, ValueError) as error:
        raise TlsError(
            f"--tls-client-ca {path}: needs authorities' certificates, PEM{_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return f" ({str(reason).lower().replace('_', ' ')})" if reason else ""

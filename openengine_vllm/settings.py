"""The server's own command line: flags, defaults and their meaning, apart from vLLM's."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from openengine_vllm.api_keys import API_KEY_VARIABLE, ApiKeys, configured_keys
from openengine_vllm.flag_values import port as _port
from openengine_vllm.flag_values import positive as _positive
from openengine_vllm.hosts import is_loopback
from openengine_vllm.kv_events.settings import (
    KvEventSettings,
    add_kv_event_arguments,
    kv_event_settings,
)
from openengine_vllm.limits import MIB, RequestLimits
from openengine_vllm.protocol.revision import REVISIONS, Revision

DEMO_MODEL = "demo"
"""The value of ``--model`` that means the embedded demo model."""
DEFAULT_PORT = 50051
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("logfmt", "json")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the server's certificate lives, and whose clients it takes; all are PEM."""

    certificate: Path
    """The certificate, then what leads to its root."""
    key: Path
    """Its private key, without a passphrase."""
    client_ca: Path | None = None
    """Authorities, one of which a client's certificate has to come from."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files."""
        files = (self.certificate, self.key, self.client_ca)
        return tuple(file for file in files if file is not None)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the operator asked of the server; see the flags' help for each."""

    host: str
    port: int
    uds: str | None
    http_host: str
    http_port: int | None
    """None without HTTP."""
    metrics_host: str
    metrics_port: int | None
    api_keys: ApiKeys
    tls: TlsFiles | None
    max_connections: int
    max_connection_streams: int
    drain_timeout: float
    stall_timeout: float
    probe_timeout: float
    max_concurrent_requests: int
    max_request_bytes: int
    limits: RequestLimits
    reflection: str
    revisions: tuple[Revision, ...]
    """Which are served; the first is the one that reflection describes."""
    advertise_host: str | None
    kv_events: KvEventSettings
    exit_on_engine_death: bool
    log_level: str
    log_format: str

    @property
    def authenticates(self) -> bool:
        """Whether a caller has to show a key or a certificate."""
        return bool(self.api_keys) or (self.tls is not None and self.tls.client_ca is not None)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server by gRPC."""
        return self.uds is not None or is_loopback(self.host)

    def guarded_by(self, vllm_keys: Iterable[str]) -> ServerSettings:
        """The same with the keys of vLLM's HTTP server, where there are none of its own.

        Who guards the engine on one port means it for the other.

        Raises:
            ValueError: one cannot be a key.
        """
        keys = [key for key in vllm_keys if key]
        return self if self.api_keys or not keys else replace(self, api_keys=ApiKeys(keys))

    @property
    def reflects(self) -> bool:
        """Whether the server describes its services to whoever asks."""
        return self.reflection == "on" or (self.reflection == "auto" and self.loopback)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the server's own flags, grouped."""
    add_listening_arguments(parser)
    _add_http_arguments(parser)
    _add_lifecycle_arguments(parser)
    _add_limit_arguments(parser)
    add_kv_event_arguments(parser)
    add_logging_arguments(parser)


def add_listening_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags on where clients connect, and who may."""
    listen = parser.add_argument_group("listening", "where clients connect")
    listen.add_argument("--host", default="127.0.0.1", help="address to bind (127.0.0.1)")
    listen.add_argument(
        "--port",
        type=_port,
        default=DEFAULT_PORT,
        help=f"TCP port ({DEFAULT_PORT}); 0 picks a free one, the ready line tells it",
    )
    listen.add_argument(
        "--uds", metavar="PATH", help="serve on this Unix-domain socket instead of TCP"
    )
    listen.add_argument(
        "--advertise-host",
        metavar="HOST",
        help="what others are told to connect to, for whatever listens on more than the loopback "
        "interface (this machine's own address)",
    )
    listen.add_argument(
        "--services",
        type=_revisions,
        default=tuple(REVISIONS.values()),
        metavar="LIST",
        help="which revisions of the schema are served, by commas: openengine (the service "
        "OpenEngine), split (the services Inference and Control) (openengine,split)",
    )
    listen.add_argument(
        "--reflection",
        choices=("auto", "on", "off"),
        default="auto",
        help="gRPC server reflection; auto: on where only this machine can connect (auto)",
    )
    _add_security_arguments(parser)


def _add_http_arguments(parser: argparse.ArgumentParser) -> None:
    http = parser.add_argument_group("HTTP", "what is served beside gRPC")
    http.add_argument(
        "--http-port",
        type=_port,
        metavar="N",
        help="serve vLLM's own HTTP API on this TCP port as well, from the same engine; vLLM's "
        "flags for it (--chat-template, --tool-call-parser, ...) work then; 0 picks a free port "
        "(no HTTP)",
    )
    http.add_argument(
        "--http-host", default="127.0.0.1", help="address to bind for HTTP (127.0.0.1)"
    )
    http.add_argument(
        "--metrics-port",
        type=_port,
        metavar="N",
        help="serve metrics for Prometheus, vLLM's and the server's, as HTTP /metrics on this TCP "
        "port; 0 picks a free one, the ready line tells it (off)",
    )
    http.add_argument(
        "--metrics-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address to bind for metrics; they need neither a key nor TLS (127.0.0.1)",
    )


def _add_lifecycle_arguments(parser: argparse.ArgumentParser) -> None:
    life = parser.add_argument_group("lifecycle", "starting, draining, dying")
    life.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds that running streams get to finish after SIGTERM or SIGINT (30)",
    )
    life.add_argument(
        "--stall-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds after which a stream that its client does not read is aborted (30)",
    )
    life.add_argument(
        "--probe-timeout",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds after which an engine that does not answer a probe counts as hung (10)",
    )
    life.add_argument(
        "--exit-on-engine-death",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="exit with status 1 when the engine dies, so that a supervisor restarts it (on)",
    )


def _add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = RequestLimits()
    bounds = parser.add_argument_group("limits", "what clients may ask for")
    bounds.add_argument(
        "--max-concurrent-requests",
        type=_positive,
        default=8192,
        metavar="N",
        help="sequences that may be live at once; more are refused at once (8192)",
    )
    bounds.add_argument(
        "--max-sequences",
        type=_positive,
        default=defaults.max_sequences,
        metavar="N",
        help=f"largest num_sequences of one request ({defaults.max_sequences})",
    )
    bounds.add_argument(
        "--max-request-bytes",
        type=_positive,
        default=64 * MIB,
        metavar="N",
        help="largest request message (64 MiB)",
    )
    bounds.add_argument(
        "--max-response-bytes",
        type=_positive,
        default=defaults.max_response_bytes,
        metavar="N",
        help="largest response message (4 MiB, what gRPC clients take by default)",
    )


def add_logging_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags on the server's own log."""
    logs = parser.add_argument_group("logging")
    logs.add_argument(
        "--server-log-level",
        choices=LOG_LEVELS,
        default="info",
        help="the server's own log on stderr; --log-level is vLLM's (info)",
    )
    logs.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="logfmt",
        help="the server's own log as key=value pairs or as JSON, one line an event (logfmt)",
    )


def _add_security_arguments(parser: argparse.ArgumentParser) -> None:
    security = parser.add_argument_group("security", "who may connect, and how often")
    security.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help="keys, one of which every call but grpc.health.v1 (and HTTP's /health) has to bring, "
        "as authorization: Bearer KEY; ps shows flags, so prefer the file or the environment "
        f"({API_KEY_VARIABLE})",
    )
    security.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="a file of such keys, one a line"
    )
    security.add_argument(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="serve with TLS and this certificate chain, PEM; replaced files are read again",
    )
    security.add_argument(
        "--tls-key", type=Path, metavar="FILE", help="private key of the certificate, PEM"
    )
    security.add_argument(
        "--tls-client-ca",
        type=Path,
        metavar="FILE",
        help="let in only clients with a certificate of these authorities, PEM (mutual TLS)",
    )
    security.add_argument(
        "--max-connections",
        type=_positive,
        default=1024,
        metavar="N",
        help="connections at once, those in their handshake included; more are closed (1024)",
    )
    security.add_argument(
        "--max-connection-streams",
        type=_positive,
        default=16_384,
        metavar="N",
        help="open calls on one connection; clients hold back what is more (16384)",
    )


def server_settings(
    namespace: argparse.Namespace, environment: Mapping[str, str]
) -> ServerSettings:
    """The settings that these parsed flags mean.

    Args:
        namespace: what :func:`add_server_arguments` declares.
        environment: where an API key may be.

    Raises:
        ValueError: flags that do not go together, or a key that cannot be had.
    """
    address = (namespace.host, namespace.port)
    if (
        namespace.port
        and not namespace.uds
        and address
        == (
            namespace.http_host,
            namespace.http_port,
        )
    ):
        raise ValueError("--http-port and --port have to differ")
    return ServerSettings(
        host=namespace.host,
        port=namespace.port,
        uds=namespace.uds,
        http_host=namespace.http_host,
        http_port=namespace.http_port,
        metrics_host=namespace.metrics_host,
        metrics_port=namespace.metrics_port,
        api_keys=configured_keys(namespace.api_key, namespace.api_key_file, environment),
        tls=_tls_files(namespace),
        max_connections=namespace.max_connections,
        max_connection_streams=namespace.max_connection_streams,
        drain_timeout=namespace.drain_timeout,
        stall_timeout=namespace.stall_timeout,
        probe_timeout=namespace.probe_timeout,
        max_concurrent_requests=namespace.max_concurrent_requests,
        max_request_bytes=namespace.max_request_bytes,
        limits=RequestLimits(
            # More than may ever be live at once is wrong whenever it comes, not too much now.
            max_sequences=min(namespace.max_sequences, namespace.max_concurrent_requests),
            max_response_bytes=namespace.max_response_bytes,
        ),
        reflection=namespace.reflection,
        revisions=namespace.services,
        advertise_host=namespace.advertise_host,
        kv_events=kv_event_settings(namespace),
        exit_on_engine_death=namespace.exit_on_engine_death,
        log_level=namespace.server_log_level,
        log_format=namespace.log_format,
    )


def _tls_files(namespace: argparse.Namespace) -> TlsFiles | None:
    certificate, key, client_ca = namespace.tls_cert, namespace.tls_key, namespace.tls_client_ca
    if (certificate is None) != (key is None):
        raise ValueError("--tls-cert and --tls-key go together")
    if certificate is None:
        if client_ca is not None:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        return None
    return TlsFiles(certificate, key, client_ca)


def config_values(path: Path) -> dict[str, Any]:
    """The entries of a ``--config`` file, keyed as argparse keys them.

    Raises:
        ValueError: the file cannot be read or is not a YAML mapping.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--config takes a .yaml or .yml file, not {path.name}")
    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: not valid YAML") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"--config {path}: must hold a mapping of flags to values")
    return {str(key).replace("-", "_"): value for key, value in loaded.items()}


def _revisions(text: str) -> tuple[Revision, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in REVISIONS:
            known = ", ".join(REVISIONS)
            raise argparse.ArgumentTypeError(f"{name!r} is none of {known}")
    return tuple(revision for name, revision in REVISIONS.items() if name in names)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return value

"""The gRPC channel arguments of both sides, because they have to agree.

A server's limits on pings, message sizes and metadata decide which clients survive, and gRPC's
own defaults break this contract: a server ends a connection whose client pings through a long
prefill, two servers share one port in silence, and a vanished peer is noticed a minute late.
An argument that gRPC doesn't know is ignored without a word, so each one here has a test that
shows its effect.
"""

from __future__ import annotations

from typing import Final

UNLIMITED: Final = -1
"""A message size without a limit."""

DEFAULT_MAX_RECEIVE_BYTES: Final = 64 * 1024 * 1024
"""Bytes of one request. Media travel inside a request (`raw_bytes`, `data_uri`), so gRPC's own
4 MiB would turn a few photographs away; but a message is held whole before any check of ours
can see it, so the limit has to be finite."""

DEFAULT_MAX_METADATA_BYTES: Final = 16 * 1024
"""Bytes of a call's metadata in one direction, each entry counted with 32 bytes more than its
key and value. It is the hard limit that gRPC has by default."""

DEFAULT_MAX_CONCURRENT_STREAMS: Final = 16_384
"""Open calls on one connection. A client holds calls beyond it back without telling anybody, so
it bounds what a connection can cost and lies far above what admission lets in: whoever sends
too much hears OVERLOADED."""

DEFAULT_MAX_CONNECTIONS: Final = 1024
"""Connections that a server holds, those in their handshake included; more are closed at once.
Each one costs a file descriptor, and clients of this kind are few and keep theirs."""

DEFAULT_HANDSHAKE_SECONDS: Final = 10.0
"""How long a connection may take until HTTP/2 (and TLS) is set up; gRPC's own limit, 120 s, lets
whoever opens connections and says nothing hold them for as long."""

DEFAULT_KEEPALIVE_SECONDS: Final = 30.0
"""Silence on a connection after which a side asks the other for a sign of life."""

DEFAULT_KEEPALIVE_TIMEOUT_SECONDS: Final = 20.0
"""How long that sign of life may take before the connection counts as broken."""

CLIENT_MAX_RECONNECT_BACKOFF_SECONDS: Final = 5.0
"""Longest pause between two attempts to connect, so that a client which waits for a server to
load its model is there soon after; gRPC's own pause grows to two minutes."""

_MOST_PENDING_CALLS: Final = 2**31 - 1
_LONGEST_PENDING_SECONDS: Final = 24 * 60 * 60

Options = list[tuple[str, int]]


def server_options(
    *,
    max_receive_bytes: int = DEFAULT_MAX_RECEIVE_BYTES,
    max_send_bytes: int = UNLIMITED,
    max_metadata_bytes: int = DEFAULT_MAX_METADATA_BYTES,
    max_concurrent_streams: int = DEFAULT_MAX_CONCURRENT_STREAMS,
    max_connections: int = DEFAULT_MAX_CONNECTIONS,
    handshake_seconds: float = DEFAULT_HANDSHAKE_SECONDS,
    keepalive_seconds: float = DEFAULT_KEEPALIVE_SECONDS,
    keepalive_timeout_seconds: float = DEFAULT_KEEPALIVE_TIMEOUT_SECONDS,
) -> Options:
    """Arguments for `grpc.aio.server`.

    Requests over `max_receive_bytes` and responses over `max_send_bytes` end their call with
    RESOURCE_EXHAUSTED; either may be `UNLIMITED`. A connection beyond `max_connections`, and one
    that is not set up after `handshake_seconds`, is closed. Clients may ping as often as they like.
    A connection whose client has vanished is closed, and its calls are cancelled,
    `keepalive_seconds + keepalive_timeout_seconds` after it fell silent. A port that is in use
    can't be bound.
    """
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", max_send_bytes),
        ("grpc.max_concurrent_streams", max_concurrent_streams),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", _milliseconds(handshake_seconds)),
        # gRPC cancels calls at random once 1,000 wait for the event loop to take them.
        ("grpc.server.max_pending_requests", _MOST_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING_CALLS),
        # It also cancels those that have waited for 30 s; clients have deadlines of their own.
        ("grpc.server_max_unrequested_time_in_server", _LONGEST_PENDING_SECONDS),
        ("grpc.http2.max_ping_strikes", 0),
        *_metadata(max_metadata_bytes),
        *_keepalive(keepalive_seconds, keepalive_timeout_seconds),
    ]


def client_options(
    *,
    max_receive_bytes: int = UNLIMITED,
    max_send_bytes: int = UNLIMITED,
    max_metadata_bytes: int = DEFAULT_MAX_METADATA_BYTES,
    keepalive_seconds: float = DEFAULT_KEEPALIVE_SECONDS,
    keepalive_timeout_seconds: float = DEFAULT_KEEPALIVE_TIMEOUT_SECONDS,
) -> Options:
    """Arguments for a `grpc.aio` channel to an engine.

    How large a response may be is the server's to decide, so by default the client takes any.
    A call whose server has vanished ends with UNAVAILABLE
    `keepalive_seconds + keepalive_timeout_seconds` after it fell silent; a server that answers
    pings may stay silent for as long as a prefill takes. An engine is reached directly, so the
    environment's HTTP proxy isn't used. A server that counts pings, as gRPC's
    do unless they are told otherwise, wants `keepalive_seconds` of at least 300.
    """
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", max_send_bytes),
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_reconnect_backoff_ms", _milliseconds(CLIENT_MAX_RECONNECT_BACKOFF_SECONDS)),
        # Without this a client stops pinging after two pings that no data came between.
        ("grpc.http2.max_pings_without_data", 0),
        *_metadata(max_metadata_bytes),
        *_keepalive(keepalive_seconds, keepalive_timeout_seconds),
    ]


def _metadata(max_bytes: int) -> Options:
    # gRPC turns metadata away at random between its two limits, so they are the same here.
    return [
        ("grpc.max_metadata_size", max_bytes),
        ("grpc.absolute_max_metadata_size", max_bytes),
    ]


def _keepalive(interval: float, timeout: float) -> Options:
    # The first timeout is TCP's, for bytes that the other host doesn't acknowledge; the second
    # one, a minute by default, is for the answer to a ping.
    return [
        ("grpc.keepalive_time_ms", _milliseconds(interval)),
        ("grpc.keepalive_timeout_ms", _milliseconds(timeout)),
        ("grpc.http2.ping_timeout_ms", _milliseconds(timeout)),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)

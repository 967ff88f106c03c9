"""The KV event bridge alone, for a vLLM that runs elsewhere: ``openengine-vllm kv-bridge``.

Needs neither vLLM nor torch. It serves the contract's KV event RPCs, Health and GetEngineInfo,
whether its publishers are there at the moment or not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from openengine_vllm.flag_values import rank
from openengine_vllm.kv_events.endpoints import EndpointError, check_connectable
from openengine_vllm.kv_events.settings import add_bridge_arguments
from openengine_vllm.settings import (
    ServerSettings,
    add_listening_arguments,
    add_logging_arguments,
    add_server_arguments,
    server_settings,
)

if TYPE_CHECKING:
    from openengine_vllm.kv_events.source import Publisher

DESCRIPTION = """\
Serve the KV events of a vLLM that runs elsewhere, with --kv-events-config, over the OpenEngine
contract: its batches as they come, snapshots, and replays."""

_FAILED = 1
_FLUSH_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `kv-bridge`."""
    source = parser.add_argument_group("publishers", "repeat them for each data-parallel rank")
    source.add_argument(
        "--connect",
        action="append",
        required=True,
        metavar="ENDPOINT",
        help="a rank's PUB socket, like tcp://10.0.0.1:5557",
    )
    source.add_argument(
        "--replay",
        action="append",
        default=[],
        metavar="ENDPOINT",
        help="its replay socket; without one a gap cannot be filled, only announced",
    )
    source.add_argument(
        "--first-rank",
        type=rank,
        default=0,
        metavar="N",
        help="rank of the first publisher; those after it count on (0)",
    )
    source.add_argument(
        "--topic", default="", help="the publishers' topic; messages of others are ignored (any)"
    )
    add_listening_arguments(parser)
    add_bridge_arguments(parser)
    add_logging_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit status."""
    try:
        publishers = _publishers(args)
        settings = _settings(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    import uvloop

    from openengine_vllm import logs
    from openengine_vllm.binding import BindError
    from openengine_vllm.kv_events.bridge import BridgeError
    from openengine_vllm.tls import TlsError

    logs.configure(settings.log_level, settings.log_format)
    try:
        uvloop.run(_serve(settings, publishers))
    except (BindError, BridgeError, TlsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED
    return 0


def _publishers(args: argparse.Namespace) -> Sequence[Publisher]:
    from openengine_vllm.kv_events.source import Publisher

    if args.replay and len(args.replay) != len(args.connect):
        raise ValueError(
            f"--replay has to come as often as --connect, or not at all: {len(args.replay)} for "
            f"{len(args.connect)}"
        )
    for flag, endpoints in (("--connect", args.connect), ("--replay", args.replay)):
        for endpoint in endpoints:
            try:
                check_connectable(endpoint)
            except EndpointError as error:
                raise ValueError(f"{flag}: {error}") from None
    replays = args.replay or [None] * len(args.connect)
    return [
        Publisher(rank, endpoint, replay, args.topic)
        for rank, (endpoint, replay) in enumerate(
            zip(args.connect, replays, strict=True), args.first_rank
        )
    ]


def _settings(args: argparse.Namespace) -> ServerSettings:
    """The server's settings, those flags that are not ours at their defaults."""
    every = argparse.ArgumentParser(add_help=False)
    add_server_arguments(every)
    return server_settings(
        argparse.Namespace(**{**vars(every.parse_args([])), **vars(args)}), os.environ
    )


async def _serve(settings: ServerSettings, publishers: Sequence[Publisher]) -> None:
    from openengine_vllm.binding import bind
    from openengine_vllm.kv_bridge_server import KvBridgeServer
    from openengine_vllm.tls import server_credentials

    instance_id = uuid.uuid4().hex
    server = KvBridgeServer(settings, publishers, instance_id)
    credentials = None if settings.tls is None else server_credentials(settings.tls)
    address = bind(server.grpc_server, settings, credentials)
    with _until_signal() as stop:
        await server.start(address)
        try:
            ranks = ",".join(str(publisher.rank) for publisher in publishers)
            with contextlib.suppress(BrokenPipeError):
                print(
                    f"openengine ready grpc={address} role=kv-bridge ranks={ranks} "
                    f"instance={instance_id}",
                    flush=True,
                )
            await stop.wait()
        finally:
            await server.stop(_FLUSH_SECONDS)


@contextlib.contextmanager
def _until_signal() -> Iterator[asyncio.Event]:
    """An event that SIGINT and SIGTERM set."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)

"""The `kv-sources` command: where an engine's KV events can be had."""

from __future__ import annotations

import argparse

from openengine_vllm.client.commands.kv_events import add_rank_argument
from openengine_vllm.client.commands.running import (
    SUCCESS,
    add_connection_arguments,
    open_client,
    print_json,
    run_command,
)
from openengine_vllm.protocol import v1 as pb

DESCRIPTION = """\
Show where an engine's KV events can be had, one source a line."""

_FIELDS = ("schema_version", "buffer_steps", "hwm", "max_queue_size")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `kv-sources`."""
    add_rank_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the response as a JSON line")
    add_connection_arguments(parser, timeout=10)


def run(args: argparse.Namespace) -> int:
    """Prints the sources."""
    return run_command(lambda: _kv_sources(args))


async def _kv_sources(args: argparse.Namespace) -> int:
    async with open_client(args) as client:
        response = await client.kv_event_sources(args.ranks, timeout=args.timeout)
    if args.json:
        print_json(response)
    elif not response.sources:
        print("none: KV events are switched off")
    else:
        for source in response.sources:
            print(_line(source))
    return SUCCESS


def _line(source: pb.KvEventSource) -> str:
    parts = [f"{source.transport}/{source.encoding}"]
    if source.HasField("data_parallel_rank"):
        parts.append(f"rank={source.data_parallel_rank}")
    if source.HasField("endpoint_addr"):
        address = source.endpoint_addr
        host = f"[{address.host}]" if ":" in address.host else address.host
        parts.append(f"endpoint={host}:{address.port}")
    if source.replay_endpoint:
        parts.append(f"replay={source.replay_endpoint}")
    if source.topic:
        parts.append(f"topic={source.topic}")
    parts += [f"{name}={getattr(source, name)}" for name in _FIELDS if source.HasField(name)]  # type: ignore[arg-type]
    return " ".join(parts)

"""The `events` command: what an engine's scheduler does, as it happens."""

from __future__ import annotations

import argparse
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Final

from openengine_vllm.client.commands.running import (
    SUCCESS,
    add_connection_arguments,
    open_client,
    print_json,
    run_command,
)
from openengine_vllm.protocol import v1 as pb

DESCRIPTION = """\
Print an engine's runtime events as they happen, until interrupted or until the server stops.
Times are UTC. The split revision of the schema has no runtime events."""

_PREFIX: Final = "RUNTIME_EVENT_TYPE_"
EVENT_TYPES: Final = {
    name.removeprefix(_PREFIX).lower().replace("_", "-"): number
    for name, number in pb.RuntimeEventType.items()
    if number != pb.RUNTIME_EVENT_TYPE_UNSPECIFIED
}
"""Types by the name that options give them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `events`."""
    parser.add_argument(
        "--type",
        dest="types",
        action="append",
        choices=EVENT_TYPES,
        default=[],
        help="only events of this type; repeat it for more (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print each response as a JSON line")
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints events until the server ends the stream."""
    return run_command(lambda: _events(args))


async def _events(args: argparse.Namespace) -> int:
    types = [EVENT_TYPES[name] for name in args.types]
    async with open_client(args) as client:
        subscription = client.subscribe_runtime_events(types, timeout=args.timeout)
        async with aclosing(subscription) as responses:
            async for response in responses:
                if args.json:
                    print_json(response)
                else:
                    print(_line(response.runtime_event), flush=True)
    return SUCCESS


def event_time(event: pb.RuntimeEvent) -> str:
    """When it happened: a time of day, UTC."""
    at = datetime.fromtimestamp(event.timestamp_unix_nanos / 1e9, UTC)
    return f"{at:%H:%M:%S.%f}"


def type_name(event: pb.RuntimeEvent) -> str:
    """Its type without the prefix; a number that this revision doesn't know stays one."""
    if event.type in pb.RuntimeEventType.values():
        return pb.RuntimeEventType.Name(event.type).removeprefix(_PREFIX)
    return str(event.type)


def attribute_text(event: pb.RuntimeEvent) -> str:
    """Its attributes in one line, by name."""
    return " ".join(f"{key}={value}" for key, value in sorted(event.attributes.items()))


def _line(event: pb.RuntimeEvent) -> str:
    return f"{event_time(event)} {type_name(event)} {attribute_text(event)}".rstrip()

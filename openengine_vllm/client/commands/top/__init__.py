"""The `top` command: a live view of one server in the terminal."""

from __future__ import annotations

import argparse
import sys

from openengine_vllm.client.commands.events import EVENT_TYPES
from openengine_vllm.client.commands.running import (
    INTERRUPTED,
    UsageError,
    add_connection_arguments,
    open_client,
    run_command,
    seconds_from,
)

DESCRIPTION = """\
Watch a server: its load as a whole and per rank, its throughput, its state and what its
scheduler does. It waits for a server that is away and connects again by itself. Keys: q quits,
p pauses, f filters the events, + and - change the interval, ? shows them all. Over the split
revision of the schema it does without events. It wants a terminal; `load --watch --json` and
`events --json` are for scripts."""

DEFAULT_INTERVAL = 1.0
"""Seconds."""
DEFAULT_TIMEOUT = 5.0
"""Seconds."""
_LEAST_INTERVAL = 0.1
_MOST_INTERVAL = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `top`."""
    parser.add_argument(
        "--interval",
        type=seconds_from(_LEAST_INTERVAL, _MOST_INTERVAL),
        default=DEFAULT_INTERVAL,
        metavar="SECONDS",
        help="ask the server every so often, 0.1 to 3600 (default: %(default)g)",
    )
    parser.add_argument(
        "--type",
        dest="types",
        action="append",
        choices=EVENT_TYPES,
        default=[],
        help="begin with events of this type; repeat it for more (default: all)",
    )
    add_connection_arguments(parser, timeout=DEFAULT_TIMEOUT)


def run(args: argparse.Namespace) -> int:
    """Shows the server until q is pressed."""
    return run_command(lambda: _top(args))


async def _top(args: argparse.Namespace) -> int:
    # Textual takes a while to import, and no other command needs it.
    try:
        from openengine_vllm.client.commands.top.app import Top
    except ModuleNotFoundError as error:
        raise UsageError(
            f"top needs Textual ({error.name} is missing): pip install 'openengine-vllm[top]'"
        ) from error
    # Textual reads the one and draws on the other.
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("top wants a terminal; load --watch --json is for scripts")
    types = [EVENT_TYPES[name] for name in args.types]
    async with open_client(args) as client:
        app = Top(client, args.target, args.interval, types)
        code = await app.run_async()
    # Textual keeps a cancellation to itself, and has its own code for an exception.
    return code if code is not None else app.return_code or INTERRUPTED

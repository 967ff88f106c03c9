"""The `drain` command: have an engine finish what runs, and wait for it."""

from __future__ import annotations

import argparse
from contextlib import aclosing

from openengine_vllm.client.commands.running import (
    SUCCESS,
    add_connection_arguments,
    open_client,
    print_json,
    run_command,
)
from openengine_vllm.protocol import v1 as pb

DESCRIPTION = """\
Have an engine refuse new requests, and wait until those that run have ended. The drain goes on
when this command is interrupted; nothing takes it back."""

_MOST_MILLISECONDS = 2**32 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `drain`."""
    parser.add_argument(
        "--keep-accepting", action="store_true", help="let new requests in all the same"
    )
    parser.add_argument(
        "--deadline",
        type=_milliseconds,
        metavar="SECONDS",
        help="seconds that requests get to end, 0 for none (default: as long as they take)",
    )
    parser.add_argument(
        "--abort",
        action="store_true",
        help="end what runs after the deadline; without it the drain fails and they run on",
    )
    parser.add_argument("--json", action="store_true", help="print each response as a JSON line")
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Drains, printing how far it is, and returns 0 once nothing runs."""
    return run_command(lambda: _drain(args))


async def _drain(args: argparse.Namespace) -> int:
    async with open_client(args) as client:
        drain = client.drain(
            stop_accepting_new_requests=not args.keep_accepting,
            deadline_ms=args.deadline,
            abort_after_deadline=args.abort,
            timeout=args.timeout,
        )
        async with aclosing(drain) as responses:
            async for response in responses:
                if args.json:
                    print_json(response)
                else:
                    print(_line(response), flush=True)
    return SUCCESS


def _line(response: pb.DrainResponse) -> str:
    state = response.state
    name = pb.DrainState.Name(state) if state in pb.DrainState.values() else str(state)
    parts = [name.removeprefix("DRAIN_STATE_")]
    if response.HasField("in_flight_requests"):
        parts.append(f"{response.in_flight_requests} requests")
    if response.HasField("open_kv_sessions"):
        parts.append(f"{response.open_kv_sessions} KV sessions")
    if response.message:
        parts.append(response.message)
    return "  ".join(parts)


def _milliseconds(text: str) -> int:
    milliseconds = float(text) * 1000
    if not 0 <= milliseconds <= _MOST_MILLISECONDS:
        raise argparse.ArgumentTypeError(f"must be from 0 to {_MOST_MILLISECONDS // 1000}")
    return round(milliseconds)

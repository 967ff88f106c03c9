"""The `drain` command: have an engine finish what runs, and wait for it."""

from __future__ import annotations

import argparse
from contextlib import aclosing

from openengine_vllm.client.commands.running import (
    SUCCESS,
    UsageError,
    add_connection_arguments,
    open_client,
    print_json,
    run_command,
    seconds_from,
)
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import internal

DESCRIPTION = """\
Have an engine refuse new requests, and wait until those that run have ended. The drain goes on
when this command is interrupted; nothing takes it back. The exit code is 0 only when nothing runs
any more. The split revision of the schema has no drains."""

_MOST_MILLISECONDS = 2**32 - 1
_seconds = seconds_from(0, _MOST_MILLISECONDS // 1000)


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
        help="end what runs after --deadline; without it the drain fails and they run on",
    )
    parser.add_argument("--json", action="store_true", help="print each response as a JSON line")
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Drains, printing how far it is, and returns 0 once nothing runs."""
    return run_command(lambda: _drain(args))


async def _drain(args: argparse.Namespace) -> int:
    if args.abort and args.deadline is None:
        raise UsageError("--abort goes with --deadline; --deadline 0 --abort ends everything now")
    state = pb.DRAIN_STATE_UNSPECIFIED
    async with open_client(args) as client:
        drain = client.drain(
            stop_accepting_new_requests=not args.keep_accepting,
            deadline_ms=args.deadline,
            abort_after_deadline=args.abort,
            timeout=args.timeout,
        )
        async with aclosing(drain) as responses:
            async for response in responses:
                state = response.state
                if args.json:
                    print_json(response)
                else:
                    print(_line(response), flush=True)
    if state != pb.DRAIN_STATE_COMPLETE:
        raise internal("the server ended the stream before the drain was complete")
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
    return round(_seconds(text) * 1000)

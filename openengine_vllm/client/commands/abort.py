"""The `abort` command: end one request, or all of them."""

from __future__ import annotations

import argparse

from openengine_vllm.client.commands.running import (
    SUCCESS,
    UsageError,
    add_connection_arguments,
    open_client,
    print_json,
    run_command,
)
from openengine_vllm.protocol import v1 as pb

DESCRIPTION = """\
End a request by its id, whoever sent it. One that has ended already is no error; one that the
engine has never heard of is."""

DEFAULT_TIMEOUT = 10.0
"""Seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `abort`."""
    parser.add_argument("request_id", nargs="?", metavar="ID", help="the request's id")
    parser.add_argument("--all", action="store_true", help="end every request on the engine")
    parser.add_argument("--json", action="store_true", help="print the response as JSON")
    add_connection_arguments(parser, timeout=DEFAULT_TIMEOUT)


def run(args: argparse.Namespace) -> int:
    """Aborts and prints what came of it."""
    return run_command(lambda: _abort(args))


async def _abort(args: argparse.Namespace) -> int:
    if (args.request_id is None) != args.all:
        raise UsageError("give either a request's id or --all")
    async with open_client(args) as client:
        response = await (client.abort_all() if args.all else client.abort(args.request_id))
    if args.json:
        print_json(response)
    else:
        print(response.message or _status(response.status))
    return SUCCESS


def _status(status: pb.AbortStatus.ValueType) -> str:
    """What an engine says that says it without a message."""
    if status in pb.AbortStatus.values():
        return pb.AbortStatus.Name(status).removeprefix("ABORT_STATUS_").lower().replace("_", " ")
    return str(status)

"""The `health` command: one look at an engine's state, for people and for readiness checks."""

from __future__ import annotations

import argparse
from typing import Final

from openengine_vllm.client.commands.running import (
    NOT_READY,
    SUCCESS,
    add_connection_arguments,
    open_client,
    print_json,
    run_command,
)
from openengine_vllm.protocol import v1 as pb

DESCRIPTION = """\
Ask an engine for its state. The exit code is 0 only when it is READY, so the command can be a
readiness check."""

DEFAULT_TIMEOUT = 10.0
"""Seconds; a probe may have to wait for its turn behind a long prefill."""

_ROLES: Final = {
    name.removeprefix("ENGINE_ROLE_").lower(): number
    for name, number in pb.EngineRole.items()
    if number != pb.ENGINE_ROLE_UNSPECIFIED
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `health`."""
    parser.add_argument(
        "--probe", action="store_true", help="have the engine do a minimal inference"
    )
    parser.add_argument(
        "--model", default="", metavar="NAME", help="model to probe (default: the engine's own)"
    )
    parser.add_argument(
        "--role",
        choices=_ROLES,
        help="role that the engine has to have; any other is an error",
    )
    parser.add_argument("--json", action="store_true", help="print the response as JSON")
    add_connection_arguments(parser, timeout=DEFAULT_TIMEOUT)


def run(args: argparse.Namespace) -> int:
    """Prints the state and returns 0 if it is READY."""
    return run_command(lambda: _health(args))


async def _health(args: argparse.Namespace) -> int:
    async with open_client(args) as client:
        response = await client.health(
            include_inference_probe=args.probe,
            model=args.model,
            role=_ROLES[args.role] if args.role else pb.ENGINE_ROLE_UNSPECIFIED,
        )
    if args.json:
        print_json(response)
    else:
        print(state_name(response.state))
        width = max((len(check.name) for check in response.checks), default=0)
        for check in response.checks:
            line = f"  {check.name:<{width}}  {state_name(check.state)}  {check.message}"
            print(line.rstrip())
    return SUCCESS if response.state == pb.HEALTH_STATE_READY else NOT_READY


def state_name(state: pb.HealthState.ValueType) -> str:
    """A state without its prefix; a number that this revision doesn't know stays one."""
    if state in pb.HealthState.values():
        return pb.HealthState.Name(state).removeprefix("HEALTH_STATE_")
    return str(state)

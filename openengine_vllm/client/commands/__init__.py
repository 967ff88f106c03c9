"""The operator's commands, by name.

The registry itself imports none of them, so that a program can list them all, or run another
one, without paying for gRPC.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Final

EXIT_CODES: Final = """\
exit codes:
  0    success
  1    the RPC failed; standard error has one line with the code, the message and the field
  2    the command line is wrong, or asks for what the server's revision of the schema has not
  3    the engine is not ready (health)
  130  interrupted; the RPC has been cancelled
  141  whoever read standard output has gone
  143  terminated
"""


@dataclass(frozen=True)
class Command:
    """A subcommand, whose module has `DESCRIPTION`, `add_arguments` and `run`."""

    help: str
    module: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's options and the rest of its help."""
        module = self._load()
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.description = module.DESCRIPTION
        parser.epilog = EXIT_CODES
        module.add_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Runs the command to its end and returns the exit code."""
        code: int = self._load().run(args)
        return code

    def _load(self) -> ModuleType:
        # gRPC's core writes to standard error about connections that end. It reads this when it
        # is imported, and a line of its own between those of a command helps nobody.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        return import_module(self.module)


COMMANDS: Final[dict[str, Command]] = {
    "generate": Command("generate text from a prompt or a chat message", f"{__name__}.generate"),
    "health": Command("tell whether an engine is ready", f"{__name__}.health"),
    "load": Command("show how busy an engine is", f"{__name__}.load"),
    "top": Command("watch a server in the terminal", f"{__name__}.top"),
    "events": Command("print an engine's runtime events", f"{__name__}.events"),
    "kv-events": Command("print what enters and leaves the KV cache", f"{__name__}.kv_events"),
    "kv-sources": Command("show where KV events can be had", f"{__name__}.kv_sources"),
    "abort": Command("end a request, or all", f"{__name__}.abort"),
    "drain": Command("have an engine finish what runs", f"{__name__}.drain"),
    "demo-model": Command("make the folder of the demo model", "openengine_vllm.demo_model"),
    "kv-bridge": Command("serve the KV events of another vLLM", "openengine_vllm.kv_bridge"),
    "info": Command("show an engine and its models", f"{__name__}.info"),
}


def main(argv: Sequence[str], prog: str = "openengine-vllm") -> int:
    """Runs `argv`, which begins with a command's name, and returns the exit code.

    Raises SystemExit, as argparse does, for `--help` and for a wrong command line.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        choices.add_parser(name, help=command.help, add_help=False)
    name = parser.parse_args(argv[:1]).command
    parser = argparse.ArgumentParser(prog=f"{prog} {name}", allow_abbrev=False)
    COMMANDS[name].add_arguments(parser)
    return COMMANDS[name].run(parser.parse_args(argv[1:]))

"""What all commands share: how they reach an engine, and how they end.

Every way to end has its exit code and at most one line on standard error, so that scripts can
tell them apart and people aren't shown a traceback for a server that is down.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, cast

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message

from openengine_vllm.api_keys import API_KEY_VARIABLE
from openengine_vllm.client import (
    DEFAULT_TARGET,
    Client,
    NotInRevisionError,
    OpenEngineError,
)
from openengine_vllm.client.revisions import AUTO, CHOICES

SUCCESS: Final = 0
RPC_FAILED: Final = 1
USAGE: Final = 2
NOT_READY: Final = 3
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

TARGET_VARIABLE: Final = "OPENENGINE_TARGET"


class UsageError(Exception):
    """A command line that argparse can't find wrong; the message says what is."""


def add_connection_arguments(
    parser: argparse.ArgumentParser, *, timeout: float | None = None
) -> None:
    """Declares the options that `open_client` reads, with this default for `--timeout`."""
    group = parser.add_argument_group("connection")
    group.add_argument(
        "--target",
        type=_target,
        default=os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET,
        help=f"HOST:PORT or unix:PATH (environment: {TARGET_VARIABLE}; default: %(default)s)",
    )
    group.add_argument(
        "--revision",
        choices=CHOICES,
        default=AUTO,
        help="revision of the schema to speak; auto asks the server (default: %(default)s)",
    )
    group.add_argument(
        "--timeout",
        type=positive_seconds,
        default=timeout,
        metavar="SECONDS",
        help="deadline of the RPC " + ("(default: %(default)g)" if timeout else "(default: none)"),
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="the API key; ps shows flags, so prefer the file or the environment "
        f"({API_KEY_VARIABLE})",
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file whose first line is the API key"
    )
    group.add_argument("--tls", action="store_true", help="use TLS, with the system's authorities")
    group.add_argument("--tls-ca", type=Path, metavar="FILE", help="authorities to trust, PEM")
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="client certificate, PEM")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="key of the certificate, PEM")
    group.add_argument(
        "--tls-server-name", metavar="NAME", help="name that the server's certificate must have"
    )


def open_client(args: argparse.Namespace) -> Client:
    """A client as the connection options say. Raises UsageError."""
    options = []
    if args.tls_server_name is not None:
        options.append(("grpc.ssl_target_name_override", args.tls_server_name))
    try:
        return Client(
            args.target,
            credentials=_credentials(args),
            api_key=_api_key(args),
            timeout=args.timeout,
            revision=args.revision,
            options=options,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def run_command(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Runs a command's coroutine and turns every way to end into an exit code."""
    try:
        code = asyncio.run(_interruptible(main()))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except UsageError as error:
        _complain(str(error))
        return USAGE
    except NotInRevisionError as error:
        _complain(describe(error))
        return USAGE
    except OpenEngineError as error:
        _complain(describe(error))
        return RPC_FAILED
    except (asyncio.CancelledError, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes what is left when it exits, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


async def _interruptible(main: Coroutine[Any, Any, int]) -> int:
    """Runs the coroutine and cancels it on Ctrl-C.

    asyncio's own handler runs only when the main thread wakes up, and the system may hand the
    signal to one of gRPC's threads; the loop's handler wakes it.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    return await main


def describe(error: OpenEngineError) -> str:
    """An error in one line: code, message, field, and whether to try again."""
    text = f"{error.code_name}: {error.message}"
    if error.field is not None:
        text += f" (field {error.field})"
    if error.retry_after_ms is not None:
        text += f" (try again after {error.retry_after_ms} ms)"
    elif error.retryable:
        text += " (try again later)"
    return text


def print_json(message: Message) -> None:
    """Prints a message as one line of JSON, with the contract's field names."""
    value = json_format.MessageToDict(message, preserving_proto_field_name=True)
    print(json.dumps(value, ensure_ascii=False), flush=True)


def _complain(text: str) -> None:
    print("error:", " ".join(text.split()), file=sys.stderr)


def _credentials(args: argparse.Namespace) -> grpc.ChannelCredentials | None:
    if not (args.tls or args.tls_ca or args.tls_cert or args.tls_key or args.tls_server_name):
        return None
    if bool(args.tls_cert) != bool(args.tls_key):
        raise UsageError("--tls-cert and --tls-key go together")
    return grpc.ssl_channel_credentials(
        root_certificates=_read(args.tls_ca),
        private_key=_read(args.tls_key),
        certificate_chain=_read(args.tls_cert),
    )


def _api_key(args: argparse.Namespace) -> str | None:
    if args.api_key is not None and args.api_key_file is not None:
        raise UsageError("either --api-key or --api-key-file")
    if args.api_key is not None:
        return cast(str, args.api_key)
    content = _read(args.api_key_file)
    if content is None:
        return os.environ.get(API_KEY_VARIABLE) or None
    lines = content.decode("utf-8", "replace").split()
    if not lines:
        raise UsageError(f"{args.api_key_file}: holds no key")
    return lines[0]


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def _target(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("names no server")
    return text


def positive_seconds(text: str) -> float:
    """An option's value in seconds; inf is one."""
    seconds = _number(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError("must be greater than 0")
    return seconds


def seconds_from(least: float, most: float) -> Callable[[str], float]:
    """The type of an option whose value is in seconds and in this range."""

    def seconds(text: str) -> float:
        value = _number(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be from {least:.10g} to {most:.10g}")
        return value

    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text!r}") from None

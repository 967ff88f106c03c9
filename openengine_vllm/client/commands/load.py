"""The `load` command: how busy an engine is, once or as it changes."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator

from openengine_vllm.client.commands.running import (
    SUCCESS,
    add_connection_arguments,
    open_client,
    positive_seconds,
    print_json,
    run_command,
)
from openengine_vllm.protocol import v1 as pb

DESCRIPTION = """\
Show how busy an engine is. What it doesn't report is shown as -, which is something else than
a zero. Times are UTC."""

DEFAULT_TIMEOUT = 10.0
"""Seconds."""

_COLUMNS = "time", "running", "queued", "tokens", "waiting", "prefill", "decode", "kv blocks"
_WIDTHS = 8, 7, 7, 9, 9, 7, 7, 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `load`."""
    parser.add_argument("--per-rank", action="store_true", help="show each data-parallel rank too")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=positive_seconds,
        const=1.0,
        metavar="SECONDS",
        help="print a line every so often, until interrupted (every second)",
    )
    parser.add_argument("--json", action="store_true", help="print each response as a JSON line")
    add_connection_arguments(parser, timeout=DEFAULT_TIMEOUT)


def run(args: argparse.Namespace) -> int:
    """Prints the load, once or again and again."""
    return run_command(lambda: _load(args))


async def _load(args: argparse.Namespace) -> int:
    async with open_client(args) as client:
        if args.watch is not None and not args.json:
            print(_row(*_COLUMNS), flush=True)
        while True:
            load = await client.load(include_per_rank=args.per_rank)
            if args.json:
                print_json(load)
            elif args.watch is None:
                print(*_lines(load), sep="\n")
            else:
                print(*_rows(load), sep="\n", flush=True)
            if args.watch is None:
                return SUCCESS
            await asyncio.sleep(args.watch)


def _lines(load: pb.LoadInfo) -> Iterator[str]:
    figures = {
        "requests": f"{_value(load, 'running_requests')} running, "
        f"{_value(load, 'queued_requests')} queued",
        "tokens": f"{_value(load, 'running_tokens')} running, "
        f"{_value(load, 'waiting_tokens')} waiting",
        "batch": f"{_value(load, 'prefill_batch_size')} prefill, "
        f"{_value(load, 'decode_batch_size')} decode",
        "kv blocks": _blocks(load),
        "kv sessions": _value(load, "active_kv_sessions"),
        **dict(sorted(load.attributes.items())),
    }
    width = max(map(len, figures))
    for name, text in figures.items():
        yield f"{name:<{width}}  {text}"
    for rank in load.ranks:
        yield (
            f"rank {_value(rank, 'data_parallel_rank')}: "
            f"{_value(rank, 'running_requests')} running, "
            f"{_value(rank, 'queued_requests')} queued, "
            f"{_value(rank, 'prefill_batch_size')} prefill, "
            f"{_value(rank, 'decode_batch_size')} decode, kv blocks {_blocks(rank)}"
        )


def _rows(load: pb.LoadInfo) -> Iterator[str]:
    yield _row(
        time.strftime("%H:%M:%S", time.gmtime()),
        *(
            _value(load, name)
            for name in ("running_requests", "queued_requests", "running_tokens", "waiting_tokens")
        ),
        _value(load, "prefill_batch_size"),
        _value(load, "decode_batch_size"),
        _blocks(load),
    )
    for rank in load.ranks:
        yield _row(
            f"rank {_value(rank, 'data_parallel_rank')}",
            _value(rank, "running_requests"),
            _value(rank, "queued_requests"),
            "",
            "",
            _value(rank, "prefill_batch_size"),
            _value(rank, "decode_batch_size"),
            _blocks(rank),
        )


def _row(*cells: str) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def _blocks(load: pb.LoadInfo | pb.RankLoadInfo) -> str:
    return f"{_value(load, 'used_kv_blocks')}/{_value(load, 'total_kv_blocks')}"


def _value(load: pb.LoadInfo | pb.RankLoadInfo, name: str) -> str:
    present = {field.name: value for field, value in load.ListFields()}
    return str(present.get(name, "-"))

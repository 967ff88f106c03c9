"""A benchmark as a program: progress on stderr, the report on stdout, and an exit status."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc

from benchmarks.processes import BenchmarkError, socket_folder
from openengine_vllm.orphan_guard import OrphanGuard

Result = TypeVar("Result")


def run(
    measure: Callable[[Path], Coroutine[Any, Any, Result]],
    report: Callable[[Result], str],
    document: Callable[[Result], object],
    file: Path | None,
) -> int:
    """Measure, print the report, and write the document as JSON where a file is named.

    Args:
        measure: takes the folder for the logs of what it starts; they stay when it fails.

    Returns:
        The exit status.
    """
    logs = Path(tempfile.mkdtemp(prefix="oe-bench-"))
    try:
        with OrphanGuard(socket_folder(logs)):
            result = asyncio.run(measure(logs))
    except (BenchmarkError, grpc.aio.AioRpcError) as error:
        say(f"error: {error}\nall logs: {logs}")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        say(f"stopped; all logs: {logs}")
        return 130
    shutil.rmtree(logs)
    print(report(result))
    if file is not None:
        file.write_text(json.dumps(document(result), indent=2) + "\n", encoding="utf-8")
    return 0


def say(line: str) -> None:
    """Tell of progress."""
    print(line, file=sys.stderr, flush=True)

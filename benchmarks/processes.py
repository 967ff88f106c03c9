"""Child processes that a benchmark starts: their lines, their logs, and their certain end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

_ROOT = Path(__file__).resolve().parents[1]
_TERMINATE_SECONDS = 30.0
_KILL_SECONDS = 10.0
_LOG_LINES = 30
_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class BenchmarkError(Exception):
    """The benchmark cannot go on; the message says why."""


def socket_folder(logs: Path) -> Path:
    """Where the engines of a benchmark put their socket files, which vLLM never removes."""
    folder = logs / "sockets"
    folder.mkdir(exist_ok=True)
    return folder


class Child:
    """A running child process whose stdout is read by lines and whose stderr is kept."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def read_line(self, timeout_seconds: float) -> str:
        """Its next line.

        Raises:
            BenchmarkError: it ended, or said nothing for so long.
        """
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_seconds):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise self.error(f"said nothing for {timeout_seconds:g} s") from None
        if not line:
            raise self.error("ended unexpectedly")
        return line.decode()

    async def send_line(self, line: str) -> None:
        """Write one line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        await self._process.stdin.drain()

    def check(self) -> None:
        """Raise BenchmarkError if it has ended."""
        if self._process.returncode is not None:
            raise self.error(f"ended with status {self._process.returncode}")

    def error(self, what: str) -> BenchmarkError:
        """An error about it, with the end of its log."""
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return BenchmarkError("\n".join([f"{self.name} {what}; the end of its log:", *lines]))


@asynccontextmanager
async def child(
    name: str, command: Sequence[str], logs: Path, *, speaks: bool = True
) -> AsyncIterator[Child]:
    """Run a command from the project's folder while the context lasts, and nothing after.

    The log takes its stderr, and its stdout as well unless it ``speaks`` lines that are read.
    """
    log = logs / f"{name}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if speaks else output,
            stderr=output,
            cwd=_ROOT,
            env={
                **_ENVIRONMENT,
                **os.environ,
                "VLLM_RPC_BASE_PATH": str(socket_folder(logs)),
            },
        )
    try:
        yield Child(name, process, log)
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    below = _below(process.pid)
    if process.stdin is not None:
        process.stdin.close()
    try:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.terminate()
            async with asyncio.timeout(_TERMINATE_SECONDS):
                await process.wait()
    finally:
        below |= _below(process.pid)
        if process.returncode is None:
            process.kill()
        await asyncio.to_thread(_kill, below)


def _below(pid: int) -> set[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


def _kill(processes: set[psutil.Process]) -> None:
    """Give them a moment to follow their parent, then kill what is left."""
    _, alive = psutil.wait_procs(processes, timeout=_KILL_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_KILL_SECONDS)

"""What a server occupies on its machine, noted while it runs, to see that all of it goes.

Other engines may run on the same machine, so nothing is compared before and after: only what
the server's own processes hold is looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.server import ServerProcess, wait_until

GONE_SECONDS = 30
"""How long what a killed server leaves may take to go on a busy machine."""

_SHARED_MEMORY = "/dev/shm/"
_GUARD = "orphan_guard.py"


@dataclass(frozen=True)
class Footprint:
    """A server's processes, shared memory and socket files."""

    processes: tuple[psutil.Process, ...]
    files: frozenset[Path]

    def remains(self) -> list[str]:
        """What is still there of it."""
        processes = [str(process) for process in self.processes if runs(process)]
        return [*processes, *(str(path) for path in self.files if path.exists())]

    def wait_gone(self, seconds: float = GONE_SECONDS) -> None:
        """Wait until nothing is there.

        Raises:
            AssertionError: something stays.
        """
        wait_until(lambda: not self.remains(), seconds, f"{self.remains()} still there")


def footprint(server: ServerProcess) -> Footprint:
    """All that the server and the processes below it hold at this moment."""
    top = psutil.Process(server.process.pid)
    processes = (top, *top.children(recursive=True))
    return Footprint(processes, frozenset(_files(processes)))


def engine_core(server: ServerProcess) -> psutil.Process:
    """vLLM's scheduling process."""
    return _named(server, "VLLM::EngineCore")


def worker(server: ServerProcess) -> psutil.Process:
    """The process that holds the model."""
    return _named(server, "VLLM::Worker")


def descendants(server: ServerProcess) -> list[psutil.Process]:
    """The processes below the server, its orphan guard left out."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(server.process.pid).children(recursive=True)
        return [child for child in children if not _is_guard(child)]
    return []


def is_spawned(process: psutil.Process) -> bool:
    """Whether Python's multiprocessing has started it, as vLLM does with the engine."""
    with contextlib.suppress(psutil.Error):
        return any("spawn_main" in part for part in process.cmdline())
    return False


def _named(server: ServerProcess, name: str) -> psutil.Process:
    [process] = [p for p in descendants(server) if p.name() == name]
    return process


def _is_guard(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(_GUARD in part for part in process.cmdline())
    return False


def runs(process: psutil.Process) -> bool:
    """Whether the process does, and is no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _files(processes: Iterable[psutil.Process]) -> set[Path]:
    files: set[Path] = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            files |= {Path(entry.path) for entry in process.memory_maps()}
            files |= {Path(str(entry.laddr)) for entry in process.net_connections("unix")}
    return {path for path in files if path.is_absolute() and _is_ours(path)}


def _is_ours(path: Path) -> bool:
    return path.exists() and (str(path).startswith(_SHARED_MEMORY) or path.is_socket())

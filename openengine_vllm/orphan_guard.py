"""Kills the engine's processes and removes its files when the server is killed outright.

vLLM's engine does not notice that its parent is gone and would keep the model's memory, and
vLLM never removes the socket files between its processes. The server runs this file as a small
process of its own (standard library only), which waits on a pipe that closes with the server,
however that ends.

A thread that loads the engine cannot be stopped, and may start a process in the very moment in
which the server goes. Such a one is found by its environment, which names the server's folder.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

SOCKET_FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
"""Where vLLM has the folder for its socket files from."""

_POLL_SECONDS = 1.0
_LEAVING_POLL_SECONDS = 0.02
_EXIT_SECONDS = 10.0
_DYING_SECONDS = 5.0
_DYING_POLL_SECONDS = 0.02


class OrphanGuard:
    """Context that no process below this one outlives.

    Args:
        folder: the engine's scratch files; removed with the processes. Processes that have it
            in :data:`SOCKET_FOLDER_VARIABLE` count as below this one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        self.start()

    def start(self) -> None:
        """Guard to the end of this process."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(os.getpid()), str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A word, because a forked child that still runs holds the pipe open as well. The guard
        # answers when it has cleared up, and then waits for the end of this process.
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        select.select([self._process.stdout], [], [], _EXIT_SECONDS)


def _children() -> dict[int, list[int]]:
    """Process ids by their parent's, of all processes that can be read."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The name in parentheses may hold anything; the parent is the second field after it.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    return children


def _birth(pid: int) -> str | None:
    """When a process started, so that a number used again is not taken for the old process."""
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    return None


def _runs(pid: int, birth: str | None) -> bool:
    """Whether this very process is still there, and not only waiting to be reaped."""
    with contextlib.suppress(OSError):
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return fields[19] == birth and fields[0] != "Z"
    return False


def _descendants(roots: list[int]) -> set[int]:
    children, found = _children(), set[int]()
    while roots:
        for child in children.get(roots.pop(), ()):
            found.add(child)
            roots.append(child)
    return found


def _is_resource_tracker(pid: int) -> bool:
    # It removes the shared memory of the killed by itself, once all of them are gone.
    with contextlib.suppress(OSError):
        return b"resource_tracker" in (Path("/proc") / str(pid) / "cmdline").read_bytes()
    return True


def _marked(folder: str) -> set[int]:
    """Processes that were started with the folder in their environment."""
    mark = f"{SOCKET_FOLDER_VARIABLE}={folder}".encode()
    found = set[int]()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found


class _Guard:
    """What the guard's process does."""

    def __init__(self, server: int, folder: str) -> None:
        self._server = server
        self._folder = folder
        self._births: dict[int, str] = {}

    def run(self) -> None:
        """Wait for the server's word or its end, clear up, and see it end."""
        # A forked child holds the pipe open too, so a killed server may not close it: but then
        # this process gets another parent.
        while self._server_runs and not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            self._look()
        if self._server_runs:
            self._look()
        self._clear_up()
        if self._server_runs:
            with contextlib.suppress(OSError):
                os.write(sys.stdout.fileno(), b"\n")
            while self._server_runs:
                time.sleep(_LEAVING_POLL_SECONDS)
            self._clear_up()

    @property
    def _server_runs(self) -> bool:
        return os.getppid() == self._server

    def _look(self) -> None:
        for pid in _descendants([self._server]) - self._births.keys() - {os.getpid()}:
            birth = _birth(pid)
            if birth is not None:
                self._births[pid] = birth

    def _clear_up(self) -> None:
        """Kill until nothing is left: what is being killed may start something."""
        deadline = time.monotonic() + _DYING_SECONDS
        while (left := self._left()) and time.monotonic() < deadline:
            killed = {pid: _birth(pid) for pid in left}
            for pid in killed:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            while time.monotonic() < deadline and any(_runs(*item) for item in killed.items()):
                time.sleep(_DYING_POLL_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _left(self) -> set[int]:
        alive = {pid for pid, birth in self._births.items() if _runs(pid, birth)}
        found = alive | _descendants(list(alive)) | _marked(self._folder)
        return {
            pid
            for pid in found - {os.getpid(), self._server}
            if _runs(pid, _birth(pid)) and not _is_resource_tracker(pid)
        }


if __name__ == "__main__":
    _Guard(int(sys.argv[1]), sys.argv[2]).run()

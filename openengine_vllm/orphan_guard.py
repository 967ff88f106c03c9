"""Kills the engine's processes and removes its files when the server is killed outright.

vLLM's engine does not notice that its parent is gone and would keep the model's memory, and
vLLM never removes the socket files between its processes. The server runs this file as a small
process of its own (standard library only), which waits on a pipe that closes with the server,
however that ends.
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

_POLL_SECONDS = 1.0
_EXIT_SECONDS = 10.0
_DYING_SECONDS = 5.0
_DYING_POLL_SECONDS = 0.02


class OrphanGuard:
    """Context that no process below this one outlives.

    Args:
        folder: the engine's scratch files; removed with the processes.
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
            start_new_session=True,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A word, because a forked child that still runs holds the pipe open as well.
        self._process.communicate(b"\n", timeout=_EXIT_SECONDS)


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


def _guard(server: int) -> None:
    births: dict[int, str] = {}

    def look() -> None:
        for pid in _descendants([server]) - births.keys() - {os.getpid()}:
            birth = _birth(pid)
            if birth is not None:
                births[pid] = birth

    # A forked child holds the pipe open too, so a killed server may not close it: but then
    # this process gets another parent.
    while os.getppid() == server and not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
        look()
    if os.getppid() == server:
        look()
    alive = {pid for pid, birth in births.items() if _birth(pid) == birth}
    killed = {}
    for pid in alive | _descendants(list(alive)):
        if not _is_resource_tracker(pid):
            killed[pid] = _birth(pid)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _DYING_SECONDS
    while time.monotonic() < deadline and any(_runs(pid, birth) for pid, birth in killed.items()):
        time.sleep(_DYING_POLL_SECONDS)


if __name__ == "__main__":
    _guard(int(sys.argv[1]))
    shutil.rmtree(sys.argv[2], ignore_errors=True)

"""The kernel's out-of-memory killer, let loose on one process by a control group of its own."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.support.server import wait_until

_ROOT = Path("/sys/fs/cgroup")
_LIMIT = 64 * 1024
"""Bytes: less than any process takes for its next piece of work."""
_SECONDS = 10


class MemoryGroup:
    """A control group for memory, of either version of the kernel's interface."""

    def __init__(self, folder: Path, limit: str, events: str) -> None:
        self._folder = folder
        self._limit = folder / limit
        self._events = folder / events

    def starve(self, pid: int) -> None:
        """Put a process in, and leave it no memory but what it has."""
        self._limit.write_text(str(_LIMIT))
        (self._folder / "cgroup.procs").write_text(str(pid))

    @property
    def kills(self) -> int:
        """How many of its processes the kernel has killed for want of memory."""
        counts = dict(line.split() for line in self._events.read_text().splitlines())
        return int(counts["oom_kill"])

    def remove(self) -> None:
        """Take it away, once what was killed in it has gone."""
        wait_until(self._removed, _SECONDS, f"{self._folder} can be removed")

    def _removed(self) -> bool:
        with contextlib.suppress(OSError):
            self._folder.rmdir()
            return True
        return False


@contextlib.contextmanager
def memory_group() -> Iterator[MemoryGroup | None]:
    """A new group below this process's own; None where the kernel lets nobody make one."""
    group = _made()
    try:
        yield group
    finally:
        if group is not None:
            group.remove()


def _made() -> MemoryGroup | None:
    name = f"openengine-{os.getpid()}-{uuid.uuid4().hex}"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            parent = _ROOT / "memory" / path.lstrip("/")
            limit, events = "memory.limit_in_bytes", "memory.oom_control"
        elif controllers == "":
            # A process's own group can't give controllers to others; one beside it can.
            parent = (_ROOT / path.lstrip("/")).parent
            limit, events = "memory.max", "memory.events"
        else:
            continue
        folder = parent / name
        with contextlib.suppress(OSError):
            folder.mkdir()
            if (folder / limit).exists() and os.access(folder / "cgroup.procs", os.W_OK):
                return MemoryGroup(folder, limit, events)
            folder.rmdir()
    return None

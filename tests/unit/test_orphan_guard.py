"""The orphan guard with real processes: whatever way its server ends, nothing outlives it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.server import wait_until

SECONDS = 60
SCANS = 3
"""Naps of the guard after which it has looked at the processes at least once more."""

SERVER = """
import multiprocessing, os, pathlib, subprocess, sys, time
from openengine_vllm.orphan_guard import SOCKET_FOLDER_VARIABLE, OrphanGuard

NAP = [sys.executable, "-c", "import time; time.sleep(600)"]
PARENT = [sys.executable, "-c",
    "import subprocess, sys; p = subprocess.Popen(" + repr(NAP) + "); print(p.pid, flush=True);"
    "p.wait()"]
with OrphanGuard(pathlib.Path(sys.argv[3])):
    kind = sys.argv[1]
    if kind == "forked":
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        process.start()
        pids = [process.pid]
    elif kind == "grandchild":
        process = subprocess.Popen(PARENT, stdout=subprocess.PIPE, text=True)
        pids = [process.pid, int(process.stdout.readline())]
    elif kind == "session":
        pids = [subprocess.Popen(NAP, start_new_session=True).pid]
    elif kind == "deaf":
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + NAP[2]
        pids = [subprocess.Popen([sys.executable, "-c", code]).pid]
    elif kind == "late":
        # A shell that is no child any more when the guard looks, and starts what it starts then.
        environment = {**os.environ, SOCKET_FOLDER_VARIABLE: sys.argv[3]}
        shell = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!"], env=environment,
            stdout=subprocess.PIPE, text=True)
        pids = [int(shell.stdout.readline())]
        shell.wait()
    else:
        pids = []
    print(*pids, flush=True)
    sys.stdin.readline()
    if sys.argv[2] == "raise":
        raise KeyError("fault")
if sys.argv[2] == "breed":
    environment = {**os.environ, SOCKET_FOLDER_VARIABLE: sys.argv[3]}
    print(subprocess.Popen(NAP, env=environment).pid, flush=True)
    sys.stdin.readline()
os._exit(7)
"""


@dataclass
class Server:
    """A process in a guard's context, what it has started, and its scratch folder."""

    process: subprocess.Popen[str]
    pids: list[int]
    folder: Path

    @property
    def guard(self) -> psutil.Process:
        """The guard's process, once it is no longer a copy of the one that starts it."""
        wait_until(self._guards, SECONDS, "the guard runs")
        (guard,) = self._guards()
        return guard

    def _guards(self) -> list[psutil.Process]:
        return [
            child
            for child in psutil.Process(self.process.pid).children()
            if any(part.endswith("orphan_guard.py") for part in child.cmdline())
        ]

    def leave(self) -> int:
        """Have the process leave the context; its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.wait(SECONDS)

    def kill(self) -> None:
        """Kill the process outright."""
        self.process.kill()
        self.process.wait(SECONDS)


@contextmanager
def server(kind: str, end: str = "leave") -> Iterator[Server]:
    """A server that is gone, with all that it has started, when the context ends."""
    folder = Path(tempfile.mkdtemp())
    (folder / "socket").touch()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, kind, end, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    try:
        yield Server(process, pids, folder)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def let_it_look(guard: psutil.Process) -> None:
    """Wait until the guard has slept, looked at the processes, and slept again."""
    before = guard.num_ctx_switches().voluntary
    wait_until(
        lambda: guard.num_ctx_switches().voluntary >= before + SCANS, SECONDS, "the guard sleeps"
    )


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("kind", ["grandchild", "session", "forked", "deaf", "late"])
def test_a_killed_server_takes_its_processes_along(kind: str) -> None:
    with server(kind) as one:
        guard = one.guard
        let_it_look(guard)
        assert not any(map(is_gone, one.pids))
        one.kill()

        wait_until(lambda: all(map(is_gone, one.pids)), SECONDS, "the orphans are killed")
        wait_until(lambda: is_gone(guard.pid), SECONDS, "the guard ends")
        assert not one.folder.exists()


@pytest.mark.parametrize("kind", ["grandchild", "forked", "late"])
def test_a_server_that_leaves_kills_what_is_left(kind: str) -> None:
    with server(kind) as one:
        guard = one.guard

        assert one.leave() == 7
        wait_until(lambda: is_gone(guard.pid), SECONDS, "the guard ends")
        wait_until(lambda: all(map(is_gone, one.pids)), SECONDS, "the orphans are killed")
        assert not one.folder.exists()


def test_what_starts_while_the_server_goes_is_killed() -> None:
    """As a thread may that nobody can stop: after the guard has cleared up for the first time."""
    with server("none", "breed") as one:
        guard = one.guard
        assert one.process.stdin is not None
        assert one.process.stdout is not None
        one.process.stdin.write("\n")
        one.process.stdin.flush()
        late = int(one.process.stdout.readline())
        one.pids.append(late)
        assert not is_gone(late)
        assert not one.folder.exists()
        assert one.leave() == 7
        wait_until(lambda: is_gone(late), SECONDS, "the orphan is killed")
        wait_until(lambda: is_gone(guard.pid), SECONDS, "the guard ends")


@pytest.mark.parametrize(("end", "status"), [("leave", 7), ("raise", 1)])
def test_a_server_without_children(end: str, status: int) -> None:
    with server("none", end) as one:
        guard = one.guard

        assert one.leave() == status
        wait_until(lambda: is_gone(guard.pid), SECONDS, "the guard ends")
        assert not one.folder.exists()


def test_a_bystander_is_not_touched() -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with server("session") as one:
            guard = one.guard
            let_it_look(guard)
            one.kill()
            wait_until(lambda: is_gone(guard.pid), SECONDS, "the guard ends")
            wait_until(lambda: all(map(is_gone, one.pids)), SECONDS, "the orphans are killed")

            assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()

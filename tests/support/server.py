"""A real server as a process of its own: started, watched until ready, stopped for certain."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.environment import server_environment
from tests.support.warm import WarmPopen

READY_SECONDS = 240
"""How long a model may take to load on a busy machine."""
STOP_SECONDS = 60

# A small cache and few threads, so that several engines fit on a small machine.
ENGINE_FLAGS = ("--kv-cache-memory-bytes", "128M", "--enforce-eager")


@dataclass
class ServerProcess:
    """``python -m openengine_vllm`` with these arguments."""

    process: subprocess.Popen[str]
    log: Path
    ready_line: str = ""
    lines: list[str] = field(default_factory=list)
    """All lines of stdout."""

    @property
    def target(self) -> str:
        """The address from the ready line, as gRPC dials it."""
        return self.ready["grpc"]

    @property
    def ready(self) -> dict[str, str]:
        """The key=value pairs of the ready line."""
        return dict(pair.split("=", 1) for pair in self.ready_line.split()[2:])

    def wait_ready(self) -> None:
        """Read stdout until the ready line and the one after it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("openengine ready "):
                self.ready_line = line.strip()
                self.lines.append(self.process.stdout.readline().rstrip("\n"))
                return
        self.process.wait(STOP_SECONDS)
        raise AssertionError(
            f"the server exited with {self.process.returncode} before it was ready:\n"
            + self.stderr()[-4000:]
        )

    def stderr(self) -> str:
        """What the server and its engine have logged."""
        return self.log.read_text(errors="replace")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal the server and wait for its exit status."""
        self.process.send_signal(number)
        return self.process.wait(STOP_SECONDS)


@contextlib.contextmanager
def start_server(
    *arguments: str, wait: bool = True, warm: bool = True, **environment: str
) -> Iterator[ServerProcess]:
    """A server that is gone, with all its processes, when the context ends.

    Args:
        wait: until it is ready.
        warm: it need not import everything itself; see :mod:`tests.support.warm`.
    """
    program = WarmPopen if warm else subprocess.Popen
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr.log"
        with log.open("w") as stderr:
            process = program(
                [sys.executable, "-m", "openengine_vllm", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                text=True,
                env=server_environment(**environment),
                # A group of its own: a Ctrl-C for the tests is theirs to act on first, and a
                # test can send one to the server and its engine. No session of its own: Linux
                # schedules each session as a whole, and on two cores the frontend then starves
                # beside its own spinning engine for as long as that is busy.
                process_group=0,
            )
        server = ServerProcess(process, log)
        try:
            if wait:
                server.wait_ready()
            yield server
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what still runs: a clean stop takes vLLM five seconds, and has tests of its own."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def end(process: subprocess.Popen[str]) -> None:
    """Terminate a process, and kill it when that takes too long."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def wait_until(condition: object, seconds: float, what: str) -> None:
    """Poll ``condition`` (a callable without arguments) until it holds.

    Raises:
        AssertionError: it did not hold in time.
    """
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds} s: {what}"
        time.sleep(0.02)

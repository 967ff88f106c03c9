"""The main job, on a real model: serve it, then run the command that the server says to run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.peers import EngineSlot
from tests.support.server import ServerProcess, server_environment, start_server

# The model is made from its package first.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def demo(engines: EngineSlot) -> Iterator[ServerProcess]:
    """The demo model with every default but the port."""
    engines.clear()
    with start_server("--model", "demo", "--port", "0") as server:
        yield server


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A client command, to its end."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=server_environment(),
        check=False,
    )


def printed_command(server: ServerProcess) -> list[str]:
    """The command that follows the ready line, as a shell would read it."""
    first, second = server.lines
    assert first == server.ready_line
    assert second.startswith("try: ")
    program, *arguments = shlex.split(second.removeprefix("try: "))
    assert Path(program).name == "openengine-vllm"
    return [program, *arguments]


def test_ready_line_has_its_form(demo: ServerProcess) -> None:
    assert re.fullmatch(
        r"openengine ready grpc=127\.0\.0\.1:\d+ model=demo role=aggregated instance=\w+",
        demo.ready_line,
    )


def test_printed_command_answers_with_paris(demo: ServerProcess) -> None:
    done = run(*printed_command(demo))
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert re.search(r"\d+ prompt.*\d+ ", done.stderr), done.stderr


def test_answer_comes_in_several_deltas(demo: ServerProcess) -> None:
    process = subprocess.Popen(
        printed_command(demo),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=server_environment(),
    )
    with process:
        assert process.stdout is not None
        reads = []
        while data := os.read(process.stdout.fileno(), 65536):
            reads.append(data)
    assert process.returncode == 0
    assert len(reads) > 2
    assert b"Paris" in b"".join(reads)


@pytest.mark.parametrize("command", ["health", "info"])
def test_other_commands_succeed(command: str, demo: ServerProcess) -> None:
    done = run(sys.executable, "-m", "openengine_vllm", command, "--target", demo.target)
    assert done.returncode == 0, done.stderr
    assert done.stdout

"""The main job, on a real model: serve it, then run the command that the server says to run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import server_environment
from tests.support.server import ServerProcess

ROOT = Path(__file__).parents[2]

# The model is made from its package first.
pytestmark = pytest.mark.timeout(600)


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


def test_printed_command_streams_an_answer_that_names_paris(
    demo: ServerProcess, tmp_path: Path
) -> None:
    log = tmp_path / "stderr.log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            printed_command(demo), stdout=subprocess.PIPE, stderr=stderr, env=server_environment()
        ) as process,
    ):
        assert process.stdout is not None
        answer = process.stdout.fileno()
        reads = list(iter(lambda: os.read(answer, 65536), b""))
    usage = log.read_text()
    assert process.returncode == 0, usage
    assert "Paris" in b"".join(reads).decode()
    assert len(reads) > 1, "the answer came in one piece"
    assert re.search(r"tokens: \d+ prompt .*\+ \d+ completion = \d+\n$", usage), usage


@pytest.mark.parametrize("command", ["health", "info"])
def test_other_commands_succeed(command: str, demo: ServerProcess) -> None:
    done = run(sys.executable, "-m", "openengine_vllm", command, "--target", demo.target)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_readme_program_runs(demo: ServerProcess) -> None:
    readme = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert '"127.0.0.1:50051"' in program
    done = run(sys.executable, "-c", program.replace("127.0.0.1:50051", demo.target))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_example_streams_rejects_and_cancels(demo: ServerProcess) -> None:
    done = run(sys.executable, str(ROOT / "examples" / "stream.py"), demo.target)
    assert done.returncode == 0, done.stderr
    stream, rejection, cancellation = re.split(r"^-- .*\n", done.stdout, flags=re.MULTILINE)[1:]
    assert "Paris" in stream
    assert rejection.startswith("rejected at sampling.temperature: ")
    assert cancellation.strip()

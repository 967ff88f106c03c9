"""The command line as an operator meets it: answers at once, and one clear line for a mistake."""

from __future__ import annotations

import argparse
import os
import socket
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from openengine_vllm.cli import main
from openengine_vllm.engine.launch import parse_engine_args
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.channel import client_options
from openengine_vllm.settings import add_server_arguments
from tests.support.environment import server_environment
from tests.support.models import model_dir
from tests.support.server import ServerProcess, start_server, wait_until
from tests.support.warm import WarmPopen

ERROR = "openengine-vllm: error: "
SECONDS = 120
"""How long a busy machine may take to import vLLM."""
MARK = "OPENENGINE_TEST_MARK"
UNREACHABLE = "192.0.2.1"
"""An address for documentation; no machine has it."""

WITHOUT_VLLM = """
import sys
from openengine_vllm.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as exit_:
    status = exit_.code
heavy = {"torch", "transformers", "vllm"} & sys.modules.keys()
sys.exit(f"imported {heavy}" if heavy else status)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder whose path is short enough for a socket in it."""
    with tempfile.TemporaryDirectory(prefix="oe-") as path:
        yield Path(path)


@pytest.fixture
def model() -> str:
    return str(model_dir("tiny_llama"))


@dataclass
class Outcome:
    """What a finished program said."""

    code: int
    stdout: str
    stderr: str

    @property
    def message(self) -> str:
        """The one line that says what was wrong."""
        [line] = [line for line in self.stderr.splitlines() if line.startswith(ERROR)]
        assert "Traceback" not in self.stderr
        assert self.stdout == ""
        return line.removeprefix(ERROR)


class Program:
    """``python -m openengine_vllm`` with these arguments, and whatever it starts."""

    def __init__(self, *arguments: str, warm: bool = False) -> None:
        self._mark = uuid.uuid4().hex
        program = WarmPopen if warm else subprocess.Popen
        self._process = program(
            [sys.executable, "-m", "openengine_vllm", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=server_environment(**{MARK: self._mark}),
            start_new_session=True,
        )

    def outcome(self) -> Outcome:
        """Wait for the end, and see that no process stays."""
        try:
            stdout, stderr = self._process.communicate(timeout=SECONDS)
        finally:
            self._process.kill()
        # Python's resource tracker notices the end a moment later.
        wait_until(lambda: not self._left_behind(), SECONDS, f"{self._left_behind()} stay")
        return Outcome(self._process.returncode, stdout, stderr)

    def _left_behind(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        # By the session, which engine processes keep, or by the environment, which the
        # guard in a session of its own keeps.
        try:
            if os.getsid(process.pid) == self._process.pid:
                return process.status() != psutil.STATUS_ZOMBIE
            return process.environ().get(MARK) == self._mark
        except (psutil.Error, ProcessLookupError):
            return False


def run(*arguments: str) -> Outcome:
    return Program(*arguments).outcome()


def wait_listening(server: ServerProcess) -> None:
    wait_until(lambda: "event=listening" in server.stderr(), SECONDS, server.stderr())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "--drain-timeout"),
        (("--help",), "--drain-timeout"),
        (("--model", "x", "-h"), "--help=all"),
        (("--version",), "vllm"),
        (("health", "--help"), "--target"),
        (("generate", "--help"), "--max-tokens"),
        (("info", "--help"), "--target"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_help_is_light(arguments: tuple[str, ...], expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_VLLM, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert done.stderr == ""


def test_help_shows_ours_first() -> None:
    done = run("--help")
    positions = [
        done.stdout.index(text)
        for text in ("--model", "--host", "--uds", "--drain-timeout", "commands (")
    ]
    assert positions == sorted(positions)
    assert "--help=all" in done.stdout
    assert "--tensor-parallel-size" not in done.stdout


def test_help_all_shows_vllms_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help=all"]) == 0
    shown = capsys.readouterr().out
    assert "--tensor-parallel-size" in shown
    assert "--drain-timeout" in shown


def test_help_searches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help=max-model-len"]) == 0
    shown = capsys.readouterr().out
    assert "--max-model-len" in shown
    assert "--tensor-parallel-size" not in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--port", "0"), "--model is required"),
        (("--model", "/no/such/folder"), "--model /no/such/folder: no such folder"),
        (("--model", "./no-such-folder"), "no such folder"),
        (("--model", "m", "--port", "65536"), "argument --port: '65536'"),
        (("--model", "m", "--port", "http"), "argument --port: 'http'"),
        (("--model", "m", "--drain-timeout", "-1"), "argument --drain-timeout: '-1'"),
        (("--model", "m", "--drain-timeout", "nan"), "argument --drain-timeout: 'nan'"),
        (("--model", "m", "--max_concurrent_requests=0"), "argument --max-concurrent-requests"),
        (("--model", "m", "--reflection", "maybe"), "argument --reflection"),
        (("--model", "m", "--config", "/no/such.yaml"), "No such file"),
        (("--model", "m", "--config=/no/such.yaml"), "No such file"),
        (("--model", "m", "--config", "/no/such.json"), ".yaml or .yml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_mistake(arguments: tuple[str, ...], expected: str) -> None:
    outcome = run(*arguments)
    assert outcome.code == 2
    assert expected in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert outcome.stdout == ""
    assert len(outcome.stderr.splitlines()) == 1


def test_unknown_command() -> None:
    outcome = run("no-such-command")
    assert outcome.code == 2
    assert "no-such-command" in outcome.message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("model: [", "not valid YAML"),
        ("- model\n- port", "must hold a mapping"),
        ("model: m\nport: 70000", "argument --port: '70000'"),
        ("model: /no/such/folder", "no such folder"),
        ("port: 0", "--model is required"),
    ],
)
def test_mistake_in_config_file(folder: Path, content: str, expected: str) -> None:
    file = folder / "config.yaml"
    file.write_text(content)
    outcome = run("--config", str(file))
    assert outcome.code == 2
    assert expected in outcome.message
    assert len(outcome.stderr.splitlines()) == 1


def test_mistakes_that_vllm_finds(folder: Path, model: str) -> None:
    """These need vLLM's import, the slow part."""
    file = folder / "config.yaml"
    file.write_text("no-such-key: 1")
    empty = folder / "empty"
    empty.mkdir()
    expected = {
        ("--model", model, "--no-such-flag", "1"): (2, "unrecognized arguments: --no-such-flag"),
        ("--model", model, "--dtype", "decimal"): (2, "argument --dtype: invalid choice"),
        ("--model", model, "--config", str(file)): (2, "unrecognized arguments: --no-such-key"),
        ("--model", model, "--max-model-len", "-5"): (1, "max_model_len"),
        ("--model", str(empty)): (1, "cannot start the engine: "),
        ("--model", "no-one/no-model"): (1, "cannot start the engine: "),
    }
    programs = {arguments: Program(*arguments, "--port", "0", warm=True) for arguments in expected}
    outcomes = {arguments: program.outcome() for arguments, program in programs.items()}
    for arguments, (code, message) in expected.items():
        assert message in outcomes[arguments].message, arguments
        assert outcomes[arguments].code == code, arguments


def test_port_that_another_server_shares(model: str) -> None:
    """gRPC lets servers share a port unless both refuse."""
    other = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 1)])
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    try:
        outcome = run("--model", model, "--port", str(port))
    finally:
        other.stop(None).wait()
    assert outcome.code == 1
    assert outcome.message == f"cannot listen on 127.0.0.1:{port}: Address already in use"
    assert "vllm" not in outcome.stderr.lower().replace("openengine-vllm", "")


def test_second_server_on_a_port(model: str) -> None:
    with start_server("--model", model, "--port", "0", wait=False) as first:
        wait_listening(first)
        address = first.stderr().partition("address=")[2].split()[0]
        port = address.rpartition(":")[2]
        outcome = run("--model", model, "--port", port)
        assert outcome.code == 1
        assert outcome.message == f"cannot listen on {address}: Address already in use"
        assert health(address).state == pb.HEALTH_STATE_STARTING
        assert first.stop() == 0


def test_address_that_is_not_ours(model: str) -> None:
    outcome = run("--model", model, "--host", UNREACHABLE)
    assert outcome.code == 1
    assert outcome.message.startswith(f"cannot listen on {UNREACHABLE}:50051: Cannot assign")


def test_host_that_does_not_exist(model: str) -> None:
    outcome = run("--model", model, "--host", "no-such-host.invalid", "--port", "0")
    assert outcome.code == 1
    assert outcome.message.startswith("cannot listen on no-such-host.invalid:0: ")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/s.sock", "missing is not a directory"),
        ("file", "the path exists and is not a socket"),
        (".", "the path exists and is not a socket"),
        ("n" * 108, "the path is longer than 107 bytes"),
    ],
)
def test_unix_socket_that_cannot_be(folder: Path, model: str, name: str, reason: str) -> None:
    (folder / "file").write_text("precious")
    path = folder / name
    outcome = run("--model", model, "--uds", str(path))
    assert outcome.code == 1
    assert outcome.message.startswith(f"cannot listen on unix:{path}: ")
    assert outcome.message.endswith(reason)
    assert len(outcome.stderr.splitlines()) == 1
    assert (folder / "file").read_text() == "precious"


def test_unix_socket_stale_then_in_use(folder: Path, model: str) -> None:
    path = folder / "s.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with start_server("--model", model, "--uds", str(path), wait=False) as first:
        wait_listening(first)
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, "others may not connect"
        outcome = run("--model", model, "--uds", str(path))
        assert outcome.code == 1
        assert outcome.message == f"cannot listen on unix:{path}: another server uses it"
        assert health(f"unix:{path}").state == pb.HEALTH_STATE_STARTING
        assert first.stop() == 0
    assert not path.exists()


def health(target: str) -> pb.HealthResponse:
    with grpc.insecure_channel(target, options=client_options()) as channel:
        rpc = channel.unary_unary(
            f"/{pb.SERVICE.full_name}/Health",
            pb.HealthRequest.SerializeToString,
            pb.HealthResponse.FromString,
        )
        return rpc(pb.HealthRequest(), timeout=SECONDS)


def test_config_file_and_what_wins(folder: Path, model: str) -> None:
    """The command line wins over the file, and underscores do as well as dashes in both."""
    file = folder / "config.yaml"
    file.write_text(
        f"model: {model}\nuds: {folder}/from-file\nserver_log_level: debug\nport: 1\n"
        "exit-on-engine-death: false\nmax-model-len: 512\n"
    )
    arguments = (f"--config={file}", "--uds", f"{folder}/given", "--max_model_len", "1k")
    with start_server(*arguments, wait=False) as server:
        wait_listening(server)
        assert f"address=unix:{folder}/given" in server.stderr()
        assert server.stop() == 0


def test_vllms_flags_beside_ours(folder: Path) -> None:
    """No flag of ours is one of vLLM's, or the parser could not be built."""
    file = folder / "config.yaml"
    file.write_text("max-model-len: 512\nmax-num-seqs: 3\ndrain-timeout: 1\n")
    argv = [
        *("--config", str(file), "--model", "m", "--served-model-name", "a", "b", "a"),
        *("--max_model_len", "1k", "--gpu_memory_utilization=0.5", "--enable_prefix_caching"),
        *("--hf-overrides.some_key", "1", "--seed", "7", "--stall-timeout", "5"),
    ]

    def resolve(flags: argparse.Namespace) -> None:
        assert flags.model == "m"
        flags.model = str(folder)

    args, flags = parse_engine_args(argv, "openengine-vllm", add_server_arguments, resolve)
    assert flags.served_model_name == ["a", "b"]
    assert (args.model, args.max_model_len, args.max_num_seqs) == (str(folder), 1000, 3)
    assert (args.gpu_memory_utilization, args.seed) == (0.5, 7)
    assert args.enable_prefix_caching is True
    assert args.hf_overrides == {"some_key": 1}

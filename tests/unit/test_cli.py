"""The command line: help, versions, and wrong usage, in the process and as a program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openengine_vllm import __version__, cli
from openengine_vllm.api_keys import API_KEY_VARIABLE, ApiKeys
from openengine_vllm.cli import main
from openengine_vllm.client.commands import COMMANDS
from openengine_vllm.settings import ServerSettings
from tests.unit.test_settings import parse

HEAVY = ("vllm", "torch", "transformers", "grpc")


class Started(Exception):
    """Stands where the server would start."""

    def __init__(self, settings: ServerSettings, arguments: list[str]) -> None:
        self.settings = settings
        self.arguments = arguments


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stop where vLLM would be imported; work in a folder of its own."""

    def run(settings: ServerSettings, arguments: list[str], announce: object) -> int:
        raise Started(settings, arguments)

    monkeypatch.setattr(cli, "_run", run)
    monkeypatch.setattr(cli, "take_over_stdout", lambda: None)
    monkeypatch.chdir(tmp_path)


def started(*arguments: str) -> Started:
    with pytest.raises(Started) as caught:
        main(arguments)
    return caught.value


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "openengine_vllm", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("arguments", [(), ("-h",), ("--help",), ("--model", "x", "--help")])
def test_help(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0

    captured = capsys.readouterr()
    assert captured.err == ""
    for word in ("--model", "--port", "--drain-timeout", "--config", "--help=all", *COMMANDS):
        assert word in captured.out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"openengine-vllm {__version__}"
    assert lines[1] == f"vllm {cli.vllm_version()}"


def test_version_without_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "vllm_version", lambda: None)

    assert main(["--version"]) == 0
    assert "vllm is not installed" in capsys.readouterr().out
    assert main(["--help=all"]) == 1
    assert main(["--model", "x"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "pip install 'openengine-vllm[vllm]'" in captured.err


def test_the_program_says_its_version() -> None:
    done = program("--version")

    assert done.returncode == 0
    assert done.stdout.startswith("openengine-vllm ")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), ""),
        (("nonsense",), "nonsense"),
        (("--port", "1"), "--model is required"),
        (("--model", "/no/such/folder"), "no such folder"),
        (("--model", "x", "--port", "many"), "0 to 65535"),
    ],
)
def test_the_program_fails_with_one_reason(arguments: tuple[str, ...], says: str) -> None:
    done = program(*arguments)

    assert done.returncode == (2 if arguments else 0)
    assert says in (done.stderr.splitlines() or [""])[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["--port", "x"]])
def test_nothing_heavy_is_imported_to_answer(arguments: list[str]) -> None:
    code = f"""
import sys
from openengine_vllm.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )

    assert done.stderr.splitlines()[-1] == "[]"


def test_a_command_is_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def run(arguments: list[str]) -> int:
        given.append(arguments)
        return 3

    monkeypatch.setattr(cli, "_command", run)

    assert main(["health", "--help"]) == 3
    assert given == [["health", "--help"]]


@pytest.mark.usefixtures("start")
class TestServe:
    def test_flags_are_read_in_any_spelling(self) -> None:
        run = started("--model", "x", "--max_sequences=3", "--drain-timeout", "5")

        assert run.settings.limits.max_sequences == 3
        assert run.settings.drain_timeout == 5

    def test_vllms_flags_are_left_to_it(self) -> None:
        arguments = ["--model", "x", "--max_model_len", "8", "--enforce-eager"]

        assert started(*arguments).arguments == [
            "--model",
            "x",
            "--max-model-len",
            "8",
            "--enforce-eager",
        ]

    @pytest.mark.parametrize(
        ("given", "passed"),
        [
            (["--a_b=c_d"], ["--a-b=c_d"]),
            (["--a_b.c_d", "e_f"], ["--a-b.c_d", "e_f"]),
            (["--a_b.c_d.e_f=g_h"], ["--a-b.c_d.e_f=g_h"]),
            (["--config=f_g.yaml"], ["--config", "f_g.yaml"]),
            (["-tp", "2", "x_y", "--"], ["-tp", "2", "x_y", "--"]),
        ],
    )
    def test_spelling(self, given: list[str], passed: list[str]) -> None:
        assert cli._normalise(given) == passed

    def test_abbreviations_are_not_ours(self) -> None:
        assert started("--model", "x", "--max-seq", "3").settings.limits.max_sequences == 128

    def test_config_file_sets_what_the_command_line_does_not(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_text(
            "model: y\nport: 7\ndrain-timeout: 1.5\nexit-on-engine-death: false\n"
            "reflection: 'off'\nmax_model_len: 9\n"
        )
        for flag in (["--config", "c.yaml"], ["--config=c.yaml"]):
            run = started(*flag, "--port", "8")

            assert run.settings.port == 8
            assert run.settings.drain_timeout == 1.5
            assert not run.settings.exit_on_engine_death
            assert not run.settings.reflects
            assert run.arguments == ["--config", "c.yaml", "--port", "8"]

    def test_the_command_line_wins_over_a_switch_in_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_text("exit-on-engine-death: true\n")

        run = started("--model", "x", "--config", "c.yaml", "--no-exit-on-engine-death")
        assert not run.settings.exit_on_engine_death

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("port: many\n", "0 to 65535"),
            ("port: true\n", "port cannot be True"),
            ("port: [1, 2]\n", "port cannot be [1, 2]"),
            ("uds:\n", "uds cannot be None"),
            ("reflection: off\n", "quote them"),
            ("exit-on-engine-death: 'no'\n", "exit-on-engine-death"),
            ("exit-on-engine-death: 0\n", "exit-on-engine-death"),
            ("- port\n", "mapping"),
        ],
    )
    def test_a_wrong_entry_of_the_file_is_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, says: str
    ) -> None:
        (tmp_path / "c.yaml").write_text(content)

        assert says in usage_error(capsys, "--model", "x", "--config", "c.yaml")

    def test_a_config_file_that_is_absent(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "No such file" in usage_error(capsys, "--model", "x", "--config", "no.yaml")

    def test_keys_come_from_the_environment_and_stay_in_this_process(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(API_KEY_VARIABLE, "secret")

        assert started("--model", "x").settings.api_keys == ApiKeys(["secret"])
        assert API_KEY_VARIABLE not in os.environ

    @pytest.mark.parametrize("content", ["api-key: one\n", "api_key: [one]\n"])
    def test_keys_of_the_command_line_win_over_the_file(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "c.yaml").write_text(content)

        run = started("--model", "x", "--config", "c.yaml")
        assert run.settings.api_keys == ApiKeys(["one"])
        run = started("--model", "x", "--config", "c.yaml", "--api-key", "two", "three")
        assert run.settings.api_keys == ApiKeys(["two", "three"])

    @pytest.mark.parametrize("content", ["api-key: 4711\n", "api-key: [a, 4711]\n"])
    def test_a_wrong_key_of_the_file_is_not_shown(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
    ) -> None:
        (tmp_path / "c.yaml").write_text(content)

        says = usage_error(capsys, "--model", "x", "--config", "c.yaml")
        assert "api_key has to be text" in says
        assert "4711" not in says

    def test_a_wrong_key_is_a_wrong_command_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        says = usage_error(capsys, "--model", "x", "--api-key", "with space")
        assert "--api-key: an API key has to be" in says
        assert "with space" not in says
        assert "go together" in usage_error(capsys, "--model", "x", "--tls-key", "k")

    @pytest.mark.parametrize("model", ["/no/folder", "./folder", "../folder", "~/no/such/folder"])
    def test_a_folder_that_is_absent(self, capsys: pytest.CaptureFixture[str], model: str) -> None:
        assert "no such folder" in usage_error(capsys, "--model", model)

    def test_a_folder_that_exists(self, tmp_path: Path) -> None:
        assert started("--model", str(tmp_path)).settings.port == 50051


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("127.0.0.1:50051", ""),
        ("127.0.0.1:7", "--target 127.0.0.1:7"),
        ("unix:/s", "--target unix:/s"),
    ],
)
@pytest.mark.parametrize(("chat", "prompt"), [(True, "--chat "), (False, '"Once upon a time"')])
def test_the_next_command_can_be_pasted(address: str, target: str, chat: bool, prompt: str) -> None:
    command = cli._next_command(address, chat, parse())
    assert "--tls" not in command
    assert "--api-key" not in command
    tls = ("--tls-cert", "c", "--tls-key", "k")
    assert " --tls-ca CA.pem " in cli._next_command(address, chat, parse(*tls))
    guarded = cli._next_command(
        address, chat, parse(*tls, "--tls-client-ca", "a", "--api-key", "x")
    )
    assert " --tls-cert CERT.pem --tls-key KEY.pem --api-key KEY " in guarded

    assert " generate " in command
    assert target in command
    assert ("--target" in command) == bool(target)
    assert prompt in command


def test_sockets_go_to_a_folder_of_our_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))

    folder = cli._scratch_folder()

    assert folder.parent == tmp_path
    assert len(folder.name) < 16
    assert os.environ["VLLM_RPC_BASE_PATH"] == str(folder)
    assert folder.stat().st_mode & 0o077 == 0


def test_stdout_is_kept_for_the_ready_line() -> None:
    code = """
import os
from openengine_vllm.cli import take_over_stdout
announce = take_over_stdout()
print("engine chatter", flush=True)
os.system("echo child chatter")
announce("ready")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == "ready\n"
    assert done.stderr.splitlines() == ["engine chatter", "child chatter"]

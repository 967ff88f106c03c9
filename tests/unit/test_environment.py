"""The server's settings by environment, for a process whose command line is another's."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from openengine_vllm.api_keys import ApiKeys
from openengine_vllm.environment import settings_from_environment, variables, wants_server
from openengine_vllm.settings import ServerSettings, TlsFiles
from tests.unit.test_settings import parse

DOCUMENT = Path(__file__).parents[2] / "docs" / "beside.md"
FLAGS = {
    "--host": "::",
    "--port": "0",
    "--uds": "/s",
    "--reflection": "off",
    "--drain-timeout": "0.5",
    "--stall-timeout": "1",
    "--probe-timeout": "2",
    "--max-concurrent-requests": "7",
    "--max-sequences": "4",
    "--max-request-bytes": "5",
    "--max-response-bytes": "6",
    "--server-log-level": "error",
    "--log-format": "json",
    "--max-connections": "8",
    "--max-connection-streams": "9",
    "--tls-cert": "c",
    "--tls-key": "k",
    "--tls-client-ca": "a",
}


def variable(flag: str) -> str:
    return "OPENENGINE_" + flag.removeprefix("--").replace("-", "_").upper()


def test_no_variable_means_no_server() -> None:
    assert not wants_server({})
    assert not wants_server({"OPENENGINE_HOST": "0.0.0.0", "OPENENGINE_PORT": ""})


@pytest.mark.parametrize("name", ["OPENENGINE_PORT", "OPENENGINE_UDS"])
def test_a_named_address_means_a_server(name: str) -> None:
    assert wants_server({name: "1"})


def test_defaults_are_the_flags_own() -> None:
    assert settings_from_environment({"PATH": "/bin"}) == parse()


def test_variables_mean_what_the_flags_mean() -> None:
    environment = {variable(flag): value for flag, value in FLAGS.items()}
    arguments = [word for pair in FLAGS.items() for word in pair]

    settings = settings_from_environment(environment)

    assert settings == parse(*arguments)
    assert settings.tls == TlsFiles(Path("c"), Path("k"), Path("a"))


def test_a_key() -> None:
    assert settings_from_environment({"OPENENGINE_API_KEY": "k"}).api_keys == ApiKeys(["k"])
    with pytest.raises(ValueError, match="OPENENGINE_API_KEY: "):
        settings_from_environment({"OPENENGINE_API_KEY": ""})


def test_every_flag_has_a_variable_that_the_document_tells_of() -> None:
    table = DOCUMENT.read_text()
    missing = [name for name in variables() if f"| `{name}` |" not in table]
    assert not missing, f"docs/beside.md leaves out {missing}"
    assert {variable(flag) for flag in FLAGS} <= variables().keys()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("OPENENGINE_PORT", "70000", "OPENENGINE_PORT: .*0 to 65535"),
        ("OPENENGINE_PORT", "--help", "OPENENGINE_PORT: "),
        ("OPENENGINE_REFLECTION", "maybe", "OPENENGINE_REFLECTION: .*auto"),
        ("OPENENGINE_DRAIN_TIMEOUT", "nan", "OPENENGINE_DRAIN_TIMEOUT: .*seconds"),
        ("OPENENGINE_PROT", "1", "OPENENGINE_PROT is not a setting"),
        ("OPENENGINE_HTTP_PORT", "1", "OPENENGINE_HTTP_PORT has no effect"),
        ("OPENENGINE_EXIT_ON_ENGINE_DEATH", "true", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"),
        ("OPENENGINE_TLS_CERT", "c", "go together"),
        ("OPENENGINE_API_KEY_FILE", "/does/not/exist", "No such file"),
    ],
)
def test_what_is_wrong_is_told_by_name(name: str, value: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        settings_from_environment({name: value})


def test_the_variables_of_our_other_programs_are_left_alone() -> None:
    environment = {"OPENENGINE_TARGET": "x:1", "OPENENGINE_CACHE_DIR": "/c"}
    assert settings_from_environment(environment) == parse()


def test_switches_are_true_or_false(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--fast", action=argparse.BooleanOptionalAction, default=True)

    def settings(namespace: argparse.Namespace, _: object) -> ServerSettings:
        return namespace  # type: ignore[return-value]

    monkeypatch.setattr("openengine_vllm.environment.add_server_arguments", add)
    monkeypatch.setattr("openengine_vllm.environment.server_settings", settings)
    for value, wanted in (("false", False), ("Off", False), ("1", True)):
        assert vars(settings_from_environment({"OPENENGINE_FAST": value})) == {"fast": wanted}
    with pytest.raises(ValueError, match="OPENENGINE_FAST: 'no' is neither"):
        settings_from_environment({"OPENENGINE_FAST": "no"})


@pytest.mark.parametrize(
    ("own", "vllms", "keys"),
    [((), ("", "v"), ["v"]), (("--api-key", "o"), ("v",), ["o"]), ((), ("",), [])],
)
def test_vllms_keys_stand_in_where_there_are_none(
    own: tuple[str, ...], vllms: tuple[str, ...], keys: list[str]
) -> None:
    assert parse(*own).guarded_by(vllms).api_keys == ApiKeys(keys)

"""The server's own flags: defaults, ranges, files, and what they mean together."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from openengine_vllm.api_keys import ApiKeys
from openengine_vllm.kv_events.settings import BridgeSettings, KvEventSettings
from openengine_vllm.limits import RequestLimits
from openengine_vllm.protocol.revision import SPLIT
from openengine_vllm.settings import (
    ServerSettings,
    TlsFiles,
    add_server_arguments,
    config_values,
    server_settings,
)


def parse(*arguments: str) -> ServerSettings:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_server_arguments(parser)
    return server_settings(parser.parse_args(arguments), {})


def test_defaults() -> None:
    settings = parse()

    assert settings.host == "127.0.0.1"
    assert settings.port == 50051
    assert settings.uds is None
    assert settings.metrics_port is None
    assert settings.metrics_host == "127.0.0.1"
    assert settings.loopback
    assert settings.reflects
    assert settings.limits == RequestLimits()
    assert settings.exit_on_engine_death
    assert settings.max_request_bytes == 64 * 1024 * 1024


def test_every_flag_reaches_its_setting() -> None:
    settings = parse(
        *("--host", "0.0.0.0", "--port", "0", "--uds", "/s", "--reflection", "off"),
        *("--services", "split"),
        *("--drain-timeout", "0", "--stall-timeout", "1.5", "--probe-timeout", "2"),
        *("--no-exit-on-engine-death", "--max-concurrent-requests", "7", "--max-sequences", "4"),
        *("--max-request-bytes", "5", "--max-response-bytes", "6"),
        *("--server-log-level", "error", "--log-format", "json"),
        *(
            "--api-key",
            "secret",
            "other",
            "--max-connections",
            "8",
            "--max-connection-streams",
            "9",
        ),
        *("--advertise-host", "h", "--no-kv-events", "--kv-retain-batches", "10"),
        *("--kv-retain-bytes", "11", "--kv-zmq-host", "z", "--kv-zmq-port", "12"),
        *("--kv-zmq-replay-port", "13", "--kv-zmq-topic", "t"),
        *("--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a"),
        *("--http-host", "::1", "--http-port", "3"),
        *("--metrics-port", "9", "--metrics-host", "m"),
    )

    assert settings == ServerSettings(
        host="0.0.0.0",
        port=0,
        uds="/s",
        http_host="::1",
        http_port=3,
        metrics_host="m",
        metrics_port=9,
        api_keys=ApiKeys(["secret", "other"]),
        tls=TlsFiles(Path("c"), Path("k"), Path("a")),
        max_connections=8,
        max_connection_streams=9,
        drain_timeout=0,
        stall_timeout=1.5,
        probe_timeout=2,
        max_concurrent_requests=7,
        max_request_bytes=5,
        limits=RequestLimits(max_sequences=4, max_response_bytes=6),
        reflection="off",
        revisions=(SPLIT,),
        advertise_host="h",
        kv_events=KvEventSettings(
            enabled=False,
            bridge=BridgeSettings(
                retain_batches=10,
                retain_bytes=11,
                zmq_host="z",
                zmq_port=12,
                zmq_replay_port=13,
                zmq_topic="t",
            ),
        ),
        exit_on_engine_death=False,
        log_level="error",
        log_format="json",
    )


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(parse("--api-key", "secret"))


@pytest.mark.parametrize(
    ("arguments", "authenticates"),
    [
        ((), False),
        (("--tls-cert", "c", "--tls-key", "k"), False),
        (("--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a"), True),
        (("--api-key", "k"), True),
    ],
)
def test_who_has_to_show_something(arguments: tuple[str, ...], authenticates: bool) -> None:
    assert parse(*arguments).authenticates == authenticates


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tls-cert", "c"), "go together"),
        (("--tls-key", "k"), "go together"),
        (("--tls-client-ca", "a"), "needs --tls-cert"),
        (("--port", "5", "--http-port", "5"), "have to differ"),
        (("--api-key", ""), "--api-key: "),
        (("--api-key-file", "/does/not/exist"), "--api-key-file /does/not/exist: No such file"),
    ],
)
def test_flags_that_do_not_go_together(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(*arguments)


def test_one_request_gets_no_more_sequences_than_may_be_live() -> None:
    settings = parse("--max-concurrent-requests", "3", "--max-sequences", "4")
    assert settings.limits.max_sequences == 3


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--port", "-1", "0 to 65535"),
        ("--port", "65536", "0 to 65535"),
        ("--port", "http", "0 to 65535"),
        ("--port", "1.5", "0 to 65535"),
        ("--max-sequences", "0", "from 1"),
        ("--max-concurrent-requests", "2147483648", "to 2147483647"),
        ("--max-request-bytes", "-5", "from 1"),
        ("--max-response-bytes", "64M", "whole number"),
        ("--drain-timeout", "-0.1", "seconds"),
        ("--drain-timeout", "inf", "seconds"),
        ("--stall-timeout", "nan", "seconds"),
        ("--probe-timeout", "soon", "seconds"),
        ("--reflection", "maybe", "auto"),
        ("--server-log-level", "loud", "debug"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(
    flag: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(f"{flag}={value}")

    assert caught.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert flag in line
    assert value in line
    assert says in line


@pytest.mark.parametrize(
    ("arguments", "loopback"),
    [
        (("--host", "localhost"), True),
        (("--host", "127.8.8.8"), True),
        (("--host", "::1"), True),
        (("--host", "0.0.0.0"), False),
        (("--host", "::"), False),
        (("--host", "10.0.0.1"), False),
        (("--host", "0.0.0.0", "--uds", "/s"), True),
    ],
)
def test_reflection_follows_the_address_unless_told(
    arguments: tuple[str, ...], loopback: bool
) -> None:
    assert parse(*arguments).loopback == parse(*arguments).reflects == loopback
    assert parse(*arguments, "--reflection", "on").reflects
    assert not parse(*arguments, "--reflection", "off").reflects


@pytest.mark.parametrize("host", ["127.evil.example", "127.0.0.1.example.com"])
def test_a_name_that_looks_like_loopback_is_not(host: str) -> None:
    assert not parse("--host", host).loopback


def test_config_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max-sequences: 4\nmax_model_len: 8\n3: x\n")

    assert config_values(file) == {"max_sequences": 4, "max_model_len": 8, "3": "x"}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("c.json", "{}", ".yaml or .yml"),
        ("c.yaml", "- a\n", "mapping"),
        ("c.yaml", "", "mapping"),
        ("c.yaml", "a: [", "not valid YAML"),
        ("c.yml", "\x00", "not valid YAML"),
        ("absent.yaml", None, "No such file"),
    ],
)
def test_a_config_file_that_does_not_work(
    tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)

    with pytest.raises(ValueError, match=says):
        config_values(tmp_path / name)


def test_a_config_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"a: \xff\n")

    with pytest.raises(ValueError, match=r"--config .*not valid YAML"):
        config_values(tmp_path / "c.yaml")

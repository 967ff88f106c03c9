"""vLLM's flags for its HTTP server, beside ours and those of the engine."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from openengine_vllm.engine.http import HttpFrontend
from openengine_vllm.engine.launch import parse_engine_args
from openengine_vllm.settings import add_server_arguments

FOLDER = str(Path(__file__).parent)
FLAGS = ("--model", "m", "--http-port", "1")


def parse(*arguments: str, http: bool = True) -> argparse.Namespace:
    # A folder that is there: nobody looks for it elsewhere.
    def resolve(flags: argparse.Namespace) -> None:
        flags.model = FOLDER

    _, flags = parse_engine_args(
        [*FLAGS, *arguments], "prog", add_server_arguments, resolve, http=http
    )
    return flags


def test_both_kinds_are_taken() -> None:
    flags = parse(
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-num-seqs", "3"
    )
    assert (flags.tool_call_parser, flags.max_num_seqs) == ("hermes", 3)
    assert flags.allowed_origins == []
    HttpFrontend(flags)


def test_ours_are_the_last_word_on_what_both_have() -> None:
    flags = parse("--port", "0", "--api-key", "a", "b")
    assert (flags.host, flags.port, flags.uds) == ("127.0.0.1", 0, None)
    assert flags.api_key == ["a", "b"]
    with pytest.raises(SystemExit):
        parse("--port", "70000")


def test_they_are_unknown_without_http(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--tool-call-parser", "hermes", http=False)
    assert "--tool-call-parser" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ssl-keyfile", "k"), "--ssl-keyfile has no effect"),
        (("--enable-auto-tool-choice",), "requires --tool-call-parser"),
        (("--enable-auto-tool-choice", "--tool-call-parser", "none"), "invalid tool call parser"),
        (("--chat-template", "/no/such/file"), "chat template"),
    ],
)
def test_what_is_wrong_is_told_before_the_model_loads(
    arguments: tuple[str, ...], says: str
) -> None:
    with pytest.raises(Exception, match=says):
        HttpFrontend(parse(*arguments))

"""A log line, whatever a client put into its values."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from openengine_vllm import logs
from tests.support.log_lines import parse_line


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def lines(level: str = "info", format_: str = "logfmt", **fields: object) -> list[str]:
    """What an event at level info writes."""
    with contextlib.redirect_stderr(io.StringIO()) as written:
        logs.configure(level, format_)
        structlog.get_logger().info("request", **fields)
    return written.getvalue().splitlines(keepends=True)


HOSTILE = [
    "plain",
    "with space",
    "a=b",
    'say "hi"',
    "back\\slash",
    "\\n",
    "line\nlevel=error event=forged",
    "\r\n\t",
    "\x1b[31mred\x1b[0m\x07\x00\x7f",
    "\x9b2J\x85",
    "\u2028\u2029\u202e\u200b\ufeff",
    "\U000e0001",
    "日本語 🙂",
    "\ud800",
    "",
    "x" * 100_000,
    '"',
    "\\",
]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_stays_in_its_line_and_reads_back(value: str) -> None:
    [line] = lines(given=value, other=1)
    assert line.endswith("\n")
    assert line[:-1].isprintable()
    pairs = parse_line(line[:-1])
    assert list(pairs) == ["timestamp", "level", "event", "given", "other"]
    assert pairs["given"] == value
    assert pairs["other"] == "1"


def test_plain_values_are_bare() -> None:
    [line] = lines(address="unix:/tmp/a", count=3, share=0.5, on=True, none=None)
    assert line.endswith(" event=request address=unix:/tmp/a count=3 share=0.5 on=true none=\n")


def test_a_traceback_is_one_line() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        [line] = lines(exc_info=error)
    assert "first\nsecond" in parse_line(line[:-1])["exception"]


def test_the_level_silences() -> None:
    assert lines("warning", given="x") == []


@pytest.mark.parametrize("value", HOSTILE)
def test_json_reads_back(value: str) -> None:
    [line] = lines(format_="json", given=value)
    assert line.endswith("\n")
    assert line.isascii()
    assert line[:-1].isprintable()
    pairs = json.loads(line)
    assert list(pairs) == ["timestamp", "level", "event", "given"]
    assert pairs["given"] == (value if value != "\ud800" else "\\ud800")


def test_json_keeps_what_json_has() -> None:
    [line] = lines(
        format_="json", count=3, share=0.5, on=True, none=None, path=Path("/a"), odd=math.nan
    )
    pairs = json.loads(line)
    assert (pairs["count"], pairs["share"], pairs["on"], pairs["none"]) == (3, 0.5, True, None)
    assert (pairs["path"], pairs["odd"], pairs["event"]) == ("/a", "nan", "request")


def test_a_traceback_is_one_line_of_json() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        [line] = lines(format_="json", exc_info=error)
    assert "first\nsecond" in json.loads(line)["exception"]

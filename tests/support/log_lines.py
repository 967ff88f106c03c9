"""Reads the server's log back, so that a test sees what a reader of logfmt would."""

from __future__ import annotations

import json
import re

_PAIR = re.compile(r'([^\s="]+)=("(?:[^"\\]|\\.)*"|[^\s"=\\]*)(?: |$)')


def parse_line(line: str) -> dict[str, str]:
    """The pairs of one line.

    Raises:
        AssertionError: something in it is not a pair, or a key comes twice.
    """
    pairs: dict[str, str] = {}
    position = 0
    while position < len(line):
        match = _PAIR.match(line, position)
        assert match is not None, f"not a pair: {line[position:]!r}"
        key, value = match.groups()
        assert key not in pairs
        pairs[key] = json.loads(value) if value.startswith('"') else value
        position = match.end()
    return pairs


def request_lines(log: str) -> list[dict[str, str]]:
    """The access log's lines in a server's stderr."""
    return [parse_line(line) for line in log.splitlines() if " event=request " in line]

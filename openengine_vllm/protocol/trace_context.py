"""The caller's place in a distributed trace: W3C Trace Context, read from request metadata.

As the recommendation has it, a header that is malformed counts as absent and is no error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

MAX_STATE_MEMBERS: Final = 32
"""Members that a tracestate may have."""

_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<rest>-.*)?"
)
_MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A valid position in a trace, in the form of version 00."""

    trace_id: str
    """32 hexadecimal digits."""
    parent_id: str
    """The caller's span: 16 hexadecimal digits."""
    sampled: bool
    state: str = ""
    """A valid tracestate, or empty."""

    def headers(self) -> dict[str, str]:
        """The headers that say the same."""
        flags = "01" if self.sampled else "00"
        headers = {TRACEPARENT: f"00-{self.trace_id}-{self.parent_id}-{flags}"}
        if self.state:
            headers[TRACESTATE] = self.state
        return headers


def read_trace_context(metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
    """The context that a call came with; None without a valid, single traceparent."""
    parents: list[str] = []
    states: list[str] = []
    for key, value in metadata:
        if isinstance(value, str) and key in (TRACEPARENT, TRACESTATE):
            (parents if key == TRACEPARENT else states).append(value)
    if len(parents) != 1:
        return None
    match = _PARENT.fullmatch(parents[0].strip(" \t"))
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["rest"]):
        return None
    if not int(match["trace"], 16) or not int(match["span"], 16):
        return None
    sampled = bool(int(match["flags"], 16) & 1)
    return TraceContext(match["trace"], match["span"], sampled, _state(",".join(states)))


def _state(header: str) -> str:
    members = [member for item in header.split(",") if (member := item.strip(" \t"))]
    if len(members) > MAX_STATE_MEMBERS:
        return ""
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in matches if match is not None}
    return ",".join(members) if len(keys) == len(members) else ""

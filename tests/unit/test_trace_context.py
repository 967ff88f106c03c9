"""W3C Trace Context, read as the recommendation has it."""

from __future__ import annotations

import pytest

from openengine_vllm.protocol.trace_context import TraceContext, read_trace_context

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def read(parent: str, *states: str) -> TraceContext | None:
    return read_trace_context(
        [("traceparent", parent), *(("tracestate", state) for state in states)]
    )


@pytest.mark.parametrize(
    ("parent", "sampled"),
    [
        (PARENT, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f" {PARENT}\t", True),
        (f"01-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", True),
    ],
)
def test_a_valid_parent(parent: str, sampled: bool) -> None:
    context = read(parent)
    assert context == TraceContext(TRACE, SPAN, sampled)
    assert context.headers() == {"traceparent": f"00-{TRACE}-{SPAN}-0{int(sampled)}"}


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "garbage",
        PARENT.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01-",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}",
        f"{PARENT}\n",
        f"{PARENT},{PARENT}",
    ],
)
def test_a_malformed_parent_is_as_none(parent: str) -> None:
    assert read(parent, "a=1") is None


def test_a_repeated_parent_is_as_none() -> None:
    assert read_trace_context([("traceparent", PARENT)] * 2) is None
    assert read_trace_context([("tracestate", "a=1")]) is None
    assert read_trace_context([("traceparent", PARENT.encode())]) is None


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("a=1",), "a=1"),
        (("a=1, b=2\t,,c=3",), "a=1,b=2,c=3"),
        (("a=1", "b=2"), "a=1,b=2"),
        (("tenant@vendor=a b",), "tenant@vendor=a b"),
        ((",".join(f"k{i}=1" for i in range(32)),), ",".join(f"k{i}=1" for i in range(32))),
        ((",".join(f"k{i}=1" for i in range(33)),), ""),
        (("a=1,a=2",), ""),
        (("A=1",), ""),
        (("a",), ""),
        (("a=",), ""),
        (("a=b=c",), ""),
        ((f"a={'x' * 257}",), ""),
        (("a=\x1b[2J",), ""),
        (("",), ""),
    ],
)
def test_a_malformed_state_is_left_out_alone(states: tuple[str, ...], expected: str) -> None:
    context = read(PARENT, *states)
    assert context == TraceContext(TRACE, SPAN, True, expected)
    assert context.headers().get("tracestate", "") == expected

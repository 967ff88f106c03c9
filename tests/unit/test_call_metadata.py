"""The contract's keys in a call's metadata: their forms, and the body beside them."""

from __future__ import annotations

import pytest

from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.call_metadata import (
    MAX_ROUTING_KEY_LENGTH,
    CallMetadata,
    add_to_generate,
    read_call_metadata,
)
from openengine_vllm.protocol.errors import OpenEngineError

PRIORITY, RANK, ROUTING = (
    "openengine-priority",
    "openengine-target-dp-rank",
    "openengine-routing-key",
)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (PRIORITY, "0", CallMetadata(priority=0)),
        (PRIORITY, "-0", CallMetadata(priority=0)),
        (PRIORITY, "007", CallMetadata(priority=7)),
        (PRIORITY, "2147483647", CallMetadata(priority=2**31 - 1)),
        (PRIORITY, "-2147483648", CallMetadata(priority=-(2**31))),
        (RANK, "0", CallMetadata(data_parallel_rank=0)),
        (RANK, "4294967295", CallMetadata(data_parallel_rank=2**32 - 1)),
        (ROUTING, "user 1/=,~", CallMetadata(routing_key="user 1/=,~")),
        (ROUTING, "k" * MAX_ROUTING_KEY_LENGTH, CallMetadata(routing_key="k" * 256)),
    ],
)
def test_a_key_alone(key: str, value: str, expected: CallMetadata) -> None:
    assert read_call_metadata([("user-agent", "test"), (key, value)]) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            (key, value)
            for key in (PRIORITY, RANK)
            for value in ("", " ", "+1", " 1", "1 ", "1.0", "1e3", "0x1f", "1_0", "--1", "-", "a")
        ),
        *(
            (key, value)
            for key in (PRIORITY, RANK)
            for value in ("1,2", "\u0661", "\u00b2", "1\n", b"1")
        ),
        *((key, value) for key in (PRIORITY, RANK) for value in ("9" * 11, "9" * 5000, "nan")),
        (PRIORITY, "2147483648"),
        (PRIORITY, "-2147483649"),
        (RANK, "-1"),
        (RANK, "4294967296"),
        (ROUTING, ""),
        (ROUTING, "k" * (MAX_ROUTING_KEY_LENGTH + 1)),
        (ROUTING, "a\nb"),
        (ROUTING, "\x1b[2J"),
        (ROUTING, b"bytes"),
    ],
)
def test_a_malformed_key_is_named(key: str, value: str | bytes) -> None:
    with pytest.raises(OpenEngineError) as caught:
        read_call_metadata([(key, value)])
    assert caught.value.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert caught.value.field == f"metadata[{key}]"
    assert caught.value.message.startswith(f"metadata[{key}] ")


@pytest.mark.parametrize("key", [PRIORITY, RANK, ROUTING])
@pytest.mark.parametrize("second", ["1", "2"])
def test_a_repeated_key_is_named(key: str, second: str) -> None:
    with pytest.raises(OpenEngineError) as caught:
        read_call_metadata([(key, "1"), ("other", "1"), (key, second)])
    assert caught.value.field == f"metadata[{key}]"
    assert "repeated" in caught.value.message


def test_other_keys_are_ignored() -> None:
    others: list[tuple[str, str | bytes]] = [
        ("openengine-later", ""),
        ("openengine-later", "x"),
        ("openengine-priority-bin", b"\0"),
        ("x-openengine-priority", "high"),
        ("traceparent", "garbage"),
    ]
    assert read_call_metadata(others) == CallMetadata()


@pytest.mark.parametrize(
    ("priority", "body", "expected"),
    [
        (None, None, None),
        (None, 3, 3),
        (3, None, 3),
        (3, 3, 3),
        (0, 0, 0),
        (-(2**31), None, -(2**31)),
    ],
)
def test_priority_beside_the_body(
    priority: int | None, body: int | None, expected: int | None
) -> None:
    request = pb.GenerateRequest(priority=body)
    add_to_generate(request, CallMetadata(priority=priority))
    assert request == pb.GenerateRequest(priority=expected)


@pytest.mark.parametrize(
    ("rank", "body", "expected"),
    [(None, None, None), (None, 3, 3), (3, None, 3), (3, 3, 3), (0, 0, 0), (0, None, 0)],
)
def test_rank_beside_the_body(rank: int | None, body: int | None, expected: int | None) -> None:
    request = pb.GenerateRequest(kv=None if body is None else pb.KvOptions(data_parallel_rank=body))
    add_to_generate(request, CallMetadata(data_parallel_rank=rank))
    kv = None if expected is None else pb.KvOptions(data_parallel_rank=expected)
    assert request == pb.GenerateRequest(kv=kv)


@pytest.mark.parametrize(
    ("metadata", "request_", "key", "path"),
    [
        (CallMetadata(priority=1), pb.GenerateRequest(priority=2), PRIORITY, "priority"),
        (CallMetadata(priority=1), pb.GenerateRequest(priority=0), PRIORITY, "priority"),
        (CallMetadata(priority=0), pb.GenerateRequest(priority=1), PRIORITY, "priority"),
        (
            CallMetadata(data_parallel_rank=1),
            pb.GenerateRequest(kv=pb.KvOptions(data_parallel_rank=0)),
            RANK,
            "kv.data_parallel_rank",
        ),
        (
            CallMetadata(data_parallel_rank=1),
            pb.GenerateRequest(kv=pb.KvOptions(session=pb.KvSessionRef(dp_rank=2))),
            RANK,
            "kv.session.dp_rank",
        ),
    ],
)
def test_a_contradiction_is_refused(
    metadata: CallMetadata, request_: pb.GenerateRequest, key: str, path: str
) -> None:
    with pytest.raises(OpenEngineError) as caught:
        add_to_generate(request_, metadata)
    assert caught.value.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert caught.value.field == f"metadata[{key}]"
    assert f" {path} " in caught.value.message

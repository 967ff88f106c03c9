"""The error table, and both ways an error travels, over a real connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from google.rpc import status_pb2
from grpc import StatusCode, aio

from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError

TABLE = {
    "INVALID_ARGUMENT": (StatusCode.INVALID_ARGUMENT, False),
    "UNSUPPORTED_FEATURE": (StatusCode.INVALID_ARGUMENT, False),
    "ROLE_MISMATCH": (StatusCode.FAILED_PRECONDITION, False),
    "MODEL_NOT_FOUND": (StatusCode.NOT_FOUND, False),
    "OVERLOADED": (StatusCode.RESOURCE_EXHAUSTED, True),
    "REQUEST_NOT_FOUND": (StatusCode.NOT_FOUND, False),
    "DUPLICATE_REQUEST": (StatusCode.ALREADY_EXISTS, False),
    "KV_SESSION_NOT_FOUND": (StatusCode.NOT_FOUND, False),
    "KV_TRANSFER_FAILED": (StatusCode.UNAVAILABLE, True),
    "CANCELLED": (StatusCode.CANCELLED, False),
    "DRAINING": (StatusCode.UNAVAILABLE, True),
    "INTERNAL": (StatusCode.INTERNAL, False),
}

# Each named error: its code, its status, whether it can be retried, and the field it names.
NAMED: list[tuple[OpenEngineError, str, StatusCode, bool, str | None]] = [
    (
        errors.invalid_argument("sampling.top_p", "must be in (0, 1]"),
        "INVALID_ARGUMENT",
        StatusCode.INVALID_ARGUMENT,
        False,
        "sampling.top_p",
    ),
    (
        errors.unsupported_option("guided.backend", "only xgrammar"),
        "UNSUPPORTED_FEATURE",
        StatusCode.INVALID_ARGUMENT,
        False,
        "guided.backend",
    ),
    (
        errors.unsupported_task("embed"),
        "UNSUPPORTED_FEATURE",
        StatusCode.FAILED_PRECONDITION,
        False,
        None,
    ),
    (
        errors.feature_off("LoRA is off"),
        "UNSUPPORTED_FEATURE",
        StatusCode.FAILED_PRECONDITION,
        False,
        None,
    ),
    (
        errors.unimplemented("Drain"),
        "UNSUPPORTED_FEATURE",
        StatusCode.UNIMPLEMENTED,
        False,
        None,
    ),
    (
        errors.role_mismatch("role", "this is a prefill engine"),
        "ROLE_MISMATCH",
        StatusCode.FAILED_PRECONDITION,
        False,
        "role",
    ),
    (errors.model_not_found("m"), "MODEL_NOT_FOUND", StatusCode.NOT_FOUND, False, "model"),
    (errors.adapter_not_found("a"), "MODEL_NOT_FOUND", StatusCode.NOT_FOUND, False, "lora_name"),
    (
        errors.adapter_conflict("adapter.lora_id", "id 1 is taken"),
        "INVALID_ARGUMENT",
        StatusCode.ALREADY_EXISTS,
        False,
        "adapter.lora_id",
    ),
    (
        errors.request_not_found("r"),
        "REQUEST_NOT_FOUND",
        StatusCode.NOT_FOUND,
        False,
        "request_id",
    ),
    (
        errors.kv_session_not_found("s"),
        "KV_SESSION_NOT_FOUND",
        StatusCode.NOT_FOUND,
        False,
        "kv.session",
    ),
    (
        errors.kv_start_not_retained("batch 3 is gone", oldest=5, newest=9),
        "INVALID_ARGUMENT",
        StatusCode.OUT_OF_RANGE,
        False,
        "start_sequence_number",
    ),
    (
        errors.kv_transfer_failed("no blocks came"),
        "KV_TRANSFER_FAILED",
        StatusCode.UNAVAILABLE,
        True,
        None,
    ),
    (
        errors.duplicate_request("r"),
        "DUPLICATE_REQUEST",
        StatusCode.ALREADY_EXISTS,
        False,
        "request_id",
    ),
    (
        errors.overloaded("full", retry_after_ms=0),
        "OVERLOADED",
        StatusCode.RESOURCE_EXHAUSTED,
        True,
        None,
    ),
    (errors.starting(), "OVERLOADED", StatusCode.UNAVAILABLE, True, None),
    (errors.draining(), "DRAINING", StatusCode.UNAVAILABLE, True, None),
    (errors.cancelled("aborted"), "CANCELLED", StatusCode.CANCELLED, False, None),
    (errors.internal(), "INTERNAL", StatusCode.INTERNAL, False, None),
    (errors.engine_dead(), "INTERNAL", StatusCode.UNAVAILABLE, True, None),
]

Failing = Callable[[OpenEngineError], Awaitable[aio.AioRpcError]]


@pytest.fixture
async def rejected() -> AsyncIterator[Failing]:
    """Sends an error through a servicer's abort and returns what the client's gRPC raises."""
    current: list[OpenEngineError] = []

    async def handle(request: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        error = current.pop()
        await context.abort(error.status, error.message, error.trailing_metadata())
        raise AssertionError("abort returned")

    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Fail": grpc.unary_unary_rpc_method_handler(handle)
    }
    server = aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test/Fail")

        async def fail(error: OpenEngineError) -> aio.AioRpcError:
            current.append(error)
            with pytest.raises(aio.AioRpcError) as caught:
                await call(b"")
            return caught.value

        yield fail
    await server.stop(None)


def assert_same(left: OpenEngineError, right: OpenEngineError) -> None:
    for name in ("code", "message", "retryable", "retry_after_ms", "details"):
        assert getattr(left, name) == getattr(right, name), name


def test_every_code_has_its_row() -> None:
    assert set(errors.TABLE) == set(pb.ErrorCode.values())
    for code, name in zip(pb.ErrorCode.values(), pb.ErrorCode.keys(), strict=True):
        if code != pb.ERROR_CODE_UNSPECIFIED:
            error = OpenEngineError(code, "x")
            expected = TABLE[name.removeprefix("ERROR_CODE_")]
            assert (error.status, error.retryable) == expected, name


@pytest.mark.parametrize(
    ("error", "code", "status", "retryable", "field"),
    NAMED,
    ids=[f"{case[1]}-{case[2].name}" for case in NAMED],
)
async def test_named_errors_in_both_transports(
    error: OpenEngineError,
    code: str,
    status: StatusCode,
    retryable: bool,
    field: str | None,
    rejected: Failing,
) -> None:
    assert error.code_name == code
    assert error.status is status
    assert error.retryable is retryable
    assert error.field == field
    assert error.message

    event = pb.EngineError.FromString(errors.to_proto(error).SerializeToString())
    assert_same(errors.from_proto(event), error)

    raised = await rejected(error)
    assert raised.code() is status
    assert raised.details() == error.message
    received = errors.from_rpc_error(raised)
    assert_same(received, error)
    assert received.status is status


def test_status_detail_is_the_contracts_message() -> None:
    error = errors.overloaded("full", retry_after_ms=250)
    status = errors.to_rpc_status(error)
    assert status.code == StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert status.message == "full"
    [detail] = status.details
    assert detail.type_url == "type.googleapis.com/openengine.v1.EngineError"
    assert pb.EngineError.FromString(detail.value) == pb.EngineError(
        code=pb.ERROR_CODE_OVERLOADED, message="full", retryable=True, retry_after_ms=250
    )


def test_retry_after_is_absent_unless_given() -> None:
    assert not errors.to_proto(errors.overloaded("full")).HasField("retry_after_ms")
    assert errors.to_proto(errors.overloaded("full", retry_after_ms=0)).HasField("retry_after_ms")


def test_retry_after_needs_a_retryable_error() -> None:
    with pytest.raises(ValueError, match="retry_after_ms"):
        OpenEngineError(pb.ERROR_CODE_INVALID_ARGUMENT, "x", retry_after_ms=1)
    with pytest.raises(ValueError, match="retry_after_ms"):
        errors.overloaded("full", retry_after_ms=-1)
    # Another server's contradiction is not the caller's to handle.
    event = pb.EngineError(code=pb.ERROR_CODE_INTERNAL, retryable=False, retry_after_ms=5)
    assert errors.from_proto(event).retry_after_ms is None


def test_details_keep_their_json_types() -> None:
    details = {"field": "a", "n": 3, "x": 0.5, "flag": True, "none": None, "list": [1, {"k": 2}]}
    error = OpenEngineError(pb.ERROR_CODE_INTERNAL, "x", details=details)
    received = errors.from_proto(errors.to_proto(error)).details
    assert received == details
    assert isinstance(received["n"], int)
    assert isinstance(received["list"][1]["k"], int)


def test_details_that_json_cannot_hold_are_left_out() -> None:
    event = pb.EngineError(code=pb.ERROR_CODE_OVERLOADED, message="full", retryable=True)
    event.details.fields["x"].number_value = float("nan")
    received = errors.from_proto(event)
    assert received.details == {}
    assert received.code == pb.ERROR_CODE_OVERLOADED


async def test_the_largest_error_still_arrives_whole(rejected: Failing) -> None:
    # Four bytes a character in UTF-8, twelve once percent-encoded.
    error = OpenEngineError(
        pb.ERROR_CODE_INVALID_ARGUMENT,
        "\N{PILE OF POO}" * 10_000,
        details={"field": "\N{PILE OF POO}" * 10_000, "list": ["x"] * 10_000},
    )
    assert len(error.message.encode()) <= errors.MAX_MESSAGE_BYTES
    assert error.message.endswith("…")
    # A client's default limit is 8 KiB, from where on some calls fail.
    for _ in range(5):
        raised = await rejected(error)
        assert raised.code() is StatusCode.INVALID_ARGUMENT
        received = errors.from_rpc_error(raised)
        assert received.message == error.message
        assert received.details == {"field": "\N{PILE OF POO}" * errors.MAX_FIELD_LENGTH}


async def test_names_are_quoted_and_cut(rejected: Failing) -> None:
    error = errors.model_not_found("a\nb\x00" + "c" * 1000)
    assert "\\nb\\x00" in error.message
    assert len(error.message) < 300
    assert_same(errors.from_rpc_error(await rejected(error)), error)


def test_lone_surrogates_do_not_break_a_message() -> None:
    assert errors.to_proto(errors.internal("a\udcffb")).message == "a?b"


def plain(status: StatusCode, text: str | None, *metadata: tuple[str, bytes]) -> aio.AioRpcError:
    return aio.AioRpcError(status, aio.Metadata(), aio.Metadata(*metadata), text)


@pytest.mark.parametrize(
    ("status", "code", "retryable"),
    [
        (StatusCode.INVALID_ARGUMENT, pb.ERROR_CODE_INVALID_ARGUMENT, False),
        (StatusCode.UNIMPLEMENTED, pb.ERROR_CODE_UNSUPPORTED_FEATURE, False),
        (StatusCode.RESOURCE_EXHAUSTED, pb.ERROR_CODE_OVERLOADED, True),
        (StatusCode.CANCELLED, pb.ERROR_CODE_CANCELLED, False),
        (StatusCode.INTERNAL, pb.ERROR_CODE_INTERNAL, False),
        (StatusCode.UNAVAILABLE, pb.ERROR_CODE_UNSPECIFIED, True),
        (StatusCode.UNAUTHENTICATED, pb.ERROR_CODE_UNSPECIFIED, False),
        (StatusCode.DEADLINE_EXCEEDED, pb.ERROR_CODE_UNSPECIFIED, False),
        (StatusCode.NOT_FOUND, pb.ERROR_CODE_UNSPECIFIED, False),
    ],
)
def test_a_status_without_detail(
    status: StatusCode, code: pb.ErrorCode.ValueType, retryable: bool
) -> None:
    error = errors.from_rpc_error(plain(status, "why"))
    assert (error.code, error.status, error.retryable) == (code, status, retryable)
    assert error.message == "why"
    if code == pb.ERROR_CODE_UNSPECIFIED:
        assert error.code_name == status.name


def test_a_message_over_the_size_limit_is_not_retryable() -> None:
    text = "SERVER: Received message larger than max (5 vs. 4)"
    error = errors.from_rpc_error(plain(StatusCode.RESOURCE_EXHAUSTED, text))
    assert (error.code, error.retryable) == (pb.ERROR_CODE_UNSPECIFIED, False)
    assert error.code_name == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(
    "value",
    [b"\xff\xff", status_pb2.Status(code=5, message="bare").SerializeToString()],
    ids=["garbage", "no detail"],
)
def test_a_detail_that_cannot_be_read(value: bytes) -> None:
    raised = plain(StatusCode.UNAVAILABLE, None, (errors.STATUS_DETAILS_KEY, value))
    error = errors.from_rpc_error(raised)
    assert (error.status, error.retryable) == (StatusCode.UNAVAILABLE, True)
    assert error.message


def test_a_code_of_a_later_revision() -> None:
    event = pb.EngineError.FromString(b"\x08\x63\x12\x03new\x18\x01")
    error = errors.from_proto(event)
    assert error.code == 99
    assert error.retryable
    assert error.code_name == "UNKNOWN"

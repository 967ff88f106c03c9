"""Every error of the contract, in the one place that knows both of its transports.

Before a request is accepted an error is a gRPC status that carries an `EngineError` as a
detail; afterwards it is an `EngineError` event on a stream that ends with OK. Server and client
both work with `OpenEngineError`, so that a caller reads the same code, `retryable`,
`retry_after_ms` and `details` whichever way the error came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc import StatusCode, aio

from openengine_vllm.protocol import v1 as pb

MAX_MESSAGE_BYTES: Final = 1024
"""Bytes of a message in UTF-8; a longer one is cut. A rejection travels as metadata, of which
gRPC clients take 8 KiB, and holds the message twice, once percent-encoded."""

MAX_DETAILS_BYTES: Final = 1024
"""Bytes of encoded details. Of larger ones only `field` is sent."""

MAX_FIELD_LENGTH: Final = 200
"""Characters of a field's path; a longer one is cut."""

STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"
"""The trailing metadata that gRPC keeps for a `google.rpc.Status`."""


class Row(NamedTuple):
    """What a code means when nothing more special is known."""

    status: StatusCode
    retryable: bool


TABLE: Final[Mapping[pb.ErrorCode.ValueType, Row]] = {
    pb.ERROR_CODE_UNSPECIFIED: Row(StatusCode.UNKNOWN, False),
    pb.ERROR_CODE_INVALID_ARGUMENT: Row(StatusCode.INVALID_ARGUMENT, False),
    pb.ERROR_CODE_UNSUPPORTED_FEATURE: Row(StatusCode.INVALID_ARGUMENT, False),
    pb.ERROR_CODE_ROLE_MISMATCH: Row(StatusCode.FAILED_PRECONDITION, False),
    pb.ERROR_CODE_MODEL_NOT_FOUND: Row(StatusCode.NOT_FOUND, False),
    pb.ERROR_CODE_OVERLOADED: Row(StatusCode.RESOURCE_EXHAUSTED, True),
    pb.ERROR_CODE_REQUEST_NOT_FOUND: Row(StatusCode.NOT_FOUND, False),
    pb.ERROR_CODE_DUPLICATE_REQUEST: Row(StatusCode.ALREADY_EXISTS, False),
    pb.ERROR_CODE_KV_SESSION_NOT_FOUND: Row(StatusCode.NOT_FOUND, False),
    # Happens to accepted requests alone, so this status is never sent.
    pb.ERROR_CODE_KV_TRANSFER_FAILED: Row(StatusCode.UNAVAILABLE, True),
    pb.ERROR_CODE_CANCELLED: Row(StatusCode.CANCELLED, False),
    pb.ERROR_CODE_DRAINING: Row(StatusCode.UNAVAILABLE, True),
    pb.ERROR_CODE_INTERNAL: Row(StatusCode.INTERNAL, False),
}

# What a bare status says; a status that several codes share says no code.
_CODE_OF_STATUS: Final[Mapping[StatusCode, pb.ErrorCode.ValueType]] = {
    StatusCode.INVALID_ARGUMENT: pb.ERROR_CODE_INVALID_ARGUMENT,
    StatusCode.OUT_OF_RANGE: pb.ERROR_CODE_INVALID_ARGUMENT,
    StatusCode.UNIMPLEMENTED: pb.ERROR_CODE_UNSUPPORTED_FEATURE,
    StatusCode.RESOURCE_EXHAUSTED: pb.ERROR_CODE_OVERLOADED,
    StatusCode.CANCELLED: pb.ERROR_CODE_CANCELLED,
    StatusCode.INTERNAL: pb.ERROR_CODE_INTERNAL,
}


class OpenEngineError(Exception):
    """An error of the contract.

    `retryable` says whether the unchanged request can succeed later, and `retry_after_ms` how
    long to wait at least; it is None where nothing is known, and always for errors that can't
    be retried. `details` can be written as JSON; `details["field"]` is the path of the field at
    fault, like `sampling.top_p`. `status` is what the error is, or would be, as a gRPC status.

    Raises ValueError for a negative `retry_after_ms`, or one on an error that isn't retryable.
    """

    def __init__(
        self,
        code: pb.ErrorCode.ValueType,
        message: str,
        *,
        retryable: bool | None = None,
        retry_after_ms: int | None = None,
        details: Mapping[str, Any] | None = None,
        status: StatusCode | None = None,
    ) -> None:
        row = TABLE.get(code, TABLE[pb.ERROR_CODE_UNSPECIFIED])
        self.code = code
        self.message = _cut(message)
        self.retryable = row.retryable if retryable is None else retryable
        self.retry_after_ms = retry_after_ms
        self.details: dict[str, Any] = dict(details or {})
        self.status = row.status if status is None else status
        if retry_after_ms is not None and (retry_after_ms < 0 or not self.retryable):
            raise ValueError(f"retry_after_ms {retry_after_ms} on this error")
        super().__init__(self.message)

    @property
    def code_name(self) -> str:
        """The code without its prefix, or the status where the server sent no code."""
        if self.code == pb.ERROR_CODE_UNSPECIFIED or self.code not in pb.ErrorCode.values():
            return self.status.name
        return pb.ErrorCode.Name(self.code).removeprefix("ERROR_CODE_")

    @property
    def field(self) -> str | None:
        """The path of the field at fault, if the error names one."""
        value = self.details.get("field")
        return value if isinstance(value, str) else None

    def trailing_metadata(self, *, detailed: bool = True) -> tuple[tuple[str, bytes], ...]:
        """The third argument of `context.abort`, next to `status` and `message`."""
        return trailing_metadata(self, detailed=detailed)


def invalid_argument(field: str, message: str) -> OpenEngineError:
    """A value that no server of this contract would take."""
    return OpenEngineError(pb.ERROR_CODE_INVALID_ARGUMENT, message, details=_at(field))


def unsupported_option(field: str, message: str) -> OpenEngineError:
    """A value that the contract allows and this engine can't do."""
    return OpenEngineError(pb.ERROR_CODE_UNSUPPORTED_FEATURE, message, details=_at(field))


def unsupported_task(task: str) -> OpenEngineError:
    """A task (`embed`, `classify`, `score`, `generate`) that the model doesn't do."""
    return feature_off(f"the model does not support the task {task}", task=task)


def feature_off(message: str, **details: Any) -> OpenEngineError:
    """A whole feature (LoRA, KV events) that this server runs without."""
    return OpenEngineError(
        pb.ERROR_CODE_UNSUPPORTED_FEATURE,
        message,
        details=details,
        status=StatusCode.FAILED_PRECONDITION,
    )


def unimplemented(rpc: str) -> OpenEngineError:
    """An RPC that isn't there."""
    return OpenEngineError(
        pb.ERROR_CODE_UNSUPPORTED_FEATURE,
        f"{rpc} is not implemented",
        details={"rpc": rpc},
        status=StatusCode.UNIMPLEMENTED,
    )


def role_mismatch(field: str, message: str) -> OpenEngineError:
    """A request that an engine of another role would take."""
    return OpenEngineError(pb.ERROR_CODE_ROLE_MISMATCH, message, details=_at(field))


def model_not_found(model: str, *, field: str = "model") -> OpenEngineError:
    """A model name that is not served."""
    return _unknown(pb.ERROR_CODE_MODEL_NOT_FOUND, field, f"model {_name(model)} is not served")


def adapter_not_found(name: str, *, field: str = "lora_name") -> OpenEngineError:
    """A LoRA adapter that is not loaded."""
    message = f"LoRA adapter {_name(name)} is not loaded"
    return _unknown(pb.ERROR_CODE_MODEL_NOT_FOUND, field, message)


def adapter_conflict(field: str, message: str) -> OpenEngineError:
    """A LoRA adapter whose id, name or path belongs to another one."""
    return OpenEngineError(
        pb.ERROR_CODE_INVALID_ARGUMENT,
        message,
        details=_at(field),
        status=StatusCode.ALREADY_EXISTS,
    )


def request_not_found(request_id: str, *, field: str = "request_id") -> OpenEngineError:
    """A request id that was never accepted, or too long ago to be remembered."""
    message = f"request {_name(request_id)} is not known"
    return _unknown(pb.ERROR_CODE_REQUEST_NOT_FOUND, field, message)


def kv_session_not_found(session_id: str, *, field: str = "kv.session") -> OpenEngineError:
    """A KV session that was never opened, or is closed."""
    message = f"KV session {_name(session_id)} is not open"
    return _unknown(pb.ERROR_CODE_KV_SESSION_NOT_FOUND, field, message)


def kv_start_not_retained(message: str, *, oldest: int, newest: int) -> OpenEngineError:
    """A first sequence number outside the retained log, which holds `oldest` to `newest`."""
    return OpenEngineError(
        pb.ERROR_CODE_INVALID_ARGUMENT,
        message,
        details={**_at("start_sequence_number"), "oldest": oldest, "newest": newest},
        status=StatusCode.OUT_OF_RANGE,
    )


def kv_transfer_failed(message: str) -> OpenEngineError:
    """KV blocks that did not arrive for a request that was accepted."""
    return OpenEngineError(pb.ERROR_CODE_KV_TRANSFER_FAILED, message)


def duplicate_request(request_id: str, *, field: str = "request_id") -> OpenEngineError:
    """A request id that is in use."""
    return OpenEngineError(
        pb.ERROR_CODE_DUPLICATE_REQUEST,
        f"request {_name(request_id)} is still running",
        details=_at(field),
    )


def overloaded(message: str, *, retry_after_ms: int | None = None) -> OpenEngineError:
    """No room for the request now."""
    return OpenEngineError(pb.ERROR_CODE_OVERLOADED, message, retry_after_ms=retry_after_ms)


def starting(*, retry_after_ms: int | None = 1000) -> OpenEngineError:
    """The engine is still loading."""
    return OpenEngineError(
        pb.ERROR_CODE_OVERLOADED,
        "the engine is starting",
        retry_after_ms=retry_after_ms,
        status=StatusCode.UNAVAILABLE,
    )


def draining(message: str = "the server is draining") -> OpenEngineError:
    """The server takes no more work, or gives up what it has; another one may take it."""
    return OpenEngineError(pb.ERROR_CODE_DRAINING, message)


def cancelled(message: str) -> OpenEngineError:
    """The request was cancelled."""
    return OpenEngineError(pb.ERROR_CODE_CANCELLED, message)


def internal(message: str = "internal error") -> OpenEngineError:
    """A fault of the server. The message must hold nothing that an exception says."""
    return OpenEngineError(pb.ERROR_CODE_INTERNAL, message)


def engine_dead(message: str = "the engine is no longer running") -> OpenEngineError:
    """The engine is gone for good; another server may take the request."""
    return OpenEngineError(
        pb.ERROR_CODE_INTERNAL, message, retryable=True, status=StatusCode.UNAVAILABLE
    )


def to_proto(error: OpenEngineError, *, detailed: bool = True) -> pb.EngineError:
    """The error as a message, for a stream's last event.

    Without `detailed` it has the three fields that all revisions of the schema define alike.
    """
    message = pb.EngineError(code=error.code, message=error.message, retryable=error.retryable)
    if not detailed:
        return message
    if error.retry_after_ms is not None:
        message.retry_after_ms = error.retry_after_ms
    if error.details:
        json_format.ParseDict(error.details, message.details)
        if message.details.ByteSize() > MAX_DETAILS_BYTES:
            message.ClearField("details")
            if error.field is not None:
                json_format.ParseDict(_at(error.field), message.details)
    return message


def from_proto(message: pb.EngineError, status: StatusCode | None = None) -> OpenEngineError:
    """The error that a message holds; without a `status` the table's own is assumed."""
    retry_after_ms = message.retry_after_ms if message.HasField("retry_after_ms") else None
    return OpenEngineError(
        message.code,
        message.message,
        retryable=message.retryable,
        retry_after_ms=retry_after_ms if message.retryable else None,
        details=_details(message.details),
        status=status,
    )


def to_rpc_status(error: OpenEngineError, *, detailed: bool = True) -> status_pb2.Status:
    """The error as the status of a rejected call, with the message of `to_proto` as detail."""
    status = status_pb2.Status(code=error.status.value[0], message=error.message)
    status.details.add().Pack(to_proto(error, detailed=detailed))
    return status


def trailing_metadata(
    error: OpenEngineError, *, detailed: bool = True
) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata of a rejected call."""
    status = to_rpc_status(error, detailed=detailed)
    return ((STATUS_DETAILS_KEY, status.SerializeToString()),)


def from_rpc_error(error: aio.AioRpcError) -> OpenEngineError:
    """The error behind a failed call.

    Reads the `EngineError` that came with the status. Without one, as from gRPC itself, the
    status alone decides: codes that it doesn't determine are UNSPECIFIED, and only
    UNAVAILABLE and RESOURCE_EXHAUSTED are retryable, the latter not for a message that is over
    a size limit.
    """
    status, text = error.code(), error.details() or ""
    detail = _detail(error)
    if detail is not None:
        return from_proto(detail, status)
    code = _CODE_OF_STATUS.get(status, pb.ERROR_CODE_UNSPECIFIED)
    retryable = status in (StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED)
    if status is StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in text:
        code, retryable = pb.ERROR_CODE_UNSPECIFIED, False
    return OpenEngineError(code, text or status.value[1], retryable=retryable, status=status)


def _detail(error: aio.AioRpcError) -> pb.EngineError | None:
    for key, value in error.trailing_metadata() or ():
        if key != STATUS_DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            for detail in status_pb2.Status.FromString(value).details:
                message = pb.EngineError()
                if detail.Unpack(message):
                    return message
        except DecodeError:
            return None
    return None


def _details(struct: pb.Struct) -> dict[str, Any]:
    try:
        details = json_format.MessageToDict(struct)
    except (json_format.Error, ValueError):
        # Infinities and NaN, which JSON doesn't have. The rest of the error still counts.
        return {}
    return {key: _whole(value) for key, value in details.items()}


def _whole(value: Any) -> Any:
    """A Struct's value with whole numbers, which travel as doubles, as ints again."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value


def _unknown(code: pb.ErrorCode.ValueType, field: str, message: str) -> OpenEngineError:
    return OpenEngineError(code, message, details=_at(field))


def _at(field: str) -> dict[str, str]:
    return {"field": field[:MAX_FIELD_LENGTH]}


def _name(value: str) -> str:
    return repr(value if len(value) <= MAX_FIELD_LENGTH else value[:MAX_FIELD_LENGTH] + "…")


def _cut(text: str) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return encoded.decode()
    ellipsis = "…".encode()
    return (encoded[: MAX_MESSAGE_BYTES - len(ellipsis)] + ellipsis).decode("utf-8", "ignore")

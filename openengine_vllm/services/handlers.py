"""Binds the service's methods to handlers, and gives every error its one transport.

Every method of the schema is registered: one without an implementation answers UNIMPLEMENTED
by name. Streaming handlers write serialised messages themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.translation import unchanged

_log = structlog.get_logger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[[Any, Context], Awaitable[Any]]
"""Takes the request; a unary one returns the response, a streaming one writes bytes."""
Run = Callable[[bytes, Context], Awaitable[Any]]
"""A handler that takes the request's bytes."""


def service_handler(
    service: ServiceDescriptor,
    handlers: Mapping[str, Handler],
    observe: Callable[[str, Run], Run] | None = None,
    *,
    detailed_errors: bool = True,
) -> grpc.GenericRpcHandler:
    """A handler for all methods of ``service``.

    Args:
        handlers: by method name. A request that the contract defines alike is given to them as
            the contract's message, whichever revision the service belongs to.
        observe: puts what it likes around a method's handler; it sees the errors as they are
            raised.
        detailed_errors: whether an EngineError tells all there is to tell.
    """
    unknown = handlers.keys() - {method.name for method in service.methods}
    if unknown:
        raise ValueError(f"{service.full_name} has no methods {sorted(unknown)}")
    return grpc.method_handlers_generic_handler(
        service.full_name,
        {
            method.name: _method(method, handlers.get(method.name), observe, detailed_errors)
            for method in service.methods
        },
    )


def _method(
    method: MethodDescriptor,
    handler: Handler | None,
    observe: Callable[[str, Run], Run] | None,
    detailed_errors: bool,
) -> grpc.RpcMethodHandler[Any, Any]:
    if handler is None:
        handler = _unimplemented(method.name)
    run = _parsing(_parser(method), handler)
    observed = run if observe is None else observe(method.name, run)
    guarded = _guard(method.name, observed, detailed_errors)
    # Requests are parsed by the guard: gRPC would tell a client with UNKNOWN, and with the
    # exception's class, that its message is malformed.
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(guarded, None, None)
    return grpc.unary_unary_rpc_method_handler(guarded, None, _serialize)


def _parser(method: MethodDescriptor) -> Callable[[bytes], Message]:
    message_class = _message_class(method.input_type)

    def parse(data: bytes) -> Message:
        try:
            return message_class.FromString(data)
        except DecodeError as error:
            raise errors.OpenEngineError(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"the request's bytes are not a valid {method.input_type.name}",
            ) from error

    return parse


def _message_class(descriptor: Descriptor) -> type[Message]:
    contract: type[Message] | None = getattr(pb, descriptor.name, None)
    if contract is not None and unchanged(descriptor, contract.DESCRIPTOR):
        return contract
    return GetMessageClass(descriptor)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _unimplemented(name: str) -> Handler:
    async def handler(request: Message, context: Context) -> NoReturn:
        raise errors.unimplemented(name)

    return handler


def _parsing(parse: Callable[[bytes], Message], handler: Handler) -> Run:
    async def run(data: bytes, context: Context) -> Any:
        return await handler(parse(data), context)

    return run


def _guard(name: str, run: Run, detailed: bool) -> Run:
    async def guarded(data: bytes, context: Context) -> Any:
        try:
            return await run(data, context)
        except errors.OpenEngineError as error:
            await abort(context, error, detailed=detailed)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            _log.exception("handler failed", rpc=name, error=type(error).__name__)
            await abort(context, errors.internal(), detailed=detailed)

    return guarded


async def abort(
    context: Context, error: errors.OpenEngineError, *, detailed: bool = True
) -> NoReturn:
    """Reject a call: gRPC status plus the EngineError as its rich detail."""
    await context.abort(error.status, error.message, error.trailing_metadata(detailed=detailed))
    raise AssertionError("abort raises")

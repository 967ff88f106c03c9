"""The one door to all services: whoever has no key is turned away before anything is read.

gRPC looks for a method's handler once the call's headers are there, so this costs a call a
few microseconds and a caller without a key never gets a message into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

import grpc

from openengine_vllm.api_keys import ApiKeys
from openengine_vllm.services.handlers import Context

_OPEN: Final = "/grpc.health.v1.Health/"
"""What supervisors' probes call; they have no key."""


class Services(grpc.GenericRpcHandler):
    """All of a server's services. They are added here as they would be to a server.

    gRPC finds a method that was registered by name before it asks any handler, and so past a
    check that stands in front of the handlers; hence nothing but this goes to the server.

    Args:
        keys: any of them opens every service; with none every caller may call.
        on_refusal: told of each call that is turned away.
    """

    def __init__(self, keys: ApiKeys, on_refusal: Callable[[], None] | None = None) -> None:
        self._keys = keys
        self._on_refusal = on_refusal
        self._handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Add services."""
        self._handlers += handlers

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Nothing: generated code gives the same methods to :meth:`add_generic_rpc_handlers`."""

    def as_server(self) -> grpc.aio.Server:
        """This, for generated code, which adds its methods to nothing but a server."""
        return cast("grpc.aio.Server", self)

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a method, known or not, once its caller has shown a key."""
        if (
            self._keys
            and not handler_call_details.method.startswith(_OPEN)
            and not self._keys.admit(handler_call_details.invocation_metadata or ())
        ):
            if self._on_refusal is not None:
                self._on_refusal()
            return _TURN_AWAY
        for handler in self._handlers:
            found = handler.service(handler_call_details)
            if found is not None:
                return found
        return None


async def _turn_away(requests: object, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid API key is required")


# A stream both ways fits every caller: it answers before a request has come.
_TURN_AWAY: Final[grpc.RpcMethodHandler[Any, Any]] = grpc.stream_stream_rpc_method_handler(
    _turn_away
)

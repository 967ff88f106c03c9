"""A server of either revision that does what a test tells it to, on a real connection.

It has no engine and no rules of its own: a test gives each RPC a script, so that a client meets
exactly the responses, the errors and the silences that the test is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from grpc import aio

from openengine_vllm.protocol import split
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.channel import server_options
from openengine_vllm.protocol.errors import unimplemented

Context = aio.ServicerContext[Any, Any]
Script = Callable[[Any, Context], Any]
"""A coroutine function for an RPC that answers once, an async generator function for others."""

CONTRACT = (pb.SERVICE,)
SPLIT = (split.INFERENCE_SERVICE, split.CONTROL_SERVICE)


class ScriptedServer(grpc.GenericRpcHandler):
    """Answers each RPC as its script says, and UNIMPLEMENTED where there is none.

    Of services that are not its own, as of health and reflection, it knows nothing.
    """

    def __init__(self, services: Sequence[ServiceDescriptor] = CONTRACT) -> None:
        self.target = ""
        self._services = {service.full_name: service for service in services}
        self.scripts: dict[str, Script] = {}
        self.requests: list[tuple[str, Message]] = []
        """What came in for a script, with the name of its RPC."""
        self.unscripted: list[str] = []
        """RPCs that came in and have no script."""
        self.calls: list[str] = []
        """The path of every call, of whatever service."""
        self.metadata: dict[str, str | bytes] = {}
        """The metadata of the last call."""
        self.cancelled = asyncio.Event()
        """Set once a script was ended by its client."""

    def answer(self, rpc: str, response: Message) -> None:
        """Has an RPC answer once, always with the same response."""

        async def script(request: Message, context: Context) -> Message:
            return response

        self.scripts[rpc] = script

    def stream(self, rpc: str, *responses: Message, hold: bool = False) -> None:
        """Has an RPC stream the responses and then end, or not end at all."""

        async def script(request: Message, context: Context) -> AsyncIterator[Message]:
            for response in responses:
                yield response
            if hold:
                await asyncio.Event().wait()

        self.scripts[rpc] = script

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        self.calls.append(details.method)
        _, name, rpc = details.method.split("/")
        if (service := self._services.get(name)) is None:
            return None
        method = service.methods_by_name[rpc]
        classes: Any = pb if service is pb.SERVICE else split
        codec = {
            "request_deserializer": getattr(classes, method.input_type.name).FromString,
            "response_serializer": getattr(classes, method.output_type.name).SerializeToString,
        }
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._streaming(rpc), **codec)
        return grpc.unary_unary_rpc_method_handler(self._once(rpc), **codec)

    def _once(self, name: str) -> Script:
        async def handle(request: Message, context: Context) -> Message:
            script = await self._script(name, request, context)
            try:
                response: Message = await script(request, context)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            return response

        return handle

    def _streaming(self, name: str) -> Script:
        async def handle(request: Message, context: Context) -> AsyncIterator[Message]:
            script = await self._script(name, request, context)
            try:
                async for response in script(request, context):
                    yield response
            except (asyncio.CancelledError, GeneratorExit):
                # The latter when the call ends while gRPC sends what was yielded.
                self.cancelled.set()
                raise

        return handle

    async def _script(self, name: str, request: Message, context: Context) -> Script:
        self.metadata = dict(context.invocation_metadata() or ())
        if name not in self.scripts:
            self.unscripted.append(name)
            error = unimplemented(name)
            await context.abort(error.status, error.message, error.trailing_metadata())
        self.requests.append((name, request))
        return self.scripts[name]


@asynccontextmanager
async def scripted_server(
    address: str = "127.0.0.1:0",
    credentials: grpc.ServerCredentials | None = None,
    services: Sequence[ServiceDescriptor] = CONTRACT,
) -> AsyncIterator[ScriptedServer]:
    """Serves on an address, by default on a free port of the loopback interface."""
    scripted = ScriptedServer(services)
    server = aio.server(options=server_options())
    server.add_generic_rpc_handlers((scripted,))
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    scripted.target = address if address.startswith("unix:") else f"127.0.0.1:{port}"
    await server.start()
    try:
        yield scripted
    finally:
        await server.stop(None)

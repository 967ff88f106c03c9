"""Generate calls that a test reads in the background while it does something to the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub

ENDLESS_TOKENS = 60_000
"""Tokens that no engine makes while a test lasts, where it serves with these flags."""
ENDLESS_FLAGS = ("--hf-overrides", '{"max_position_embeddings": 65536}')

PATIENCE_SECONDS = 120
"""How long a busy machine may take over anything that a test waits for."""


class RunningCall:
    """One Generate call, read as it comes.

    Args:
        channel: where to call.
        request: what to ask.
        timeout: seconds, the call's deadline.
    """

    def __init__(
        self, channel: aio.Channel, request: pb.GenerateRequest, timeout: float | None = None
    ) -> None:
        self.request = request
        self.responses: list[pb.GenerateResponse] = []
        self.call = OpenEngineStub(channel).Generate(request, timeout=timeout)
        self._changed = asyncio.Event()
        self._reader = asyncio.ensure_future(self._read())

    @property
    def token_ids(self) -> list[int]:
        """Tokens so far, over all outputs."""
        return [token.token_id for r in self.responses for token in r.token.tokens]

    @property
    def finished(self) -> list[pb.GenerationFinished]:
        """The outputs that have ended so far."""
        return [r.finished for r in self.responses if r.HasField("finished")]

    @property
    def errors(self) -> list[pb.EngineError]:
        """The error events: none or one."""
        return [r.error for r in self.responses if r.HasField("error")]

    @property
    def done(self) -> bool:
        """Whether the call has ended, one way or the other."""
        return self._reader.done()

    async def tokens(self, count: int = 1) -> None:
        """Wait until the outputs together have this many tokens.

        Raises:
            AssertionError: the call ended before, or took too long.
        """
        await self.until(lambda: len(self.token_ids) >= count, f"{count} tokens")

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that becomes true as responses come; raises as :meth:`tokens`."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                assert not self.done, f"ended before {what}: {self._reader}, {self.errors}"
                self._changed.clear()
                await self._changed.wait()

    async def end(self) -> grpc.StatusCode:
        """Wait for the call's end and return its status."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._reader

    def cancel(self) -> None:
        """Cancel the call as a client does."""
        self.call.cancel()

    async def _read(self) -> grpc.StatusCode:
        try:
            async for response in self.call:
                self.responses.append(response)
                self._changed.set()
        except aio.AioRpcError as error:
            return error.code()
        except asyncio.CancelledError:
            if not self.call.cancelled():
                raise
            return grpc.StatusCode.CANCELLED
        finally:
            self._changed.set()
        return grpc.StatusCode.OK


async def standard_status(channel: aio.Channel, service: str = "") -> int:
    """What grpc.health.v1 says of a service."""
    rpc: aio.UnaryUnaryMultiCallable[
        health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
    ] = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    return (await rpc(health_pb2.HealthCheckRequest(service=service))).status


async def eventually(condition: Callable[[], Any], what: str) -> None:
    """Poll ``condition``, a function or a coroutine function, until it gives something true.

    Raises:
        AssertionError: it took too long.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        result = condition()
        if isinstance(result, Awaitable):
            result = await result
        if result:
            return
        assert time.monotonic() < deadline, f"after {PATIENCE_SECONDS} s: {what}"
        await asyncio.sleep(0.02)

"""A server in the process of the tests, so that they can look at its tables."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpc import aio

from openengine_vllm.client import Client, generate_request
from openengine_vllm.lifecycle import Serving
from openengine_vllm.loading import load_engine
from openengine_vllm.process import Process
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.channel import client_options
from openengine_vllm.server import Server
from openengine_vllm.settings import add_server_arguments, server_settings
from tests.support.calls import RunningCall, eventually
from tests.support.warm import warm_children


@dataclass
class Running:
    """A server in this process, and a client of it."""

    server: Server
    target: str
    channel: aio.Channel
    client: Client

    @property
    def unfinished(self) -> int:
        """Requests that vLLM knows of."""
        return self.server.lifecycle.serving.engine.unfinished()

    async def release_prefix_cache(self) -> bool:
        """Have the engine empty its prefix cache; false while any request holds a block."""
        return await self.server.lifecycle.serving.engine._llm.reset_prefix_cache()

    async def idle(self) -> None:
        """Wait until neither table has a request."""
        await eventually(
            lambda: not len(self.server.registry) and not self.unfinished,
            f"idle: {len(self.server.registry)} of ours, {self.unfinished} of vLLM's",
        )
        assert self.server.registry.sequences == 0

    def call(self, tokens: int, **options: Any) -> RunningCall:
        """A greedy call for so many tokens."""
        return RunningCall(self.channel, request(tokens, **options))


def request(
    tokens: int, prompt: str | Sequence[int] = "Once", **options: Any
) -> pb.GenerateRequest:
    given: Any = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **options}
    return generate_request(prompt, given)


@contextlib.asynccontextmanager
async def serve(*argv: str) -> AsyncIterator[Running]:
    """A running server with these flags of vLLM's, on a free port."""
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    settings = server_settings(parser.parse_args(["--port", "0"]), {})
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def load(instance_id: str) -> Serving:
        with warm_children():
            return load_engine(list(argv), "openengine-vllm", settings, instance_id, "0")

    process = Process(settings, load, lambda addresses, _: ready.set_result(addresses.grpc))
    life = asyncio.ensure_future(process.run())
    waiting: list[asyncio.Future[Any]] = [life, ready]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if life.done():
        life.result()
    target = ready.result()
    try:
        async with (
            aio.insecure_channel(target, options=client_options()) as channel,
            Client(target) as client,
        ):
            yield Running(process.server, target, channel, client)
    finally:
        process.stop()
        assert await life == 0

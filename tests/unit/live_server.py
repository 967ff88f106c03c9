"""The whole server as the program starts it, on an engine whose output the test decides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast
from unittest import mock

from openengine_vllm import process as process_module
from openengine_vllm.kv_events.source import Publisher
from openengine_vllm.lifecycle import Serving
from openengine_vllm.process import Addresses, Process
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.server import Server
from tests.unit.scripted_engine import ScriptedEngine
from tests.unit.test_settings import parse


class LiveServer:
    """A server that runs, its address and its engine."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.address = ""
        self.metrics_address: str | None = None
        self.server: Server

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self.address.rsplit(":", 1)[1])

    @property
    def untouched(self) -> bool:
        """Whether no request and no probe but the start's has reached the engine."""
        return not self.engine.collectors and self.engine.probes == 1


@contextlib.asynccontextmanager
async def live_server(
    *flags: str,
    engine_info: pb.EngineInfo | None = None,
    kv_publishers: Sequence[Publisher] = (),
) -> AsyncIterator[LiveServer]:
    """A server with these flags, on a free port, until the context ends.

    Without an ``engine_info`` it is ``scripted`` with the server's own instance id.
    """
    live = LiveServer()
    live.engine.dead = False
    live.engine.shutdown = lambda: None  # type: ignore[attr-defined]
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def load(instance_id: str) -> Serving:
        return Serving(
            cast("Any", live.engine),
            engine_info or pb.EngineInfo(engine_name="scripted", instance_id=instance_id),
            pb.ModelInfo(served_model_name="model"),
            has_chat_template=False,
            kv_publishers=tuple(kv_publishers),
        )

    def on_ready(addresses: Addresses, serving: Serving) -> None:
        live.address, live.metrics_address = addresses.grpc, addresses.metrics
        ready.set_result(None)

    settings = parse("--port", "0", "--drain-timeout", "0", *flags)
    process = Process(settings, load, on_ready)
    live.server = process.server
    # The processes below this one are the tests' own.
    with mock.patch.object(process_module, "stop_descendants"):
        life = asyncio.ensure_future(process.run())
        waiting: list[asyncio.Future[Any]] = [life, ready]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            life.result()
        try:
            yield live
        finally:
            process.stop()
            await life

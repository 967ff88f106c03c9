"""The KV RPCs on a loopback port, over a bridge that follows scripted publishers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from grpc import aio

from openengine_vllm.kv_events.bridge import KvBridge
from openengine_vllm.kv_events.feed import Counts, RankFeed
from openengine_vllm.kv_events.settings import BridgeSettings
from openengine_vllm.kv_events.source import Patience, Publisher
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub
from openengine_vllm.services.handlers import Handler, service_handler
from openengine_vllm.services.kv_events import KvEventsService
from openengine_vllm.services.split import CONTROL
from openengine_vllm.services.stalls import StallWatch
from tests.support.kv_messages import BlockSet

PATIENCE = Patience(replay=2, replay_whole=10, silence=0.3)
SECONDS = 20


class KvService:
    """A bridge, its service, and a client's stub."""

    def __init__(self, bridge: KvBridge, service: KvEventsService) -> None:
        self.bridge = bridge
        self.service = service
        self.stub: Any = None
        self.target = ""

    def feed(self, rank: int = 0) -> RankFeed:
        """One rank's feed."""
        return self.bridge.ranks[rank].feed

    def counts(self, rank: int = 0) -> Counts:
        """What has happened to one rank."""
        return self.feed(rank).counts

    async def subscribe(self, *ranks: int, **fields: Any) -> Subscription:
        """A subscription that the server has accepted."""
        request = pb.SubscribeKvEventsRequest(data_parallel_ranks=ranks, **fields)
        call = self.stub.SubscribeKvEvents(request, timeout=60)
        await call.initial_metadata()
        return Subscription(call)


class Subscription:
    """One subscriber: what it got, and the set that follows from it."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.batches: list[pb.KvEventBatch] = []
        self.set = BlockSet()

    async def read(self, count: int = 1) -> list[pb.KvEventBatch]:
        """The next batches.

        Raises:
            AssertionError: an error, or the end, in place of one.
        """
        batches = []
        async with asyncio.timeout(SECONDS):
            for _ in range(count):
                response = await self.call.read()
                assert response is not aio.EOF
                assert response.HasField("batch"), response
                self.set.apply(response.batch)
                batches.append(response.batch)
        self.batches += batches
        return batches

    async def read_to(self, number: int) -> None:
        """Batches up to the one with this number."""
        while not self.batches or self.batches[-1].sequence_number < number:
            await self.read()

    async def rest(self) -> list[Any]:
        """All responses to the end."""
        async with asyncio.timeout(SECONDS):
            return [response async for response in self.call]


@contextlib.asynccontextmanager
async def kv_service(
    publishers: Sequence[Publisher],
    *,
    patience: Patience = PATIENCE,
    stall_timeout: float = 60,
    advertise_host: str | None = None,
    address: str | None = None,
    **settings: Any,
) -> AsyncIterator[KvService]:
    """A bridge that runs, and its RPCs."""
    stalls = StallWatch(stall_timeout)
    bridge = KvBridge(BridgeSettings(**settings), publishers, patience)
    service = KvEventsService(lambda: None, stalls)
    handlers: dict[str, Handler] = {
        "GetKvEventSources": service.sources,
        "SubscribeKvEvents": service.subscribe,
    }
    server = aio.server()
    control: dict[str, Handler] = {
        "GetKvEventSources": service.grpc_sources,
        "SubscribeKvEvents": service.subscribe_plain,
    }
    server.add_generic_rpc_handlers(
        (service_handler(pb.SERVICE, handlers), service_handler(CONTROL, control))
    )
    port = server.add_insecure_port("127.0.0.1:0")
    bridge.start()
    target = f"127.0.0.1:{port}"
    service.attach(bridge, address or target, advertise_host)
    await server.start()
    watching = asyncio.ensure_future(stalls.run())
    kv = KvService(bridge, service)
    kv.target = target
    try:
        async with aio.insecure_channel(target) as channel:
            kv.stub = OpenEngineStub(channel)
            yield kv
    finally:
        watching.cancel()
        service.end()
        await server.stop(0.2)
        await bridge.stop()

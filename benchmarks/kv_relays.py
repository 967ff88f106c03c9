"""Ways to bring KV events from a publisher to gRPC: this project's bridge, and what it is held
against.

- *plain*: what one would write down first. The batch is unpacked, and the contract's messages are
  built from it, block by block. Keeps nothing, so there is no snapshot, no replay, no set.
- *SMG*: the relay in PyPI's ``smg-grpc-servicer``, through its public functions, where that and
  ``smg-grpc-proto`` are installed. It has a schema of its own, with a message for each block,
  and converts anew for each subscriber.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc
import msgspec
import zmq
import zmq.asyncio

from openengine_vllm.kv_events.bridge import KvBridge
from openengine_vllm.kv_events.decode import decode
from openengine_vllm.kv_events.feed import RankFeed
from openengine_vllm.kv_events.receiver import Receiver
from openengine_vllm.kv_events.settings import BridgeSettings
from openengine_vllm.kv_events.source import Publisher
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub
from openengine_vllm.services.handlers import Handler, service_handler
from openengine_vllm.services.kv_events import KvEventsService
from openengine_vllm.services.stalls import StallWatch

BRIDGE, PLAIN, SMG = "openengine_vllm", "plain protobuf", "SMG relay"

Convert: TypeAlias = Callable[[int, bytes], object]
"""Takes a batch's number and payload as far as bytes for gRPC."""
Times: TypeAlias = AsyncIterator[float]
"""When each batch was made, in seconds since 1970, as its subscriber reads it."""
Subscribe: TypeAlias = Callable[[], contextlib.AbstractAsyncContextManager[Times]]
"""A subscriber that has been accepted."""


@dataclass(frozen=True, slots=True)
class Relay:
    """One way."""

    name: str
    decoder: Callable[[bytes], object]
    """The first part of the work."""
    converter: Callable[[], Convert]
    """All of the work, for batches numbered from 0."""
    serve: Callable[[str], contextlib.AbstractAsyncContextManager[Subscribe]] | None
    """Follow the publisher at an endpoint; None for one that is not served."""


def relays() -> list[Relay]:
    """All that can be run here, ours first."""
    found = [
        Relay(BRIDGE, decode, _our_converter, _bridge),
        Relay(PLAIN, msgspec.msgpack.decode, lambda: _plain, None),
    ]
    try:
        relay = importlib.import_module("smg_grpc_servicer.kv_relay")
        messages = importlib.import_module("smg_grpc_proto.generated.common_pb2")
    except ImportError:
        return found
    smg = _Smg(relay, messages)
    return [*found, Relay(SMG, relay.decode_batch, smg.converter, smg.serve)]


def _our_converter() -> Convert:
    return RankFeed(0, 1000, 2**30).live


def _plain(number: int, payload: bytes) -> bytes:
    time, events, rank = msgspec.msgpack.decode(payload)
    batch = pb.KvEventBatch(
        sequence_number=number, timestamp_unix_nanos=round(time * 1e9), data_parallel_rank=rank
    )
    for event in events:
        stored = batch.events.add().block_stored
        for value in event["block_hashes"]:
            stored.block_hashes.add(value=value.to_bytes(8, "big"), encoding="int64")
        if (parent := event["parent_block_hash"]) is not None:
            stored.parent_block_hash.value = parent.to_bytes(8, "big")
            stored.parent_block_hash.encoding = "int64"
        stored.token_ids.extend(event["token_ids"])
        stored.block_size = event["block_size"]
        stored.medium = pb.STORAGE_MEDIUM_GPU
        stored.group_idx = event["group_idx"]
        stored.kv_cache_spec_kind = event["kv_cache_spec_kind"]
        for _ in event["extra_keys"]:
            stored.extra_keys.add()
    return pb.SubscribeKvEventsResponse(batch=batch).SerializeToString()


@contextlib.asynccontextmanager
async def _bridge(endpoint: str) -> AsyncIterator[Subscribe]:
    async with _following(endpoint) as (bridge, service):
        handlers: dict[str, Handler] = {"SubscribeKvEvents": service.subscribe}
        async with _served(service_handler(pb.SERVICE, handlers)) as target:
            service.attach(bridge, target, None)
            try:
                yield partial(_over_grpc, target)
            finally:
                service.end()


@contextlib.asynccontextmanager
async def republisher(endpoint: str) -> AsyncIterator[Subscribe]:
    """The bridge's batches over ZMQ."""
    async with _following(endpoint) as (bridge, _):
        yield partial(_over_zmq, str(bridge.ranks[0].republisher.endpoint))


@contextlib.asynccontextmanager
async def _following(endpoint: str) -> AsyncIterator[tuple[KvBridge, KvEventsService]]:
    bridge = KvBridge(BridgeSettings(), [Publisher(0, endpoint)])
    bridge.start()
    try:
        yield bridge, KvEventsService(lambda: None, StallWatch(60))
    finally:
        await bridge.stop()


@contextlib.asynccontextmanager
async def _served(handler: grpc.GenericRpcHandler) -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield target
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def _over_grpc(target: str) -> AsyncIterator[Times]:
    async with grpc.aio.insecure_channel(target) as channel:
        call = OpenEngineStub(channel).SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        await call.initial_metadata()
        yield (response.batch.timestamp_unix_nanos / 1e9 async for response in call)
        call.cancel()


@contextlib.asynccontextmanager
async def _over_zmq(endpoint: str) -> AsyncIterator[Times]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)

    async def read(receiver: Receiver) -> Times:
        while True:
            batch = pb.KvEventBatch.FromString((await receiver.receive())[2])
            yield batch.timestamp_unix_nanos / 1e9

    with Receiver(socket) as receiver:
        yield read(receiver)
    context.destroy(linger=0)


class _Smg:
    """SMG's relay in a server of ours, as its own servicer calls it."""

    _METHOD = "SubscribeKvEvents"
    _SERVICE = "benchmark.Smg"

    def __init__(self, relay: Any, messages: Any) -> None:
        self._relay = relay
        self._messages = messages

    def converter(self) -> Convert:
        normalize, read = self._relay.Normalizer().normalize_batch, self._relay.decode_batch
        return lambda number, data: normalize(read(data), number, 0).SerializeToString()

    @contextlib.asynccontextmanager
    async def serve(self, endpoint: str) -> AsyncIterator[Subscribe]:
        sources = [self._relay.RankSource(0, endpoint)]
        context = zmq.asyncio.Context()

        async def subscribe(request: Any, call: Any) -> AsyncIterator[Any]:
            engine = self._relay.Engine.VLLM
            batches = self._relay.relay(sources, engine, 0, call, zmq_context=context)
            async for batch in batches:
                yield batch

        method = grpc.unary_stream_rpc_method_handler(
            subscribe,
            request_deserializer=self._messages.SubscribeKvEventsRequest.FromString,
            response_serializer=self._messages.KvEventBatch.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(self._SERVICE, {self._METHOD: method})
        async with _served(handler) as target:
            yield partial(self._subscribe, target)
        context.destroy(linger=0)

    @contextlib.asynccontextmanager
    async def _subscribe(self, target: str) -> AsyncIterator[Times]:
        async with grpc.aio.insecure_channel(target) as channel:
            call: Any = channel.unary_stream(
                f"/{self._SERVICE}/{self._METHOD}",
                request_serializer=self._messages.SubscribeKvEventsRequest.SerializeToString,
                response_deserializer=self._messages.KvEventBatch.FromString,
            )(self._messages.SubscribeKvEventsRequest())
            await call.initial_metadata()
            yield (batch.timestamp async for batch in call)
            call.cancel()

"""What a KV event costs the bridge: ``python -m benchmarks.kv_events``.

First the work itself, without sockets: a batch is decoded, followed by the mirror, converted and
serialised, as in the server. Then the way from a publisher to a subscriber, over ZMQ and gRPC on
this machine, all in one process: its figures hold the publisher's and the subscriber's work too.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence

import grpc
import msgspec
import zmq

from benchmarks.report import table
from benchmarks.timing import percentile
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

BLOCK = 16
VOCABULARY = 128_000


def _stored(first: int, blocks: int, parent: int | None) -> dict[str, object]:
    # Hashes and token ids as they are with a real model: all over their range.
    hashes = [(first + n) * 0x9E3779B97F4A7C15 % 2**64 for n in range(blocks)]
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [(first * 7919 + n * 104_729) % VOCABULARY for n in range(blocks * BLOCK)],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * blocks,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _payload(events: Sequence[object], ts: float = 1.7e9) -> bytes:
    return msgspec.msgpack.encode([ts, events, 0])


def _shapes(batches: int) -> Iterator[tuple[str, int, list[bytes]]]:
    """Name, blocks a batch, and batches that are all new to a mirror."""
    chain = [_payload([_stored(64 * n, 64, None)]) for n in range(batches)]
    yield "1 stored event of 64 blocks", 64, chain
    single = [_payload([_stored(64 * n + m, 1, 5) for m in range(64)]) for n in range(batches)]
    yield "64 stored events of 1 block", 64, single


def _measure_work(batches: int, rounds: int) -> None:
    rows = []
    for name, blocks, payloads in _shapes(batches):
        decoding, whole = [], []
        for _ in range(rounds):
            start = time.process_time()
            for data in payloads:
                decode(data)
            decoding.append((time.process_time() - start) / batches / blocks * 1e6)
            feed = RankFeed(0, 1000, 2**30)
            start = time.process_time()
            for number, data in enumerate(payloads):
                feed.live(number, data)
            whole.append((time.process_time() - start) / batches / blocks * 1e6)
        rows.append(
            [name, f"{min(decoding):.2f}", f"{min(whole):.2f}", f"{sorted(whole)[rounds // 2]:.2f}"]
        )
    print(
        table(
            ["batch", "decode µs/block", "all µs/block, best", "all µs/block, median"],
            rows,
        )
    )


def _measure_memory_and_snapshot(blocks: int) -> None:
    payloads = [_payload([_stored(64 * n, 64, None)]) for n in range(blocks // 64)]
    tracemalloc.start()
    feed = RankFeed(0, 1, 1)
    before, _ = tracemalloc.get_traced_memory()
    for number, data in enumerate(payloads):
        feed.live(number, data)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(
        f"{len(feed.mirror)} live blocks: {(after - before) / len(feed.mirror):.0f} bytes a block"
    )
    for _ in range(3):
        steps, total, start = [], 0, time.thread_time()
        snapshot = feed.snapshot()
        assert snapshot is not None
        steps.append(time.thread_time() - start)
        responses = snapshot.responses()
        while True:
            start = time.thread_time()
            response = next(responses, b"")
            steps.append(time.thread_time() - start)
            if response == b"":
                break
            total += len(response or b"")
        print(
            f"a snapshot of them: {total / 2**20:.1f} MiB in {sum(steps) * 1e3:.0f} ms of CPU, "
            f"the longest step without a turn of the event loop {max(steps) * 1e3:.1f} ms"
        )


async def _measure_way(batches: int, per_second: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.SNDHWM, 0)
    publisher.bind("tcp://127.0.0.1:*")
    endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT)
    bridge = KvBridge(BridgeSettings(), [Publisher(0, endpoint)])
    stalls = StallWatch(60)
    service = KvEventsService(lambda: None, stalls)
    server = grpc.aio.server()
    handlers: dict[str, Handler] = {"SubscribeKvEvents": service.subscribe}
    server.add_generic_rpc_handlers((service_handler(pb.SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    bridge.start()
    service.attach(bridge, f"127.0.0.1:{port}", None)
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    call = OpenEngineStub(channel).SubscribeKvEvents(pb.SubscribeKvEventsRequest())
    await call.initial_metadata()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.RCVHWM, 0)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(str(bridge.ranks[0].republisher.endpoint))
    with Receiver(publisher) as subscriptions, Receiver(subscriber) as receiver:
        await subscriptions.receive()
        await asyncio.sleep(0.5)
        over_grpc: list[float] = []
        over_zmq: list[float] = []

        async def read_grpc() -> None:
            async for response in call:
                over_grpc.append(time.time() - response.batch.timestamp_unix_nanos / 1e9)
                if response.batch.sequence_number == batches - 1:
                    return

        async def read_zmq() -> None:
            while len(over_zmq) < batches:
                _, _, data = await receiver.receive()
                batch = pb.KvEventBatch.FromString(data)
                over_zmq.append(time.time() - batch.timestamp_unix_nanos / 1e9)

        readers = [asyncio.ensure_future(read_grpc()), asyncio.ensure_future(read_zmq())]
        start = time.perf_counter()
        for number in range(batches):
            data = _payload([_stored(4 * number, 4, None)], time.time())
            publisher.send_multipart((b"", number.to_bytes(8, "big"), data))
            due = start + number / per_second if per_second else 0.0
            await asyncio.sleep(max(due - time.perf_counter(), 0))
        await asyncio.gather(*readers)
        seconds = time.perf_counter() - start
    service.end()
    await channel.close()
    await server.stop(0)
    await bridge.stop()
    context.destroy(linger=0)
    pace = f"at {per_second} batches/s" if per_second else "as fast as it goes"
    print(f"{batches} batches of 4 blocks {pace}: {batches / seconds:.0f} batches/s")
    if per_second:
        rows = [
            [name, *(f"{percentile(times, share) * 1e3:.2f}" for share in (50, 99))]
            for name, times in (("gRPC", over_grpc), ("ZMQ", over_zmq))
        ]
        print(table(["publisher to subscriber over", "p50, ms", "p99, ms"], rows))


def main(argv: Sequence[str]) -> None:
    """Run all and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=500, help="of 64 blocks (500)")
    parser.add_argument("--rounds", type=int, default=7, help="of the work alone (7)")
    parser.add_argument("--blocks", type=int, default=200_000, help="in the snapshot (200000)")
    parser.add_argument("--way", type=int, default=5000, help="batches over the sockets (5000)")
    args = parser.parse_args(argv)
    _measure_work(args.batches, args.rounds)
    _measure_memory_and_snapshot(args.blocks)
    asyncio.run(_measure_way(args.way, 0))
    asyncio.run(_measure_way(args.way, 1000))
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main(sys.argv[1:])

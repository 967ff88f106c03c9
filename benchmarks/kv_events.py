"""What a KV event costs: ``python -m benchmarks.kv_events``.

First the work itself, without sockets: a batch is decoded, followed by the mirror, converted and
serialised, as in the server; others that do less or the same take turns with it. Then the way from
a publisher to subscribers over ZMQ and gRPC on this machine, all in one process: its figures hold
the publisher's and the subscribers' work too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

import msgspec
import uvloop
import zmq

from benchmarks.kv_relays import BRIDGE, SMG, Relay, Subscribe, Times, relays, republisher
from benchmarks.program import say
from benchmarks.report import table
from benchmarks.timing import percentile
from openengine_vllm import logs
from openengine_vllm.kv_events.feed import RankFeed
from openengine_vllm.kv_events.receiver import Receiver

Serve: TypeAlias = Callable[[str], AbstractAsyncContextManager[Subscribe]]

_WAY_ROUNDS = 3
_SETTLE_SECONDS = 0.5
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


def _measure_work(relays: Sequence[Relay], batches: int, rounds: int) -> None:
    rows = []
    for shape, blocks, payloads in _shapes(batches):
        decoding: dict[str, list[float]] = {relay.name: [] for relay in relays}
        whole: dict[str, list[float]] = {relay.name: [] for relay in relays}
        for _ in range(rounds):
            for relay in relays:
                scale = 1e6 / batches / blocks
                start = time.process_time()
                for data in payloads:
                    relay.decoder(data)
                decoding[relay.name].append((time.process_time() - start) * scale)
                convert = relay.converter()
                start = time.process_time()
                for number, data in enumerate(payloads):
                    convert(number, data)
                whole[relay.name].append((time.process_time() - start) * scale)
                del convert
        for relay in relays:
            name = relay.name
            ratios = [other / ours for other, ours in zip(whole[name], whole[BRIDGE], strict=True)]
            rows.append(
                [
                    shape,
                    name,
                    f"{min(decoding[name]):.2f}",
                    f"{min(whole[name]):.2f}",
                    f"{median(whole[name]):.2f}",
                    f"{median(ratios):.2f}",
                ]
            )
    heads = ["batch", "by", "decode µs/block", "all µs/block, best", "median", "to ours, median"]
    print(table(heads, rows))


def _measure_memory(payloads: Sequence[bytes]) -> None:
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


def _measure_stalls(payloads: Sequence[bytes]) -> None:
    """CPU time between two turns of the event loop, the garbage collector's included."""
    feed = RankFeed(0, 1, 1)
    steps = [_timed(feed.live, number, data)[0] for number, data in enumerate(payloads)]
    print(f"longest batch of 64 blocks until they are all live: {max(steps) * 1e3:.1f} ms")
    for _ in range(3):
        seconds, snapshot = _timed(feed.snapshot)
        assert snapshot is not None
        steps, total, responses = [seconds], 0, snapshot.responses()
        del snapshot
        while True:
            seconds, response = _timed(next, responses, b"")
            steps.append(seconds)
            if response == b"":
                break
            total += len(response or b"")
        print(
            f"a snapshot of them: {total / 2**20:.1f} MiB in {sum(steps) * 1e3:.0f} ms, "
            f"the longest step {max(steps) * 1e3:.1f} ms"
        )
    for blocks in (512, 1024, 4096):
        seconds, _ = _timed(
            feed.live, feed.log.next, _payload([_stored(10**9 + blocks, blocks, None)])
        )
        print(f"one batch of {blocks} blocks: {seconds * 1e3:.1f} ms")
    live = len(feed.mirror)
    seconds, _ = _timed(feed.live, feed.log.next, _payload([{"type": "AllBlocksCleared"}]))
    print(f"AllBlocksCleared of {live} blocks: {seconds * 1e3:.1f} ms")


def _timed(function: Callable[..., Any], *arguments: object) -> tuple[float, Any]:
    start = time.thread_time()
    result = function(*arguments)
    return time.thread_time() - start, result


@dataclass(frozen=True, slots=True)
class _Way:
    """What subscribers saw of one pass."""

    rate: float
    """Batches a second."""
    ages: list[float]
    """Of each batch as it is read, in seconds."""


async def _way(serve: Serve, subscribers: int, batches: int, per_second: int) -> _Way:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.SNDHWM, 0)
    publisher.bind("tcp://127.0.0.1:*")
    endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT)
    ages: list[float] = []
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        subscriptions = stack.enter_context(Receiver(publisher))
        subscribe = await stack.enter_async_context(serve(endpoint))
        streams = [await stack.enter_async_context(subscribe()) for _ in range(subscribers)]
        await subscriptions.receive()
        await asyncio.sleep(_SETTLE_SECONDS)

        async def read(stream: Times) -> None:
            count = 0
            async for made in stream:
                ages.append(time.time() - made)
                count += 1
                if count == batches:
                    return

        readers = [asyncio.ensure_future(read(stream)) for stream in streams]
        start = time.perf_counter()
        for number in range(batches):
            data = _payload([_stored(4 * number, 4, None)], time.time())
            publisher.send_multipart((b"", number.to_bytes(8, "big"), data))
            due = start + number / per_second if per_second else 0.0
            await asyncio.sleep(max(due - time.perf_counter(), 0))
        async with asyncio.timeout(120):
            await asyncio.gather(*readers)
        rate = batches / (time.perf_counter() - start)
    return _Way(rate, ages)


async def _measure_way(relays: Sequence[Relay], batches: int, per_second: int) -> None:
    ways: dict[str, Serve] = {
        f"{relay.name}, gRPC": relay.serve for relay in relays if relay.serve is not None
    }
    ways[f"{BRIDGE}, ZMQ"] = republisher
    rows: list[list[str]] = []
    for subscribers in (1, 8):
        passes: dict[str, list[_Way]] = {name: [] for name in ways}
        paced: dict[str, list[_Way]] = {name: [] for name in ways}
        for _ in range(_WAY_ROUNDS):
            for name, serve in ways.items():
                passes[name].append(await _way(serve, subscribers, batches, 0))
                paced[name].append(await _way(serve, subscribers, batches, per_second))
        ours = passes[f"{BRIDGE}, gRPC"]
        for name, made in passes.items():
            ratios = [one.rate / our.rate for one, our in zip(made, ours, strict=True)]
            late = [
                median(percentile(one.ages, share) * 1e3 for one in paced[name])
                for share in (50, 99)
            ]
            rows.append(
                [
                    name,
                    f"{subscribers}",
                    f"{median(one.rate for one in made):.0f}",
                    f"{median(ratios):.2f}",
                    f"{late[0]:.2f} / {late[1]:.2f}",
                ]
            )
    print(f"{batches} batches of one stored event of 4 blocks, medians of {_WAY_ROUNDS} rounds")
    late_head = f"publisher to subscriber at {per_second} batches/s, p50 / p99 ms"
    print(table(["way", "subscribers", "batches/s at most", "to ours", late_head], rows))


def main(argv: Sequence[str]) -> None:
    """Run all and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=500, help="of 64 blocks (500)")
    parser.add_argument("--rounds", type=int, default=7, help="of the work alone (7)")
    parser.add_argument("--blocks", type=int, default=200_000, help="in the snapshot (200000)")
    parser.add_argument("--way", type=int, default=5000, help="batches over the sockets (5000)")
    parser.add_argument("--rate", type=int, default=500, help="batches/s for the latency (500)")
    args = parser.parse_args(argv)
    logs.configure("warning")
    there = relays()
    if SMG not in (relay.name for relay in there):
        say("SMG's relay is left out: smg-grpc-servicer and smg-grpc-proto are not installed")
    _measure_work(there, args.batches, args.rounds)
    payloads = [_payload([_stored(64 * n, 64, None)]) for n in range(args.blocks // 64)]
    _measure_memory(payloads)
    _measure_stalls(payloads)
    uvloop.run(_measure_way(there, args.way, args.rate))
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main(sys.argv[1:])

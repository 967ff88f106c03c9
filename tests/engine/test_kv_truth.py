"""KV events against a live engine whose cache is small: everybody has the same set, and it is true.

Blocks come and go all the while. What a subscriber has after a batch is compared with what a
snapshot of that batch has, with one that dropped off and resumed, and with one that reads our ZMQ
sockets; the hashes are computed anew from the tokens; and what the engine then reuses of a prompt
is what the set has of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pickle
import random
from collections.abc import AsyncIterator, Sequence

import zmq

from openengine_vllm.kv_events.receiver import Receiver
from openengine_vllm.kv_events.source import END
from openengine_vllm.protocol import v1 as pb
from tests.engine.peers import EngineSlot, Peer, connected
from tests.support.calls import eventually
from tests.support.kv_messages import BlockSet, Key
from tests.support.models import model_dir
from tests.support.server import start_server

BLOCK = 32
BLOCKS = 40
CONTEXT = 512
REQUESTS = 400
MOMENTS = 50
PROBES = 25
SALTS = ("", "", "", "pepper")
FLAGS = (
    *("--served-model-name", "tiny"),
    *("--max-num-seqs", "6"),
    *("--max-model-len", str(CONTEXT)),
    *("--block-size", str(BLOCK)),
    *("--num-gpu-blocks-override", str(BLOCKS)),
    "--enable-prefix-caching",
    "--enforce-eager",
)


class Follower:
    """A subscriber that keeps the set after each batch."""

    def __init__(self, peer: Peer, start: int = 0) -> None:
        self.set = BlockSet()
        self.history: dict[int, frozenset[Key]] = {}
        self.last = -1
        self._call = peer.stub.SubscribeKvEvents(
            pb.SubscribeKvEventsRequest(include_snapshot=not start, start_sequence_number=start)
        )
        self._reading: asyncio.Future[None] | None = None

    async def begin(self) -> None:
        """Start reading once the server has accepted."""
        await self._call.initial_metadata()
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for response in self._call:
            assert response.HasField("batch"), response
            self.take(response.batch)

    def take(self, batch: pb.KvEventBatch) -> None:
        """Follow one batch."""
        assert self.last < 0 or batch.sequence_number in (self.last, self.last + 1)
        self.set.apply(batch)
        self.last = batch.sequence_number
        self.history[self.last] = frozenset(self.set.blocks)

    async def leave(self) -> None:
        """Stop reading."""
        self._call.cancel()
        if self._reading is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading


async def snapshot(peer: Peer) -> tuple[int, BlockSet]:
    """What is live, and after which batch."""
    call = peer.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(include_snapshot=True))
    response = await call.read()
    call.cancel()
    assert isinstance(response, pb.SubscribeKvEventsResponse)
    reader = BlockSet()
    reader.apply(response.batch)
    return response.batch.sequence_number, reader


async def settled(peer: Peer, first: Follower) -> int:
    """Wait until the last batch of all finished requests is there."""

    async def is_settled() -> bool:
        number, _ = await snapshot(peer)
        await asyncio.sleep(0.1)
        again, _ = await snapshot(peer)
        return number == again == first.last

    await eventually(is_settled, "no more batches")
    return first.last


def digests(token_ids: Sequence[int], salt: str) -> list[bytes]:
    """The hashes of a prompt's full blocks, as vLLM defines them."""

    def digest(value: object) -> bytes:
        return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()

    parent, chain = digest(os.environ.get("PYTHONHASHSEED", "vllm-none-hash")), []
    for index in range(len(token_ids) // BLOCK):
        extra = (("cache_salt", salt),) if salt and not index else None
        parent = digest((parent, tuple(token_ids[index * BLOCK : (index + 1) * BLOCK]), extra))
        chain.append(parent[-8:])
    return chain


def check_hashes(reader: BlockSet) -> int:
    """Compute each block's hash from the tokens up to it; returns how many there were."""
    chains: dict[bytes, tuple[list[int], str]] = {}
    blocks = {key[2]: block for key, block in reader.blocks.items()}

    def prompt_of(value: bytes) -> tuple[list[int], str]:
        if value not in chains:
            block = blocks[value]
            [keys] = block.extra_keys
            if block.HasField("parent_block_hash"):
                tokens, salt = prompt_of(block.parent_block_hash.value)
                assert not keys.values
            else:
                tokens, salt = [], keys.values[0].strip('"') if keys.values else ""
            chains[value] = (tokens + list(block.token_ids), salt)
        return chains[value]

    for value in blocks:
        assert digests(*prompt_of(value))[-1] == value
    return len(blocks)


@contextlib.asynccontextmanager
async def zmq_follower(peer: Peer) -> AsyncIterator[Follower]:
    """One that reads our ZMQ sockets: a replay of everything, then live batches."""
    sources = await peer.client.kv_event_sources()
    [source] = [s for s in sources.sources if (s.transport, s.encoding) == ("zmq", "protobuf")]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    live, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    live.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
    live.setsockopt(zmq.RCVHWM, 0)
    address = source.endpoint_addr
    live.connect(f"tcp://{address.host}:{address.port}")
    replay.connect(source.replay_endpoint)
    follower = Follower(peer)

    async def read() -> None:
        with Receiver(live) as batches, Receiver(replay) as answers:
            replay.send_multipart([b"", bytes(8)])
            while (frames := await answers.receive())[2] != END:
                follower.take(pb.KvEventBatch.FromString(frames[3]))
            while True:
                _, number, data = await batches.receive()
                if int.from_bytes(number, "big") > follower.last:
                    follower.take(pb.KvEventBatch.FromString(data))

    reading = asyncio.ensure_future(read())
    try:
        yield follower
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        context.destroy(linger=0)


async def test_everybody_has_the_same_set_and_it_is_true(engines: EngineSlot) -> None:
    engines.clear()
    chance = random.Random(5)
    prefixes = [[chance.randrange(20, 1000) for _ in range(300)] for _ in range(6)]

    def prompt() -> list[int]:
        shared = chance.choice(prefixes)[: chance.randrange(300)]
        return shared + [chance.randrange(20, 1000) for _ in range(chance.randrange(1, 80))]

    arguments = ("--model", str(model_dir("tiny_llama")), "--port", "0", *FLAGS)
    with start_server(*arguments) as server:
        async with connected(server) as peer:
            first = Follower(peer)
            await first.begin()
            room = asyncio.Semaphore(8)
            prompts: list[tuple[list[int], str]] = []

            async def ask(token_ids: list[int], salt: str) -> None:
                async with room:
                    options = {"cache_salt": salt} if salt else {}
                    await peer.generate(
                        token_ids,
                        max_tokens=chance.randrange(1, 70),
                        ignore_eos=True,
                        **options,  # type: ignore[arg-type]
                    )

            async def run() -> None:
                for _ in range(REQUESTS):
                    prompts.append((prompt(), chance.choice(SALTS)))
                await asyncio.gather(*(ask(*one) for one in prompts))

            async with zmq_follower(peer) as over_zmq:
                running = asyncio.ensure_future(run())
                await eventually(lambda: first.last >= 0, "the first batch")
                compared = 0
                resuming = Follower(peer)
                await resuming.begin()
                while compared < MOMENTS:
                    number, reader = await snapshot(peer)
                    await eventually(lambda n=number: first.last >= n, "it")  # type: ignore[misc]
                    assert frozenset(reader.blocks) == first.history[number]
                    compared += 1
                    if compared % 10 == 0:
                        await resuming.leave()
                        again = Follower(peer, resuming.last + 1)
                        again.set, again.last = resuming.set, resuming.last
                        again.history = resuming.history
                        resuming = again
                        await resuming.begin()
                    await asyncio.sleep(chance.random() * 0.2)
                await running
                last = await settled(peer, first)
                for other in (resuming, over_zmq):
                    await eventually(lambda o=other: o.last == last, "the last batch")  # type: ignore[misc]
                    assert all(first.history[n] == keys for n, keys in other.history.items())
                    assert other.set.blocks == first.set.blocks
                assert min(over_zmq.history) == min(first.history) == 0
                stored = {key for keys in first.history.values() for key in keys}
                assert len(stored) > 3 * BLOCKS, "hardly anything was evicted"
                assert check_hashes(first.set) > BLOCKS // 2
            for token_ids, salt in chance.sample(prompts, PROBES):
                await settled(peer, first)
                live = {key[2] for key in first.set.blocks}
                chain = digests(token_ids, salt)
                have = next((n for n, value in enumerate(chain) if value not in live), len(chain))
                expected = min(have, (len(token_ids) - 1) // BLOCK) * BLOCK
                options = {"cache_salt": salt} if salt else {}
                generation = await peer.generate(token_ids, max_tokens=1, **options)  # type: ignore[arg-type]
                assert generation.usage is not None
                assert generation.usage.cached_prompt_tokens == expected
            await resuming.leave()
            await first.leave()

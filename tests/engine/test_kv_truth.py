"""KV events against a live engine whose cache is small: everybody has the same set, and it is true.

Blocks come and go all the while, of the model and of two adapters, from requests of gRPC and of
HTTP, and the cache is reset again and again, idle and in full run. At random moments one who has
been there from the start is compared with one who joins with a snapshot, with one who drops off
and resumes, with one who reads our ZMQ sockets, and with one who reads Control's events; the hash
of every block is computed anew from the tokens; and what the engine then reuses of a prompt is
what the set has of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import pickle
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import aiohttp
import pytest
import zmq

from openengine_vllm.client import GenerateOptions
from openengine_vllm.kv_events.receiver import Receiver
from openengine_vllm.kv_events.source import END
from openengine_vllm.protocol import split
from openengine_vllm.protocol import v1 as pb
from tests.engine.peers import EngineSlot, Peer, connected
from tests.support.calls import eventually
from tests.support.field_client import KvReader
from tests.support.kv_messages import BlockSet, Key
from tests.support.models import ADAPTER_RANK, model_dir
from tests.support.server import start_server
from tests.support.sizes import sized

pytestmark = pytest.mark.timeout(3600)

REQUESTS = sized(200, 5000)
BLOCK = 32
BLOCKS = 40
CONTEXT = 512
MOMENTS = sized(20, 50)
ROUND = sized(50, 100)
"""Requests between two resets of the idle cache; one of the busy cache comes in between."""
PROBES = sized(10, 25)
AT_ONCE = 8
SALTS = ("", "", "", "pepper")
ADAPTERS = {"a": "tiny_llama_lora_a", "b": "tiny_llama_lora_b"}
MODELS = ("", "", *ADAPTERS)
FLAGS = (
    *("--served-model-name", "tiny"),
    *("--max-num-seqs", "6"),
    *("--max-model-len", str(CONTEXT)),
    *("--block-size", str(BLOCK)),
    *("--num-gpu-blocks-override", str(BLOCKS)),
    "--enable-prefix-caching",
    "--enforce-eager",
    *("--http-port", "0"),
    "--enable-prompt-tokens-details",
    "--enable-lora",
    *("--max-loras", str(len(ADAPTERS))),
    *("--max-lora-rank", str(ADAPTER_RANK)),
)


def adapter_flags() -> tuple[str, ...]:
    """Have the adapters served."""
    return "--lora-modules", *(f"{name}={model_dir(model)}" for name, model in ADAPTERS.items())


@dataclass(frozen=True)
class Prompt:
    """What a request's blocks are known by."""

    token_ids: tuple[int, ...]
    salt: str
    adapter: str

    def hashes(self) -> list[bytes]:
        """Of its full blocks, as vLLM defines them."""
        parent, chain = ROOT, []
        for start in range(0, len(self.token_ids) - BLOCK + 1, BLOCK):
            tokens = self.token_ids[start : start + BLOCK]
            parent = block_digest(parent, tokens, self.adapter, "" if start else self.salt)
            chain.append(parent[-8:])
        return chain


def digest(value: object) -> bytes:
    """As vLLM hashes with sha256."""
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


ROOT = digest(os.environ.get("PYTHONHASHSEED", "vllm-none-hash"))


def block_digest(parent: bytes, tokens: Sequence[int], adapter: str, salt: str) -> bytes:
    """The whole hash of a block; events tell its last 8 bytes."""
    extra: list[tuple[str, ...]] = []
    if adapter:
        extra.append(("lora", adapter, str(model_dir(ADAPTERS[adapter]))))
    if salt:
        extra.append(("cache_salt", salt))
    return digest((parent, tuple(tokens), tuple(extra) or None))


class Follower:
    """Has the set after each batch, whatever way the batches come."""

    def __init__(self) -> None:
        self.set = BlockSet()
        self.history: dict[int, frozenset[Key]] = {}
        self.last = -1
        self.clears = 0
        self._reading: asyncio.Future[None]

    def read(self, batches: Coroutine[Any, Any, None]) -> None:
        """Have them come, by calls of :meth:`take`."""
        self._reading = asyncio.ensure_future(batches)

    def take(self, batch: pb.KvEventBatch) -> None:
        """Follow one batch."""
        assert self.last < 0 or batch.sequence_number == self.last + 1
        self.set.apply(batch)
        self.last = batch.sequence_number
        self.history[self.last] = frozenset(self.set.blocks)
        self.clears += sum(event.HasField("all_blocks_cleared") for event in batch.events)

    async def reach(self, number: int) -> None:
        """Wait for a batch, or a later one.

        Raises:
            AssertionError: something is wrong with the batches, or there are no more.
        """

        def is_there() -> bool:
            if self._reading.done():
                self._reading.result()
                raise AssertionError("the batches have ended")
            return self.last >= number

        await eventually(is_there, f"batch {number}")

    async def leave(self) -> None:
        """Stop reading.

        Raises:
            AssertionError: something was wrong with the batches.
        """
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading


class Witness(Follower):
    """Has been there from the start, and checks the hashes of all blocks that are stored."""

    def __init__(self) -> None:
        super().__init__()
        self._whole: dict[bytes, bytes] = {}
        self.stored: Counter[tuple[str, bool]] = Counter()
        """Blocks by adapter, and by whether they have a salt of their own."""
        self._salted: set[bytes] = set()

    def plain_history(self) -> dict[int, frozenset[int]]:
        """What Control's clients have after each batch: all but what hangs on a salt."""
        return {
            number: frozenset(
                int.from_bytes(value, "big", signed=True)
                for _, _, value in keys
                if value not in self._salted
            )
            for number, keys in self.history.items()
        }

    def take(self, batch: pb.KvEventBatch) -> None:
        """Follow one batch."""
        super().take(batch)
        for event in batch.events:
            if event.HasField("block_stored"):
                self._check(event.block_stored)

    def _check(self, event: pb.BlockStored) -> None:
        parent, salted = ROOT, False
        if event.HasField("parent_block_hash"):
            parent = self._whole[event.parent_block_hash.value]
            salted = event.parent_block_hash.value in self._salted
        for index, block in enumerate(event.block_hashes):
            keys = [json.loads(value) for value in event.extra_keys[index].values]
            if event.lora_name:
                assert keys.pop(0) == event.lora_name
                assert event.lora_id == 1 + list(ADAPTERS).index(event.lora_name)
            [salt] = keys or [""]
            tokens = event.token_ids[index * BLOCK : (index + 1) * BLOCK]
            parent = block_digest(parent, tokens, event.lora_name, salt)
            assert parent[-8:] == block.value
            self._whole[block.value] = parent
            if salted := salted or bool(salt):
                self._salted.add(block.value)
            self.stored[event.lora_name, bool(salt)] += 1


class PlainFollower(KvReader):
    """One who reads Control's events, and has been there from the start."""

    def __init__(self, target: str) -> None:
        super().__init__(target, 0, BLOCK, ADAPTERS)
        self.history: dict[int, frozenset[int]] = {}

    def take(self, batch: split.KvEventBatch, *, snapshot: bool = False) -> bool:
        """Follow one batch."""
        more = super().take(batch, snapshot=snapshot)
        self.history[batch.sequence_number] = frozenset(self.blocks)
        return more


async def subscribe(peer: Peer, follower: Follower, start: int = 0) -> None:
    """Have it follow over gRPC, from a batch or with a snapshot."""
    call = peer.stub.SubscribeKvEvents(
        pb.SubscribeKvEventsRequest(include_snapshot=not start, start_sequence_number=start)
    )
    await call.initial_metadata()

    async def read() -> None:
        try:
            async for response in call:
                assert response.HasField("batch"), response
                follower.take(response.batch)
        finally:
            call.cancel()

    follower.read(read())


async def join(peer: Peer) -> Follower:
    """One that has a snapshot."""
    follower = Follower()
    await subscribe(peer, follower)
    await follower.reach(0)
    return follower


async def drop_off(peer: Peer, follower: Follower, chance: random.Random) -> None:
    """Leave, and come back for what was missed."""
    await follower.leave()
    await asyncio.sleep(chance.random() * 0.5)
    await subscribe(peer, follower, follower.last + 1)


@contextlib.asynccontextmanager
async def zmq_follower(peer: Peer) -> AsyncIterator[Follower]:
    """One that reads our ZMQ sockets: a replay of everything, then live batches."""
    sources = await peer.client.kv_event_sources()
    [source] = [s for s in sources.sources if (s.transport, s.encoding) == ("zmq", "protobuf")]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    live, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    live.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
    live.setsockopt(zmq.RCVHWM, 0)
    replay.setsockopt(zmq.RCVHWM, 0)
    address = source.endpoint_addr
    live.connect(f"tcp://{address.host}:{address.port}")
    replay.connect(source.replay_endpoint)
    follower = Follower()

    async def read() -> None:
        with Receiver(live) as batches, Receiver(replay) as answers:
            while True:
                replay.send_multipart([b"", (follower.last + 1).to_bytes(8, "big")])
                while (frames := await answers.receive())[2] != END:
                    follower.take(pb.KvEventBatch.FromString(frames[3]))
                while True:
                    _, number, data = await batches.receive()
                    if int.from_bytes(number, "big") > follower.last + 1:
                        break
                    if int.from_bytes(number, "big") > follower.last:
                        follower.take(pb.KvEventBatch.FromString(data))

    follower.read(read())
    try:
        yield follower
        await follower.leave()
    finally:
        context.destroy(linger=0)


@dataclass
class Asking:
    """Requests to one engine, over both of its servers."""

    peer: Peer
    http: aiohttp.ClientSession
    url: str

    async def cached_tokens(self, prompt: Prompt, max_tokens: int) -> int:
        """Run a request to its end; returns the prompt tokens that were not computed."""
        if prompt.adapter:
            return await self._over_http(prompt, max_tokens)
        options: GenerateOptions = {"max_tokens": max_tokens, "ignore_eos": True}
        if prompt.salt:
            options["cache_salt"] = prompt.salt
        generation = await self.peer.generate(prompt.token_ids, **options)
        assert generation.usage is not None
        assert generation.usage.completion_tokens == max_tokens
        return generation.usage.cached_prompt_tokens

    async def _over_http(self, prompt: Prompt, max_tokens: int) -> int:
        body: dict[str, Any] = {
            "model": prompt.adapter,
            "prompt": prompt.token_ids,
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        if prompt.salt:
            body["cache_salt"] = prompt.salt
        async with self.http.post(f"{self.url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        assert answer["usage"]["completion_tokens"] == max_tokens
        return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    async def reset(self, *, running: bool) -> bool:
        """Reset the prefix cache, if need be by starting again what runs."""
        flag = str(running).lower()
        async with self.http.post(
            f"{self.url}/reset_prefix_cache?reset_running_requests={flag}"
        ) as response:
            assert response.status == 200, await response.text()
            return bool((await response.json())["success"])


class Run:
    """All requests, some at once, in rounds; the cache is reset within and after each."""

    def __init__(self, asking: Asking, witness: Witness, chance: random.Random) -> None:
        self.prompts = list(_prompts(chance))
        self.finished = 0
        self.resets = 0
        self._asking = asking
        self._witness = witness
        self._chance = chance
        self._room = asyncio.Semaphore(AT_ONCE)
        self._more = asyncio.Event()

    async def run(self) -> None:
        """Make them all."""
        for start in range(0, REQUESTS, ROUND):
            prompts = self.prompts[start : start + ROUND]
            await asyncio.gather(*map(self._ask, prompts), self._reset_within(start))
            if start + ROUND < REQUESTS:
                await self._reset_after(prompts[-1])

    async def _ask(self, prompt: Prompt) -> None:
        async with self._room:
            await self._asking.cached_tokens(prompt, self._chance.randrange(1, 70))
            self.finished += 1
            self._more.set()

    async def until(self, finished: int) -> None:
        """Wait until as many requests have finished."""
        while self.finished < finished:
            self._more.clear()
            await self._more.wait()

    async def _reset_within(self, start: int) -> None:
        await self.until(start + self._chance.randrange(1, ROUND - AT_ONCE))
        assert await self._asking.reset(running=True)
        self.resets += 1

    async def _reset_after(self, prompt: Prompt) -> None:
        """Nothing runs, so vLLM says nothing; the witness learns of it all the same."""
        assert self._witness.set.blocks
        assert await self._asking.reset(running=False)
        self.resets += 1
        await eventually(lambda: not self._witness.set.blocks, "nothing is cached")
        assert self._witness.clears == self.resets
        assert await self._asking.cached_tokens(prompt, 1) == 0


def _prompts(chance: random.Random) -> Iterator[Prompt]:
    prefixes = [[chance.randrange(20, 1000) for _ in range(300)] for _ in range(6)]
    for _ in range(REQUESTS):
        shared = chance.choice(prefixes)[: chance.randrange(300)]
        own = [chance.randrange(20, 1000) for _ in range(chance.randrange(1, 80))]
        yield Prompt((*shared, *own), chance.choice(SALTS), chance.choice(MODELS))


async def settled(peer: Peer, witness: Follower) -> int:
    """Wait until the last batch of all finished requests is there."""

    async def is_settled() -> bool:
        number = witness.last
        await asyncio.sleep(0.1)
        joined = await join(peer)
        await joined.leave()
        return number == joined.last == witness.last

    await eventually(is_settled, "no more batches")
    return witness.last


async def test_everybody_has_the_same_set_and_it_is_true(engines: EngineSlot) -> None:
    engines.clear()
    chance = random.Random(5)
    arguments = ("--model", str(model_dir("tiny_llama")), "--port", "0", *FLAGS, *adapter_flags())
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(start_server(*arguments, VLLM_SERVER_DEV_MODE="1"))
        peer = await stack.enter_async_context(connected(server))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        asking = Asking(peer, http, "http://" + server.ready["http"])
        first, resuming = Witness(), Follower()
        await subscribe(peer, first)
        plain = PlainFollower(server.target)
        await plain.begin(snapshot=False)
        over_zmq = await stack.enter_async_context(zmq_follower(peer))
        run = Run(asking, first, chance)
        joined: list[Follower] = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run.run())
            await first.reach(0)
            await subscribe(peer, resuming)
            for index, moment in enumerate(sorted(chance.sample(range(REQUESTS), MOMENTS))):
                await run.until(moment)
                if index % 5 == 0:
                    await drop_off(peer, resuming, chance)
                joined.append(await join(peer))
                number = min(joined[-1].history)
                for other in (first, resuming, over_zmq):
                    await other.reach(number)
                    assert other.history[number] == joined[-1].history[number]
                if len(joined) > 3:
                    await joined[-4].leave()
        last = await settled(peer, first)
        for other in (resuming, over_zmq, *joined[-3:]):
            await other.reach(last)
            assert other.set.blocks == first.set.blocks
        for other in (resuming, over_zmq, *joined):
            assert all(first.history[n] == keys for n, keys in other.history.items())
        assert min(over_zmq.history) == min(first.history) == 0
        await plain.reach(last)
        assert plain.history == first.plain_history()
        assert plain.removed > BLOCKS
        assert first.clears == run.resets == over_zmq.clears
        assert min(first.stored[kind] for kind in product(MODELS, (False, True))) > REQUESTS // 50
        assert sum(first.stored.values()) > 10 * BLOCKS, "hardly anything was evicted"
        reused = 0
        for prompt in chance.sample(run.prompts[-2 * ROUND :], PROBES):
            await settled(peer, first)
            live = {key[2] for key in first.set.blocks}
            chain = prompt.hashes()
            have = next((n for n, value in enumerate(chain) if value not in live), len(chain))
            expected = min(have, (len(prompt.token_ids) - 1) // BLOCK) * BLOCK
            assert await asking.cached_tokens(prompt, 1) == expected
            reused += expected
        assert reused
        for other in (first, resuming, *joined[-3:]):
            await other.leave()
        await plain.leave()
        print(f"{REQUESTS} requests, {run.resets} resets, {last + 1} batches, {first.stored}")

"""The example router on two engines whose caches are small, and what Dynamo's radix tree says.

The tree that the router feeds from SubscribeKvEvents is compared with one that is fed from
vLLM's own publishers, and both with what the engines then reuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zmq
from dynamo.llm import RadixTree, compute_block_hash_for_seq

from examples.kv_router.overlap import Place
from examples.kv_router.routing import Choice, Router
from openengine_vllm.kv_events.receiver import Receiver
from openengine_vllm.kv_events.source import END
from tests.engine.peers import EngineSlot
from tests.support.calls import eventually
from tests.support.environment import server_environment
from tests.support.models import model_dir
from tests.support.server import ServerProcess, start_server

ROOT = Path(__file__).parents[2]
BLOCK = 32
BLOCKS = 40
PROMPTS = 200
FLAGS = (
    *("--served-model-name", "tiny"),
    *("--max-num-seqs", "8"),
    *("--max-model-len", "512"),
    *("--block-size", str(BLOCK)),
    *("--num-gpu-blocks-override", str(BLOCKS)),
    "--enable-prefix-caching",
    "--enforce-eager",
)
# Two engines start at once.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def workers(engines: EngineSlot) -> Iterator[list[ServerProcess]]:
    """Two servers of the same model, started side by side."""
    engines.clear()
    arguments = ("--model", str(model_dir("tiny_llama")), "--port", "0", *FLAGS)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                start_server(
                    *arguments,
                    wait=False,
                    VLLM_CPU_OMP_THREADS_BIND="nobind",
                    OMP_NUM_THREADS="1",
                )
            )
            for _ in range(2)
        ]
        for server in servers:
            server.wait_ready()
        yield servers


class DirectTree:
    """Dynamo's tree as vLLM's own msgpack batches make it."""

    def __init__(self) -> None:
        self._tree = RadixTree()
        self._copies: dict[tuple[int, int], int] = {}
        self.last: dict[int, int] = {}
        """The number of each worker's last batch."""
        self.repeated = 0
        """Blocks that were stored while they were there."""
        self.removed = 0
        self.refused = 0
        """Events that the tree could not follow."""

    def overlaps(self, token_ids: Sequence[int]) -> dict[Place, int]:
        """Tokens, by worker and rank."""
        blocks = compute_block_hash_for_seq(list(token_ids), BLOCK)
        scores = cast("dict[Place, int]", self._tree.find_matches(blocks).scores)
        return {place: count * BLOCK for place, count in scores.items()}

    def apply(self, worker: int, number: int, payload: bytes) -> None:
        """Follow a batch."""
        _, events, rank = msgspec.msgpack.decode(payload)
        for event in events:
            data: Any = "cleared"
            if event["type"] == "BlockStored":
                local = compute_block_hash_for_seq(event["token_ids"], event["block_size"])
                blocks = [
                    {"block_hash": external, "tokens_hash": tokens}
                    for external, tokens in zip(event["block_hashes"], local, strict=True)
                ]
                data = {"stored": {"parent_hash": event["parent_block_hash"], "blocks": blocks}}
                for external in event["block_hashes"]:
                    copies = self._copies.get((worker, external), 0)
                    self.repeated += bool(copies)
                    self._copies[(worker, external)] = copies + 1
            elif event["type"] == "BlockRemoved":
                data = {"removed": {"block_hashes": event["block_hashes"]}}
                self.removed += len(event["block_hashes"])
                for external in event["block_hashes"]:
                    self._copies[(worker, external)] -= 1
            message = {"event_id": number, "dp_rank": rank, "data": data}
            try:
                self._tree.apply_event(worker, json.dumps(message).encode())
            except RuntimeError:
                self.refused += 1
        self.last[worker] = number


@contextlib.asynccontextmanager
async def direct_tree(router: Router) -> AsyncIterator[DirectTree]:
    """One that has followed the publishers of a router's workers from their first batch on."""
    tree = DirectTree()
    replayed: set[int] = set()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    async def read(worker: int, live: Receiver, replay: Receiver) -> None:
        while (frames := await replay.receive())[2] != END:
            tree.apply(worker, int.from_bytes(frames[2], "big"), frames[3])
        replayed.add(worker)
        while True:
            _, number, payload = await live.receive()
            if int.from_bytes(number, "big") > tree.last.get(worker, -1):
                tree.apply(worker, int.from_bytes(number, "big"), payload)

    with contextlib.ExitStack() as stack:
        reading = []
        for worker in router.workers:
            sources = (await worker.client.kv_event_sources()).sources
            [source] = [s for s in sources if (s.transport, s.encoding) == ("zmq", "msgpack")]
            live, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
            live.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
            live.connect(f"tcp://{source.endpoint_addr.host}:{source.endpoint_addr.port}")
            replay.connect(source.replay_endpoint)
            receivers = [stack.enter_context(Receiver(each)) for each in (live, replay)]
            replay.send_multipart([b"", bytes(8)])
            reading.append(asyncio.ensure_future(read(worker.number, *receivers)))
        try:
            await eventually(lambda: len(replayed) == len(reading), "all replays")
            yield tree
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            context.destroy(linger=0)


async def ask(router: Router, tree: DirectTree, token_ids: Sequence[int]) -> tuple[Choice, int]:
    """Send a prompt where the router wants it, and wait until both trees have heard of it.

    Returns the choice, and how many of the prompt's tokens the worker had cached.
    """
    choice, completion = await router.complete(token_ids, max_tokens=1)
    number = choice.worker.number

    def heard() -> bool:
        whole = len(token_ids) // BLOCK * BLOCK
        return (
            router.index.overlaps(token_ids).get((number, 0), 0) == whole
            and router.workers[number].next_batch.get(0) == tree.last.get(number, -1) + 1
        )

    await eventually(heard, "the batch")
    assert completion.usage is not None
    return choice, completion.usage.cached_prompt_tokens


def reusable(token_ids: Sequence[int], overlap: int) -> int:
    """What the engine can take from its cache: it always computes the last token."""
    return min(overlap, (len(token_ids) - 1) // BLOCK * BLOCK)


def tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(20, 1000) for _ in range(count)]


def test_the_readme_command_shows_more_cached_tokens(workers: list[ServerProcess]) -> None:
    readme = (ROOT / "README.md").read_text()
    [command] = re.findall(r"^python (-m examples\.kv_router (?:.*\\\n)*.*)$", readme, re.MULTILINE)
    for port, server in zip((50051, 50052), workers, strict=True):
        assert f"127.0.0.1:{port}" in command
        command = command.replace(f"127.0.0.1:{port}", server.target)
    command = command.replace("MODEL/", f"{model_dir('tiny_llama')}/").replace("\\\n", "")
    done = subprocess.run(
        [sys.executable, *shlex.split(command)],
        cwd=ROOT,
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        r"^(round-robin|kv-aware) +(\d+)\+(\d+) +(\d+) +(\d+) +\d+%$", done.stdout, re.MULTILINE
    )
    assert [row[0] for row in rows] == ["round-robin", "kv-aware"], done.stdout
    numbers = {mode: tuple(map(int, counts)) for mode, *counts in rows}
    # Seven prefixes of 256 tokens and four prompts with each.
    assert numbers["round-robin"][:3] == (14, 14, 28 * 280)
    assert sorted(numbers["kv-aware"][:2]) == [12, 16]
    assert numbers["kv-aware"][3] == 7 * 3 * 256
    assert numbers["round-robin"][3] < numbers["kv-aware"][3]


async def test_dynamos_tree_says_the_same_through_us_as_from_vllm(
    workers: list[ServerProcess],
) -> None:
    chance = random.Random(6)
    prefixes = [tokens(chance, 300) for _ in range(12)]
    prompts: list[list[int]] = []
    while len(prompts) < PROMPTS:
        prompt = chance.choice(prefixes)[: chance.randrange(300)]
        prompt = prompt + tokens(chance, chance.randrange(1, 80))
        if len(prompt) % BLOCK:
            # Where a prompt ends with a block, vLLM stores that one again when it comes again.
            prompts.append(prompt)
    targets = [server.target for server in workers]
    async with Router(targets) as router, direct_tree(router) as tree:

        def equal_for_all() -> int:
            found = [tree.overlaps(prompt) for prompt in prompts]
            assert [router.index.overlaps(prompt) for prompt in prompts] == found
            return sum(map(bool, found))

        refused, repeated, removed = tree.refused, tree.repeated, tree.removed
        reused, used, hits = 0, set(), 0
        for number, prompt in enumerate(prompts):
            assert router.index.overlaps(prompt) == tree.overlaps(prompt)
            choice, cached = await ask(router, tree, prompt)
            assert cached == reusable(prompt, choice.overlap)
            reused += bool(cached)
            used.add(choice.worker.number)
            if number % 20 == 19:
                hits = max(hits, equal_for_all())
        assert (tree.refused, tree.repeated) == (refused, repeated)
        assert tree.removed - removed > 2 * BLOCKS, "hardly anything was evicted"
        assert reused > PROMPTS // 4
        assert used == {0, 1}
        assert hits > PROMPTS // 4
        async with Router(targets) as late:

            def same() -> bool:
                return all(late.index.overlaps(p) == tree.overlaps(p) for p in prompts)

            await eventually(same, "what a snapshot says is the same")


async def test_what_vllm_stores_twice_is_counted_as_long_as_it_is_there(
    workers: list[ServerProcess],
) -> None:
    chance = random.Random(7)
    prompts = [tokens(chance, 3 * BLOCK) for _ in range(3)]
    async with Router([workers[0].target]) as router, direct_tree(router) as tree:
        repeated = tree.repeated
        for prompt in prompts:
            await ask(router, tree, prompt)
        await ask(router, tree, tokens(chance, 9 * BLOCK))
        for prompt in prompts:
            # The last block is computed again, and both copies have the same hash.
            assert (await ask(router, tree, prompt))[1] == 2 * BLOCK
        assert tree.repeated == repeated + len(prompts)
        for prompt in prompts:
            assert tree.overlaps(prompt) == router.index.overlaps(prompt) == {(0, 0): 3 * BLOCK}
        # Other prompts take the older copies.
        for _ in range(BLOCKS):
            if all(tree.overlaps(prompt) == {(0, 0): 2 * BLOCK} for prompt in prompts):
                break
            await ask(router, tree, tokens(chance, 2 * BLOCK + 1))
        for prompt in prompts:
            longer = [*prompt, *tokens(chance, 5)]
            assert tree.overlaps(longer) == {(0, 0): 2 * BLOCK}
            assert router.index.overlaps(longer) == {(0, 0): 3 * BLOCK}
            assert (await ask(router, tree, longer))[1] == 3 * BLOCK

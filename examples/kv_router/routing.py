"""The choice of a worker for each prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, Unpack

from examples.kv_router.following import Worker
from examples.kv_router.overlap import PrefixIndex
from openengine_vllm.client import (
    Completion,
    GenerateOptions,
    OpenEngineError,
    generate_request,
)


class NoWorkerError(Exception):
    """No worker is up; the message says why each is not."""


@dataclass(frozen=True)
class Choice:
    """Where a prompt goes.

    Args:
        rank: the data-parallel rank that has the overlap; None leaves it to the worker.
        overlap: tokens of the prompt, from its start, that are cached there.
    """

    worker: Worker
    rank: int | None = None
    overlap: int = 0


class Router:
    """Workers, and what they have cached. It follows them inside `async with`.

    Make it where an event loop runs.
    """

    def __init__(self, targets: Sequence[str], api_key: str | None = None) -> None:
        self.index = PrefixIndex()
        self.workers = [
            Worker(number, target, self.index, api_key) for number, target in enumerate(targets)
        ]
        self._following: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Returns once each worker is up, or could not be reached."""
        self._following = [asyncio.create_task(worker.follow()) for worker in self.workers]
        try:
            for worker in self.workers:
                await worker.attempted.wait()
        except asyncio.CancelledError:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all subscriptions and connections; requests in flight are cancelled."""
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        for worker in self.workers:
            worker.up = False
            await worker.client.close()

    def up(self, excluding: Collection[Worker] = ()) -> list[Worker]:
        """The workers that can be given work. Raises NoWorkerError for none."""
        workers = [worker for worker in self.workers if worker.up and worker not in excluding]
        if not workers:
            reasons = (f"{worker.target}: {worker.problem}" for worker in self.workers)
            raise NoWorkerError("no worker is up: " + "; ".join(reasons))
        return workers

    def choose(
        self,
        token_ids: Sequence[int],
        *,
        cache_salt: str = "",
        lora_name: str = "",
        excluding: Collection[Worker] = (),
    ) -> Choice:
        """The worker with the longest overlap; of equal ones the one with the least to do.

        That is the fewest requests of this router in flight, then the fewest ever. Raises
        NoWorkerError.
        """
        overlaps = self.index.overlaps(token_ids, cache_salt=cache_salt, lora_name=lora_name)
        choices = []
        for worker in self.up(excluding):
            found = {rank: overlaps.get((worker.number, rank), 0) for rank in worker.ranks}
            rank = max(found, key=found.__getitem__)
            pinned = rank if found[rank] and len(found) > 1 else None
            choices.append(Choice(worker, pinned, found[rank]))
        return min(choices, key=lambda c: (-c.overlap, c.worker.in_flight, c.worker.sent))

    async def complete(
        self, token_ids: Sequence[int], **options: Unpack[GenerateOptions]
    ) -> tuple[Choice, Completion]:
        """Generate on the worker of choice; on the next best where one turns the request away.

        Raises NoWorkerError, and OpenEngineError where another worker would not help or there
        is none.
        """
        failed: list[Worker] = []
        salt, lora = options.get("cache_salt", ""), options.get("lora_name", "")
        while True:
            choice = self.choose(token_ids, cache_salt=salt, lora_name=lora, excluding=failed)
            try:
                return choice, await self.send(choice, token_ids, **options)
            except OpenEngineError as error:
                failed.append(choice.worker)
                others = any(worker.up and worker not in failed for worker in self.workers)
                if not (error.retryable and others):
                    raise

    async def send(
        self, choice: Choice, token_ids: Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Generate on a given worker. Raises OpenEngineError."""
        request = generate_request(token_ids, options)
        if choice.rank is not None:
            request.kv.data_parallel_rank = choice.rank
        worker = choice.worker
        worker.in_flight += 1
        worker.sent += 1
        try:
            return await worker.client.complete(request)
        finally:
            worker.in_flight -= 1

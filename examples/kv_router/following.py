"""One worker: a connection, its KV events followed for as long as it takes, and its load."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from examples.kv_router.overlap import OutOfStepError, PrefixIndex
from openengine_vllm.client import Client, OpenEngineError

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
"""Pauses between attempts to reach a worker, from the first to those after many in vain."""

RPC_SECONDS = 10.0
"""How long a worker may take to say who it is."""

_log = logging.getLogger(__name__)


class NotFollowedError(Exception):
    """A worker whose events can't be had, or have an end."""


class Worker:
    """A worker and what the router knows of it.

    Args:
        number: what the index has it under.
        target: `host:port` or `unix:/path`.
        api_key: for a worker that wants one.
    """

    def __init__(
        self, number: int, target: str, index: PrefixIndex, api_key: str | None = None
    ) -> None:
        self.number = number
        self.target = target
        self.client = Client(target, api_key=api_key)
        self.ranks: tuple[int, ...] = ()
        """The data-parallel ranks behind it."""
        self.up = False
        """Whether its events are being followed: only then it is given work."""
        self.problem: str | None = None
        """Why not, after an attempt."""
        self.attempted = asyncio.Event()
        """Set after the first attempt, however that ended."""
        self.in_flight = 0
        """Requests that have been sent to it and have not ended."""
        self.sent = 0
        """All that have been sent to it."""
        self._index = index
        self._instance_id = ""
        self.next_batch: dict[int, int] = {}
        """The number of the batch that each rank's cache in the index waits for."""
        self._pause = FIRST_PAUSE_SECONDS

    async def follow(self) -> None:
        """Keep the index up to date; ends only by being cancelled.

        Whatever breaks, the worker is down until it can be reached again. The same instance goes
        on with the batch that is next; another one, or one that no longer has that batch, sends
        what it has cached.
        """
        while True:
            problem = ""
            try:
                await self._follow()
            except* Exception as group:
                # Also one that nobody has thought of: the other workers go on, and this one may.
                problem = described(group)
            if problem != self.problem:
                _log.warning("worker %s is out: %s", self.target, problem)
            self.up, self.problem = False, problem
            self.attempted.set()
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    async def _follow(self) -> None:
        info = await self.client.require_compatible(timeout=RPC_SECONDS)
        sources = (await self.client.kv_event_sources(timeout=RPC_SECONDS)).sources
        ranks = {source.data_parallel_rank for source in sources if source.transport == "grpc"}
        if not ranks:
            raise NotFollowedError("it has no KV events: they are switched off")
        # One that has been started again numbers its batches anew. It can't take the place of
        # the one that has just answered unseen: the connection would break.
        if info.instance_id != self._instance_id:
            self._index.remove(self.number)
            self.next_batch.clear()
            self._instance_id = info.instance_id
        self.ranks = tuple(sorted(ranks))
        async with asyncio.TaskGroup() as group:
            for rank in self.ranks:
                group.create_task(self._follow_rank(rank))
            self.up, self.problem = True, None
            self.attempted.set()
            _log.info("worker %s is in", self.target)

    async def _follow_rank(self, rank: int) -> None:
        subscription = self.client.subscribe_kv_events(
            [rank], include_snapshot=True, start_sequence_number=self.next_batch.get(rank, 0)
        )
        async with aclosing(subscription) as responses:
            # All batches of a snapshot have the number of the last batch that is in it.
            is_first, snapshot = True, -1
            async for response in responses:
                batch = response.batch
                number = batch.sequence_number
                if number == self.next_batch.get(rank):
                    snapshot = -1
                elif is_first:
                    self._forget(rank)
                    snapshot = number
                elif number != snapshot:
                    self._forget(rank)
                    raise NotFollowedError(f"rank {rank} sent batch {number} out of turn")
                is_first = False
                try:
                    self._index.apply(self.number, batch)
                except OutOfStepError as error:
                    self._forget(rank)
                    raise NotFollowedError(f"rank {rank}, batch {number}: {error}") from error
                self.next_batch[rank] = number + 1
                self._pause = FIRST_PAUSE_SECONDS
        raise NotFollowedError("it ended the subscription")

    def _forget(self, rank: int) -> None:
        self._index.clear((self.number, rank))
        self.next_batch.pop(rank, None)


def described(group: BaseExceptionGroup[Exception]) -> str:
    """The first of a group's errors."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, OpenEngineError):
        return f"{error.code_name}: {error.message}"
    return str(error) or repr(error)

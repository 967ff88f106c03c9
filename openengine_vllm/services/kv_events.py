"""GetKvEventSources and SubscribeKvEvents: what enters and leaves the prefix cache.

Batches were serialised when they came; each subscriber is a place in the ranks' logs, and all
get the same bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from openengine_vllm.events import FellBehindError
from openengine_vllm.kv_events.bridge import KvBridge, Rank
from openengine_vllm.kv_events.feed import RankFeed, Snapshot
from openengine_vllm.kv_events.retained import BatchCursor
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.services.handlers import Context
from openengine_vllm.services.kv_sources import rank_sources
from openengine_vllm.services.stalls import StallWatch, StreamWriter

_READ_AT_ONCE = 64
_RANKS = "data_parallel_ranks"


class KvEventsService:
    """The RPCs of a bridge, once it is there.

    Args:
        check: raises where the server cannot serve yet, or not any more.
    """

    def __init__(self, check: Callable[[], object], stalls: StallWatch) -> None:
        self._check = check
        self._stalls = stalls
        self._bridge: KvBridge | None = None
        self._address = ""
        self._advertise_host: str | None = None
        # Of many that join at once, one works between two turns of the loop.
        self._snapshot_turn = asyncio.Lock()
        self._ended = False
        self._end_error: errors.OpenEngineError | None = None

    def attach(self, bridge: KvBridge, address: str, advertise_host: str | None) -> None:
        """Serve this bridge; KV events are off without one.

        Args:
            address: where the server is bound.
            advertise_host: what clients connect to, unless only this machine can.
        """
        self._bridge = bridge
        self._address = address
        self._advertise_host = advertise_host

    async def sources(
        self, request: pb.GetKvEventSourcesRequest, context: Context
    ) -> pb.GetKvEventSourcesResponse:
        """GetKvEventSources; none where KV events are off."""
        self._check()
        response = pb.GetKvEventSourcesResponse()
        for rank in self._ranks(request.data_parallel_ranks):
            assert self._bridge is not None
            response.sources.extend(
                rank_sources(rank, self._bridge.settings, self._address, self._advertise_host)
            )
        return response

    async def subscribe(self, request: pb.SubscribeKvEventsRequest, context: Context) -> None:
        """Stream batches, until the caller leaves or the server stops."""
        self._check()
        bridge = self._bridge
        if bridge is None:
            raise errors.feature_off("KV events are switched off")
        ranks = self._ranks(request.data_parallel_ranks)
        starts = [await self._start(rank.feed, request) for rank in ranks]
        cursors = [cursor for _, cursor in starts]
        writer = self._stalls.open(context, "SubscribeKvEvents")
        try:
            await context.send_initial_metadata(())
            error: errors.OpenEngineError | None
            try:
                for snapshot, _ in starts:
                    if snapshot is not None:
                        await self._send_snapshot(snapshot, writer)
                await self._follow(bridge, cursors, writer)
                error = self._end_error
            except FellBehindError:
                error = errors.overloaded("the subscriber is behind the batches that are kept")
            if error is not None:
                await writer.write([_failure(error)])
        except asyncio.CancelledError:
            if not writer.stalled:
                raise
            raise errors.overloaded("the client did not read its batches for too long") from None
        finally:
            writer.close()

    def end(self, error: errors.OpenEngineError | None = None) -> None:
        """End all subscriptions, after what they have not had yet; ``error`` says why."""
        if not self._ended:
            self._ended = True
            self._end_error = error
            if self._bridge is not None:
                self._bridge.wake()

    async def _start(
        self, feed: RankFeed, request: pb.SubscribeKvEventsRequest
    ) -> tuple[Snapshot | None, BatchCursor]:
        if not request.include_snapshot:
            return _start(feed, request)
        async with self._snapshot_turn:
            start = _start(feed, request)
            await asyncio.sleep(0)
        return start

    async def _send_snapshot(self, snapshot: Snapshot, writer: StreamWriter) -> None:
        responses = snapshot.responses()
        while True:
            async with self._snapshot_turn:
                try:
                    response = next(responses)
                except StopIteration:
                    return
                await asyncio.sleep(0)
            if response is not None:
                await writer.write((response,))

    async def _follow(
        self, bridge: KvBridge, cursors: Sequence[BatchCursor], writer: StreamWriter
    ) -> None:
        while True:
            news = bridge.news
            sent = False
            for cursor in cursors:
                if responses := cursor.read(_READ_AT_ONCE):
                    sent = True
                    await writer.write(responses)
            if sent:
                continue
            if self._ended:
                return
            await news.wait()

    def _ranks(self, asked: Sequence[int]) -> list[Rank]:
        there = {} if self._bridge is None else self._bridge.ranks
        if self._bridge is not None:
            for index, rank in enumerate(asked):
                if rank not in there:
                    raise errors.invalid_argument(
                        f"{_RANKS}[{index}]",
                        f"{_RANKS}[{index}] is {rank}, which is none of "
                        + ", ".join(map(str, there)),
                    )
        wanted = frozenset(asked or there)
        return [rank for number, rank in there.items() if number in wanted]


def _start(
    feed: RankFeed, request: pb.SubscribeKvEventsRequest
) -> tuple[Snapshot | None, BatchCursor]:
    """What a subscription begins with, and the place that comes after it.

    Raises:
        OpenEngineError: the start is not retained, and no snapshot is allowed.
    """
    log, start = feed.log, request.start_sequence_number
    if start and (cursor := log.cursor_at(start)) is not None:
        return None, cursor
    if request.include_snapshot:
        return feed.snapshot(), log.cursor()
    if not start:
        return None, log.cursor()
    kept = "none yet" if log.first is None else f"{log.oldest} to {log.next - 1}"
    raise errors.kv_start_not_retained(
        f"start_sequence_number is {start}; rank {feed.rank} retains {kept}",
        oldest=log.oldest,
        newest=max(log.next - 1, 0),
    )


def _failure(error: errors.OpenEngineError) -> bytes:
    return pb.SubscribeKvEventsResponse(error=errors.to_proto(error)).SerializeToString()

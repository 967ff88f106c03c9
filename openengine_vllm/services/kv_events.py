"""GetKvEventSources and SubscribeKvEvents: what enters and leaves the prefix cache.

Batches were serialised when they came; each subscriber is a place in the ranks' logs, and all
get the same bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from openengine_vllm.events import FellBehindError
from openengine_vllm.kv_events.bridge import KvBridge, Rank
from openengine_vllm.kv_events.feed import RankFeed, Snapshot
from openengine_vllm.kv_events.retained import BatchCursor
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.services.handlers import Context
from openengine_vllm.services.kv_sources import GRPC, rank_sources
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

    async def grpc_sources(
        self, request: pb.GetKvEventSourcesRequest, context: Context
    ) -> pb.GetKvEventSourcesResponse:
        """Control's GetKvEventSources: exactly one source a rank."""
        response = await self.sources(request, context)
        own = [source for source in response.sources if source.transport == GRPC]
        return pb.GetKvEventSourcesResponse(sources=own)

    async def subscribe_plain(self, request: pb.SubscribeKvEventsRequest, context: Context) -> None:
        """Control's SubscribeKvEvents: the same in the form that its clients can read."""
        await self._stream(request, context, plain=True)

    async def subscribe(self, request: pb.SubscribeKvEventsRequest, context: Context) -> None:
        """Stream batches, until the caller leaves or the server stops."""
        await self._stream(request, context, plain=False)

    async def _stream(
        self, request: pb.SubscribeKvEventsRequest, context: Context, *, plain: bool
    ) -> None:
        self._check()
        bridge = self._bridge
        if bridge is None:
            raise errors.feature_off("KV events are switched off")
        ranks = self._ranks(request.data_parallel_ranks)
        readers = [await self._join(rank.feed, request, plain) for rank in ranks]
        writer = self._stalls.open(context, "SubscribeKvEvents")
        try:
            await context.send_initial_metadata(())
            error: errors.OpenEngineError | None
            try:
                for reader in readers:
                    await self._send_snapshot(reader, writer)
                await self._follow(bridge, readers, writer)
                error = self._end_error
            except FellBehindError:
                error = errors.overloaded("the subscriber is behind the batches that are kept")
            if error is not None:
                await writer.write([_failure(error, detailed=not plain)])
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

    async def _join(
        self, feed: RankFeed, request: pb.SubscribeKvEventsRequest, plain: bool
    ) -> _Reader:
        if not request.include_snapshot:
            return _Reader(feed, request, plain)
        async with self._snapshot_turn:
            reader = _Reader(feed, request, plain)
            await asyncio.sleep(0)
        return reader

    async def _send_snapshot(self, reader: _Reader, writer: StreamWriter) -> None:
        responses = reader.snapshot()
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
        self, bridge: KvBridge, readers: Sequence[_Reader], writer: StreamWriter
    ) -> None:
        while True:
            news = bridge.news
            sent = False
            for reader in readers:
                if responses := reader.read():
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


class _Reader:
    """One subscription's place in one rank.

    Args:
        plain: whether it gets the form of the split revision.

    Raises:
        OpenEngineError: the start is not retained, and no snapshot is allowed.
    """

    def __init__(self, feed: RankFeed, request: pb.SubscribeKvEventsRequest, plain: bool) -> None:
        self._plain = feed.plain if plain else None
        self._snapshot, self._cursor = _start(feed, request)

    def snapshot(self) -> Iterator[bytes | None]:
        """What it begins with; None stands for a moment to do something else."""
        snapshot, plain, self._snapshot = self._snapshot, self._plain, None
        if snapshot is None:
            return
        for response in snapshot.responses():
            if response is None or plain is None:
                yield response
            else:
                yield plain.reduced(response, snapshot.keyed)

    def read(self) -> list[bytes]:
        """Batches that it has not had; none when there are no others.

        Raises:
            FellBehindError: some are gone that it has not had.
        """
        if self._plain is None:
            return self._cursor.read(_READ_AT_ONCE)
        # One at a time: making it takes some microseconds a block.
        responses = self._cursor.read(1)
        if not responses:
            return []
        assert self._cursor.next is not None
        return [self._plain.batch(self._cursor.next - 1, responses[0])]


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


def _failure(error: errors.OpenEngineError, *, detailed: bool) -> bytes:
    told = errors.to_proto(error, detailed=detailed)
    return pb.SubscribeKvEventsResponse(error=told).SerializeToString()

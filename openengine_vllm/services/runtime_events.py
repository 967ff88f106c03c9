"""SubscribeRuntimeEvents: what the schedulers and the server's queue do, as it happens.

Each event is made and serialised once, and only while somebody wants its type. Subscribers are
woken together, some milliseconds after the first new event. What delivery costs is bounded: when
events come faster than all subscribers together can be told for that, those that wait are merged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast

from openengine_vllm.engine.stats import EngineStats, Step
from openengine_vllm.events import Cursor, EventLog, FellBehindError
from openengine_vllm.lifecycle import Lifecycle
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.registry import RequestRegistry
from openengine_vllm.services.event_attributes import (
    Batch,
    EngineQueue,
    ForwardPasses,
    ServerQueue,
    Telling,
    Transfers,
)
from openengine_vllm.services.handlers import Context
from openengine_vllm.services.stalls import StallWatch

RETAINED_EVENTS = 16_384
"""Events that a subscriber may be behind: some 8 MB at the most."""
DELIVERIES_PER_SECOND = 500
"""Events per second, times subscribers, beyond which events are merged: a delivery takes some
50 to 100 µs of the event loop, so all of them together take some 5 % of a processor."""
_GATHER_SECONDS = 0.01
_READ_AT_ONCE = 64

FORWARD_PASS = pb.RUNTIME_EVENT_TYPE_FORWARD_PASS
BATCH = pb.RUNTIME_EVENT_TYPE_BATCH
QUEUE = pb.RUNTIME_EVENT_TYPE_QUEUE
TRANSFER = pb.RUNTIME_EVENT_TYPE_TRANSFER
_TYPES = (FORWARD_PASS, BATCH, QUEUE, TRANSFER)


class Allowance:
    """What may be spent per second, a second's worth at once.

    More may be spent than there is; then it takes longer until there is something again.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._left = rate
        self._time = 0.0

    def wait(self, now: float) -> float:
        """Seconds until something may be spent; 0 if it may now."""
        self._refill(now)
        return max(0.0, -self._left / self._rate)

    def spend(self, amount: float, now: float) -> None:
        """Take from it."""
        self._refill(now)
        self._left -= amount

    def _refill(self, now: float) -> None:
        self._left = min(self._rate, self._left + (now - self._time) * self._rate)
        self._time = now


class RuntimeEventsService:
    """The SubscribeRuntimeEvents RPC.

    Args:
        instance_id: begins the ids of the events, which are new at each start.
        retained: events that a subscriber may be behind.
        deliveries: how many a second, over all subscribers, before events are merged.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        registry: RequestRegistry,
        stalls: StallWatch,
        instance_id: str,
        retained: int = RETAINED_EVENTS,
        deliveries: float = DELIVERIES_PER_SECOND,
    ) -> None:
        self._lifecycle = lifecycle
        self._registry = registry
        self._stalls = stalls
        self._instance_id = instance_id
        self._log = EventLog(retained)
        self._cursors: set[Cursor] = set()
        self._wanted: frozenset[int] = frozenset()
        self._watched: EngineStats | None = None
        self._pending: dict[tuple[int, object], Telling] = {}
        self._told: dict[tuple[int, object], object] = {}
        self._allowance = Allowance(deliveries)
        self._telling: asyncio.TimerHandle | None = None
        self._waking: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._ended = False
        self._end_error: errors.OpenEngineError | None = None
        self.fallen_behind = 0
        """Subscribers that have lost events, since the start."""

    @property
    def subscribers(self) -> int:
        """Calls that are subscribed now."""
        return len(self._cursors)

    @property
    def published(self) -> int:
        """Events made since the start."""
        return self._log.next

    @property
    def lag(self) -> int:
        """Events that the subscriber who is furthest behind has not looked at."""
        return max((cursor.behind for cursor in self._cursors), default=0)

    async def subscribe(self, request: pb.SubscribeRuntimeEventsRequest, context: Context) -> None:
        """Stream events from now on, until the caller leaves or the server stops."""
        stats = self._lifecycle.serving.engine.stats
        types = _types(request.types)
        self._tell_all()
        cursor = self._log.cursor(types)
        writer = self._stalls.open(context, "SubscribeRuntimeEvents")
        self._join(cursor, stats)
        try:
            await context.send_initial_metadata(())
            try:
                while (events := await self._next(cursor)) is not None:
                    await writer.write(events)
                error = self._end_error
            except FellBehindError:
                self.fallen_behind += 1
                error = errors.overloaded(
                    f"the subscriber is more than {self._log.capacity} events behind"
                )
            if error is not None:
                await writer.write([_failure(error)])
        except asyncio.CancelledError:
            if not writer.stalled:
                raise
            raise errors.overloaded("the client did not read its events for too long") from None
        finally:
            writer.close()
            self._leave(cursor)

    def end(self, error: errors.OpenEngineError | None = None) -> None:
        """End all subscriptions, after what they have not had yet; ``error`` says why."""
        if not self._ended:
            self._tell_all()
            self._ended = True
            self._end_error = error
            self._wake()

    async def _next(self, cursor: Cursor) -> Sequence[bytes] | None:
        """The next events; None when there will be no others."""
        while True:
            news = self._news
            if events := cursor.read(_READ_AT_ONCE):
                return events
            if self._ended:
                return None
            await news.wait()

    def _join(self, cursor: Cursor, stats: EngineStats) -> None:
        self._cursors.add(cursor)
        if self._watched is None:
            self._watched = stats
            stats.watch(self._on_step)
            self._registry.watch(self._on_registry)
        self._count_wanted()

    def _leave(self, cursor: Cursor) -> None:
        self._cursors.discard(cursor)
        if not self._cursors and self._watched is not None:
            self._watched.unwatch(self._on_step)
            self._registry.unwatch(self._on_registry)
            self._watched = None
            self._pending.clear()
            self._told.clear()
        self._count_wanted()

    def _count_wanted(self) -> None:
        self._wanted = frozenset().union(*(cursor.kinds for cursor in self._cursors))

    def _on_step(self, step: Step) -> None:
        wanted, rank = self._wanted, step.rank
        if FORWARD_PASS in wanted and (ran := step.forward_pass) is not None:
            passes = self._pending.setdefault((FORWARD_PASS, rank), ForwardPasses())
            cast(ForwardPasses, passes).add(step, ran)
        if BATCH in wanted:
            self._pending[BATCH, rank] = Batch(step)
        if QUEUE in wanted:
            self._pending[QUEUE, rank] = EngineQueue(step)
        if TRANSFER in wanted and step.transfers:
            transfers = self._pending.setdefault((TRANSFER, rank), Transfers())
            cast(Transfers, transfers).add(step, step.transfers)
        self._tell()

    def _on_registry(self) -> None:
        if QUEUE in self._wanted:
            self._pending[QUEUE, "server"] = ServerQueue(
                time.time_ns(), len(self._registry), self._registry.sequences
            )
            self._tell()

    def _tell(self) -> None:
        """Make events of what is pending, now or as soon as they can be paid for."""
        if self._telling is not None:
            return
        wait = self._allowance.wait(time.monotonic())
        if wait > 0:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_later(wait, self._tell_all)
        else:
            self._tell_all()

    def _tell_all(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        made = self._log.next
        for (kind, source), telling in self._pending.items():
            figures = telling.figures
            if figures is None or self._told.get((kind, source)) != figures:
                self._told[kind, source] = figures
                self._publish(kind, telling)
        self._pending.clear()
        self._allowance.spend((self._log.next - made) * len(self._cursors), time.monotonic())

    def _publish(self, kind: int, telling: Telling) -> None:
        event = pb.RuntimeEvent(
            event_id=f"{self._instance_id}-{self._log.next:016d}",
            timestamp_unix_nanos=telling.time_ns,
            type=cast(pb.RuntimeEventType.ValueType, kind),
            attributes=telling.attributes(),
        )
        response = pb.SubscribeRuntimeEventsResponse(runtime_event=event)
        self._log.append(kind, response.SerializeToString())
        if self._waking is None:
            loop = asyncio.get_running_loop()
            self._waking = loop.call_later(_GATHER_SECONDS, self._wake)

    def _wake(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        self._news.set()
        self._news = asyncio.Event()


def _types(asked: Sequence[pb.RuntimeEventType.ValueType]) -> frozenset[int]:
    for index, kind in enumerate(asked):
        if kind not in _TYPES:
            raise errors.invalid_argument(
                f"types[{index}]",
                f"types[{index}] is {kind}, which is none of "
                + ", ".join(pb.RuntimeEventType.Name(known) for known in _TYPES),
            )
    return frozenset(asked or _TYPES)


def _failure(error: errors.OpenEngineError) -> bytes:
    return pb.SubscribeRuntimeEventsResponse(error=errors.to_proto(error)).SerializeToString()

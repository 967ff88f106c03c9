"""SubscribeRuntimeEvents: what the schedulers and the server's queue do, as it happens.

Each event is made and serialised once, and only while somebody wants its type. Subscribers are
woken together, some milliseconds after the first new event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from openengine_vllm.engine.stats import EngineStats, Step
from openengine_vllm.events import Cursor, EventLog, FellBehindError
from openengine_vllm.lifecycle import Lifecycle
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.registry import RequestRegistry
from openengine_vllm.services import event_attributes
from openengine_vllm.services.handlers import Context
from openengine_vllm.services.stalls import StallWatch

RETAINED_EVENTS = 16_384
"""Events that a subscriber may be behind: some 8 MB at the most."""
_GATHER_SECONDS = 0.01
_READ_AT_ONCE = 64

FORWARD_PASS = pb.RUNTIME_EVENT_TYPE_FORWARD_PASS
BATCH = pb.RUNTIME_EVENT_TYPE_BATCH
QUEUE = pb.RUNTIME_EVENT_TYPE_QUEUE
TRANSFER = pb.RUNTIME_EVENT_TYPE_TRANSFER
_TYPES = (FORWARD_PASS, BATCH, QUEUE, TRANSFER)


class RuntimeEventsService:
    """The SubscribeRuntimeEvents RPC.

    Args:
        instance_id: begins the ids of the events, which are new at each start.
        retained: events that a subscriber may be behind.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        registry: RequestRegistry,
        stalls: StallWatch,
        instance_id: str,
        retained: int = RETAINED_EVENTS,
    ) -> None:
        self._lifecycle = lifecycle
        self._registry = registry
        self._stalls = stalls
        self._instance_id = instance_id
        self._log = EventLog(retained)
        self._cursors: set[Cursor] = set()
        self._wanted: frozenset[int] = frozenset()
        self._watched: EngineStats | None = None
        self._batches: dict[int, tuple[int, ...]] = {}
        self._queues: dict[int, tuple[int, ...]] = {}
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
        cursor = self._log.cursor(_types(request.types))
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
            self._batches.clear()
            self._queues.clear()
        self._count_wanted()

    def _count_wanted(self) -> None:
        self._wanted = frozenset().union(*(cursor.kinds for cursor in self._cursors))

    def _on_step(self, step: Step) -> None:
        wanted = self._wanted
        if FORWARD_PASS in wanted and (ran := step.forward_pass) is not None:
            self._publish(FORWARD_PASS, step.time_ns, event_attributes.forward_pass(step, ran))
        if BATCH in wanted:
            made_of = (step.running, step.prefill_batch, step.decode_batch)
            if self._batches.get(step.rank) != made_of:
                self._batches[step.rank] = made_of
                self._publish(BATCH, step.time_ns, event_attributes.batch(step))
        if QUEUE in wanted:
            queue = (step.queued, step.deferred)
            if self._queues.get(step.rank) != queue:
                self._queues[step.rank] = queue
                self._publish(QUEUE, step.time_ns, event_attributes.engine_queue(step))
        if TRANSFER in wanted and step.transfers:
            attributes = event_attributes.transfer(step, step.transfers)
            self._publish(TRANSFER, step.time_ns, attributes)

    def _on_registry(self) -> None:
        if QUEUE in self._wanted:
            attributes = event_attributes.server_queue(
                len(self._registry), self._registry.sequences
            )
            self._publish(QUEUE, time.time_ns(), attributes)

    def _publish(
        self, kind: pb.RuntimeEventType.ValueType, time_ns: int, attributes: Mapping[str, str]
    ) -> None:
        event = pb.RuntimeEvent(
            event_id=f"{self._instance_id}-{self._log.next:016d}",
            timestamp_unix_nanos=time_ns,
            type=kind,
            attributes=attributes,
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

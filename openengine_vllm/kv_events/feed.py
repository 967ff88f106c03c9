"""One rank's batches brought into order: the one owner of a rank's state, without any I/O.

What the publisher sends and what its replay socket answers goes in, in whatever order and shape;
out comes a log of batches numbered without a hole, and the mirror of what is live after the last
of them. Numbers are the publisher's own until it restarts or loses some for good; then they go
on from the last, and the first batch after that begins with AllBlocksCleared. They also go on by
one where that is known before the publisher has another batch, or where the cache is known to be
empty before it says so; and a batch that is too large for a message goes on as several.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import structlog

from openengine_vllm.kv_events import wire
from openengine_vllm.kv_events.decode import MAX_PAYLOAD_BYTES, Batch, UndecodableError, decode
from openengine_vllm.kv_events.mirror import Mirror, parents_first
from openengine_vllm.kv_events.plain import PlainForm
from openengine_vllm.kv_events.retained import RetainedBatches
from openengine_vllm.protocol import v1 as pb

_log = structlog.get_logger(__name__)

_KNOWN_BATCHES = 16_384
_KNOWN_GAPS = 256
_MAX_AHEAD = 10_000
_MAX_AHEAD_BYTES = 4 * MAX_PAYLOAD_BYTES
_BATCH_BYTES = 256 * 1024
"""Of the events in one batch of ours; its bound is 1 MiB, an event may be larger."""


@dataclass(slots=True)
class Counts:
    """What has happened to a rank's batches."""

    batches: int = 0
    """Batches put into the log."""
    repeats: int = 0
    """Batches that came again and were dropped."""
    late: int = 0
    """Batches that came after they had been given up."""
    filled: int = 0
    """Batches that the replay socket brought."""
    lost: int = 0
    """Numbers given up."""
    gaps: int = 0
    """Gaps that could not be filled."""
    restarts: int = 0
    """Restarts of the publisher."""
    undecodable: int = 0
    """Payloads that are no batch."""
    rubbish: int = 0
    """Messages that have not the frames of one."""
    malformed_events: int = 0
    """Events left out of a batch because they are not what they say."""
    unknown_events: int = 0
    """Events left out of a batch because their kind is not known here."""
    overflowed: int = 0
    """Batches dropped while a gap was being filled, because too many were waiting."""


class Snapshot:
    """The live blocks of a rank as of one batch, told once and let go of with that.

    Args:
        number: of that batch.
    """

    def __init__(self, rank: int, number: int, time_ns: int, mirror: Mirror) -> None:
        self.rank = rank
        self.number = number
        self.keyed = mirror.keyed((pb.STORAGE_MEDIUM_GPU, mirror.full_group))
        """Of the GPU's blocks those that the mirror calls keyed."""
        self._time_ns = time_ns
        self._blocks = mirror.blocks()

    def responses(self) -> Iterator[bytes | None]:
        """SubscribeKvEventsResponses that together hold the blocks, parents first.

        None stands for a moment at which the caller may do something else. An empty set makes
        one response all the same.
        """
        empty = True
        while self._blocks:
            _, blocks = self._blocks.popitem()
            events: list[bytes] = []
            size = 0
            for event in parents_first(blocks):
                if event is None:
                    yield None
                    continue
                if events and size + len(event) > _BATCH_BYTES:
                    yield self._response(events)
                    events, size = [], 0
                    empty = False
                events.append(event)
                size += len(event)
            if events:
                yield self._response(events)
                empty = False
        if empty:
            yield self._response([])

    def _response(self, events: list[bytes]) -> bytes:
        return wire.response(wire.batch(self.number, self._time_ns, self.rank, events))


def _parts(events: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The events as one batch, or as several where one would be too large for a message."""
    start = size = 0
    for index, event in enumerate(events):
        if index > start and size + len(event) > _BATCH_BYTES:
            yield events[start:index]
            start, size = index, 0
        size += len(event)
    yield events[start:]


class RankFeed:
    """The batches of one data-parallel rank.

    Args:
        rank: the absolute rank, under which the batches go out.
        retain: batches kept for readers, at the most.
        retain_bytes: and their bytes together.
    """

    def __init__(self, rank: int, retain: int, retain_bytes: int) -> None:
        self.rank = rank
        self.log = RetainedBatches(retain, retain_bytes)
        """What readers get."""
        self.mirror = Mirror()
        """What is live after the last batch in the log."""
        self.plain = PlainForm(self.log, self.mirror)
        """The same for clients of the split revision."""
        self.counts = Counts()
        self.wants: int | None = 0
        """The number from which the replay socket should be asked; None for no need."""
        self._next: int | None = None
        self._known: dict[int, int] = {}
        self._given_up: list[tuple[int, int]] = []
        self._ahead: dict[int, bytes] = {}
        self._ahead_bytes = 0
        self._is_bad = False
        self._announce = False
        self._time_ns = 0
        self._asked_at: int | None = None
        self._has_restarted = False
        self._frames = 0
        self._warned: set[str] = set()

    @property
    def last(self) -> int | None:
        """The publisher's number of the last batch; None before the first."""
        return self._next - 1 if self._next else None

    def check(self) -> None:
        """Ask the replay socket for the last batch again, and for what came after it."""
        if self.wants is None:
            self.wants = self.last or 0

    def live(self, number: int, payload: bytes) -> None:
        """A batch from the publisher."""
        if self._next is None:
            if number:
                self._hold(number, payload)
                self.check()
                return
            self._next = 0
        self._take(number, payload)

    def asking(self) -> None:
        """The replay socket is being asked for what :attr:`wants` says."""
        self._asked_at = self._next
        self._has_restarted = False
        self._frames = 0

    def replayed(self, number: int, payload: bytes) -> None:
        """A batch from the replay socket, in the order in which they come."""
        self._frames += 1
        if self._next is None:
            # The first batch there is; whatever came before it is not to be had any more.
            self._start_at(number)
        before, repeats = self.counts.batches, self.counts.repeats
        self._take(number, payload)
        self.counts.filled += self.counts.batches - before
        # Those that were asked for again, to compare them.
        self.counts.repeats = repeats

    def replay_ended(self, complete: bool) -> None:
        """The replay socket has no more to say; ``complete`` if it has said so itself."""
        self._end_replay(complete)
        if self._announce and self.wants is None and self.log.first is not None:
            # What comes next may be a long time off, and what is known is over now.
            self._announce = False
            self.mirror.clear()
            self._put(time.time_ns(), [wire.ALL_BLOCKS_CLEARED], frozenset())

    def _end_replay(self, complete: bool) -> None:
        self.wants = None
        if complete and not self._frames:
            if self._next is None and not self._ahead:
                self._next = 0
                return
            if self.last is not None and self._asked_at == self._next:
                # It has forgotten the last batch and has no other: it is not the same publisher.
                self._restart()
                return
        if self._has_restarted:
            # What was asked for was another publisher's.
            self.wants = self.last or 0
            return
        if not (self._ahead or self._is_bad):
            return
        if complete and self._frames and self._next != self._asked_at:
            # That brought some: ask for the rest before it is given up.
            self.wants = self.last or 0
            return
        self._give_up()

    def emptied(self, clear: int, time_ns: int) -> bool:
        """A reset of the cache has succeeded.

        Args:
            clear: the mirror's ``next_clear`` before the reset, one reset after the other.
            time_ns: nanoseconds since 1970.

        Returns:
            Whether there is a batch that says so, ahead of the publisher.
        """
        if not self.mirror.foretell(clear) or self.log.first is None:
            return False
        self._put(time_ns, [wire.ALL_BLOCKS_CLEARED], frozenset())
        return True

    def snapshot(self) -> Snapshot | None:
        """What is live after the last batch in the log; None before any."""
        if self.log.first is None:
            return None
        return Snapshot(self.rank, self.log.next - 1, self._time_ns, self.mirror)

    def _take(self, number: int, payload: bytes) -> None:
        assert self._next is not None
        if number > self._next:
            self._hold(number, payload)
            self.check()
        elif number == self._next:
            if self._append(payload):
                self._drain()
        elif self._known.get(number) == hash(payload):
            self.counts.repeats += 1
        elif any(low <= number <= high for low, high in self._given_up):
            self.counts.late += 1
        else:
            self._restart()
            self._take(number, payload)

    def _hold(self, number: int, payload: bytes) -> None:
        if number in self._ahead:
            return
        size = self._ahead_bytes + len(payload)
        if len(self._ahead) >= _MAX_AHEAD or size > _MAX_AHEAD_BYTES:
            self.counts.overflowed += 1
            return
        self._ahead[number] = payload
        self._ahead_bytes = size

    def _drain(self) -> None:
        while (payload := self._ahead.pop(self._next or 0, None)) is not None:
            self._ahead_bytes -= len(payload)
            if not self._append(payload):
                break

    def _append(self, payload: bytes) -> bool:
        """Put the next batch into the log; false when it cannot be read."""
        assert self._next is not None
        try:
            batch = decode(payload)
        except UndecodableError as error:
            self.counts.undecodable += 1
            self._warn("KV event batch cannot be read", number=self._next, reason=str(error))
            self._is_bad = True
            self.check()
            return False
        self._is_bad = False
        self._known[self._next] = hash(payload)
        self._known.pop(self._next - _KNOWN_BATCHES, None)
        if self.log.first is None:
            self.log.begin(self._next)
        self._next += 1
        events = []
        if self._announce:
            self._announce = False
            self.mirror.clear()
            events = [wire.ALL_BLOCKS_CLEARED]
        events += self._changes(batch)
        self._put(batch.time_ns, events, self.mirror.keyed_changes)
        return True

    def _put(self, time_ns: int, events: list[bytes], keyed: frozenset[bytes]) -> None:
        self._time_ns = time_ns
        for part in _parts(events):
            data = wire.batch(self.log.next, time_ns, self.rank, part)
            self.log.append(wire.response(data), keyed)
            self.counts.batches += 1

    def _changes(self, batch: Batch) -> list[bytes]:
        counts, mirror = self.counts, self.mirror
        malformed, orphans = mirror.malformed, mirror.orphans
        changes = mirror.apply(batch.events)
        counts.unknown_events += batch.unknown
        malformed = batch.malformed + mirror.malformed - malformed
        if malformed:
            counts.malformed_events += malformed
            self._warn("malformed KV events are left out", batch=self.log.next, events=malformed)
        if mirror.orphans != orphans:
            self._warn("KV blocks are left out: the one before them is not known")
        if batch.rank is not None and batch.rank != self.rank:
            self._warn("publisher names another rank", publisher=batch.rank)
        return changes

    def _start_at(self, number: int) -> None:
        self._next = number
        if number:
            self.counts.gaps += 1
            self._announce = True

    def _restart(self) -> None:
        self.counts.restarts += 1
        _log.warning("KV event publisher has restarted", rank=self.rank, last=self.last)
        self._next = 0
        self._has_restarted = True
        self._announce = True
        self._is_bad = False
        self._known.clear()
        self._given_up.clear()
        self._ahead.clear()
        self._ahead_bytes = 0
        self.wants = 0

    def _give_up(self) -> None:
        """Go on behind what cannot be had."""
        if self._next is None:
            self._start_at(min(self._ahead))
        else:
            first = self._next
            for number in [number for number in self._ahead if number < first]:
                self._ahead_bytes -= len(self._ahead.pop(number))
            self._next = min(self._ahead, default=first + 1)
            self.counts.gaps += 1
            self.counts.lost += self._next - first
            self._given_up = [*self._given_up[1 - _KNOWN_GAPS :], (first, self._next - 1)]
            self._announce = True
            self._is_bad = False
            _log.warning(
                "KV event batches are lost", rank=self.rank, first=first, last=self._next - 1
            )
        self._drain()
        if self._ahead:
            self.check()

    def _warn(self, event: str, **fields: object) -> None:
        """Say it the first time only; all are counted."""
        if event not in self._warned:
            self._warned.add(event)
            _log.warning(event, rank=self.rank, **fields)

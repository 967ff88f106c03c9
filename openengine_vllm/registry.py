"""The requests that this process has accepted and not yet ended.

Generate, Abort, Drain, Health and GetLoad share this one fact, so it has one owner: a plain
class without I/O. An id lives in one namespace over all inference RPCs; it is free again the
moment its request ends.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from openengine_vllm.protocol import errors


class EndReason(enum.Enum):
    """Why a live request is told to end before its engine output does."""

    ABORTED = "aborted"
    """A caller's Abort: unfinished outputs finish as CANCELLED."""
    DRAINED = "drained"
    """The drain's deadline passed: the stream fails with DRAINING."""
    ENGINE_DEAD = "engine_dead"
    """The engine is gone: the stream fails with INTERNAL, retryable."""
    SLOW_CLIENT = "slow_client"
    """Too much waits for the client to read it: the stream fails with OVERLOADED."""


@dataclass(slots=True, eq=False)
class Entry:
    """One accepted request; ``sequences`` is the number of engine slots that it counts for."""

    request_id: str
    sequences: int
    end_reason: EndReason | None = None
    closed: bool = False
    _on_end: list[Callable[[EndReason], None]] = field(default_factory=list)

    def on_end(self, callback: Callable[[EndReason], None]) -> None:
        """Have ``callback`` run once when the request is told to end (at once if it was)."""
        if self.end_reason is not None:
            callback(self.end_reason)
        else:
            self._on_end.append(callback)

    def end(self, reason: EndReason) -> bool:
        """Tell the request to end; only the first reason counts."""
        if self.closed or self.end_reason is not None:
            return False
        self.end_reason = reason
        callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            callback(reason)
        return True


class RequestRegistry:
    """Live requests by id, and the last ``remembered`` ids that have ended.

    Args:
        capacity: sequences that may be live at once (a request with n outputs counts n).
        remembered: how many ended ids are kept, so that a late Abort of one of them is
            told "already finished" and not "not found".
    """

    def __init__(self, capacity: int, remembered: int = 10_000) -> None:
        self.capacity = capacity
        """Sequences that may be live at once."""
        self._remembered = remembered
        self._live: dict[str, Entry] = {}
        self._sequences = 0
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._on_change: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._live.values()))

    @property
    def sequences(self) -> int:
        """Sequences that are live now."""
        return self._sequences

    def watch(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` run after each admission and each end."""
        self._on_change.append(callback)

    def unwatch(self, callback: Callable[[], None]) -> None:
        """Undo :meth:`watch`."""
        self._on_change.remove(callback)

    def admit(self, request_id: str, sequences: int) -> Entry:
        """Take a request in.

        Raises:
            OpenEngineError: DUPLICATE_REQUEST while the id is live, OVERLOADED when
                ``sequences`` more would pass the capacity.
        """
        if request_id in self._live:
            raise errors.duplicate_request(request_id)
        self.check_room(sequences)
        entry = Entry(request_id, sequences)
        self._live[request_id] = entry
        self._sequences += sequences
        self._ended.pop(request_id, None)
        self._changed()
        return entry

    def check_room(self, sequences: int) -> None:
        """Raise OVERLOADED when ``sequences`` more would pass the capacity."""
        if self._sequences + sequences > self.capacity:
            raise errors.overloaded(
                f"{self._sequences} sequences are live and {sequences} more would pass "
                f"the limit of {self.capacity}"
            )

    def close(self, entry: Entry) -> None:
        """End a request, exactly once: its id and its slots are free from here on."""
        if entry.closed:
            return
        entry.closed = True
        del self._live[entry.request_id]
        self._sequences -= entry.sequences
        self._ended[entry.request_id] = None
        if len(self._ended) > self._remembered:
            self._ended.popitem(last=False)
        self._changed()

    def forget(self, entry: Entry) -> None:
        """Close a request that was never accepted, so that its id leaves no trace."""
        if not entry.closed:
            self.close(entry)
            self._ended.pop(entry.request_id, None)

    def find(self, request_id: str) -> Entry | None:
        """The live request of this id, if there is one."""
        return self._live.get(request_id)

    def has_ended(self, request_id: str) -> bool:
        """Whether the id belongs to a remembered request that has ended."""
        return request_id in self._ended

    def _changed(self) -> None:
        for callback in tuple(self._on_change):
            callback()

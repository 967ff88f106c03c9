"""A bounded log of serialised events, read by any number of cursors.

Nothing is kept per reader but its place. One that falls behind what is kept has lost events and
is told so; it holds up neither the writer nor other readers.
"""

from __future__ import annotations

from collections.abc import Collection


class FellBehindError(Exception):
    """Events that the reader has not taken are no longer kept."""


class EventLog:
    """The last ``capacity`` events, in the order they came."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: list[tuple[int, bytes]] = [(0, b"")] * capacity
        self.next = 0
        """The number of the next event; the first one's is 0."""

    def append(self, kind: int, data: bytes) -> None:
        """Keep one more event, in place of the oldest."""
        self._slots[self.next % self.capacity] = kind, data
        self.next += 1

    def cursor(self, kinds: Collection[int]) -> Cursor:
        """A reader of the events of these kinds that come from now on."""
        return Cursor(self, frozenset(kinds), self.next)

    def read(self, start: int, kinds: Collection[int], most: int) -> tuple[list[bytes], int]:
        """Up to ``most`` events of these kinds from number ``start`` on.

        Returns:
            The events, and the number to go on with.

        Raises:
            FellBehindError: ``start`` is no longer kept.
        """
        if start < self.next - self.capacity:
            raise FellBehindError
        found: list[bytes] = []
        while start < self.next and len(found) < most:
            kind, data = self._slots[start % self.capacity]
            if kind in kinds:
                found.append(data)
            start += 1
        return found, start


class Cursor:
    """One reader's place in the log."""

    __slots__ = ("_log", "_next", "kinds")

    def __init__(self, log: EventLog, kinds: frozenset[int], start: int) -> None:
        self._log = log
        self.kinds = kinds
        self._next = start

    @property
    def behind(self) -> int:
        """Events, of whatever kind, that have come since the last one that was read."""
        return self._log.next - self._next

    def read(self, most: int) -> list[bytes]:
        """Up to ``most`` events that this reader has not had; none when there are no others.

        Raises:
            FellBehindError: the reader has lost events.
        """
        events, self._next = self._log.read(self._next, self.kinds, most)
        return events

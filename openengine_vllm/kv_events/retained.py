"""The last batches of one rank, serialised, under consecutive numbers.

Readers keep only their place, as with :mod:`openengine_vllm.events`; here the numbers are the
contract's, begin anywhere, and what is kept is bounded by bytes as well.
"""

from __future__ import annotations

from openengine_vllm.events import FellBehindError

_BATCH_OVERHEAD_BYTES = 200


class RetainedBatches:
    """Batches from :attr:`oldest` up to the one before :attr:`next`.

    Args:
        most: batches kept at the most.
        most_bytes: their bytes together at the most, some overhead included; the newest batch
            is kept whatever its size.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most = most
        self._most_bytes = most_bytes
        self._batches: dict[int, bytes] = {}
        self._keyed: dict[int, frozenset[bytes]] = {}
        self._bytes = 0
        self.first: int | None = None
        """The number of the first batch ever; None before it."""
        self.oldest = 0
        """The number of the oldest batch kept."""
        self.next = 0
        """The number of the next batch; until there is one, what is expected."""

    def __len__(self) -> int:
        return len(self._batches)

    def begin(self, number: int) -> None:
        """The first batch will have this number; only while there is none."""
        if self.first is None:
            self.oldest = self.next = number

    def keyed(self, number: int) -> frozenset[bytes]:
        """What was kept beside the batch of this number."""
        return self._keyed.get(number, frozenset())

    def append(self, batch: bytes, keyed: frozenset[bytes] = frozenset()) -> None:
        """Keep one more batch, under the next number.

        Args:
            keyed: of its blocks those that the mirror calls keyed.
        """
        if keyed:
            self._keyed[self.next] = keyed
        if self.first is None:
            self.first = self.next
        self._batches[self.next] = batch
        self._bytes += len(batch) + _BATCH_OVERHEAD_BYTES
        self.next += 1
        while len(self._batches) > self.most or (
            self._bytes > self._most_bytes and len(self._batches) > 1
        ):
            dropped = self._batches.pop(self.oldest)
            self._keyed.pop(self.oldest, None)
            self._bytes -= len(dropped) + _BATCH_OVERHEAD_BYTES
            self.oldest += 1

    def cursor(self) -> BatchCursor:
        """A reader of the batches that come from now on."""
        return BatchCursor(self, None if self.first is None else self.next)

    def cursor_at(self, number: int) -> BatchCursor | None:
        """A reader whose first batch is ``number``; None unless that is kept, or the next."""
        if self.first is None or not self.oldest <= number <= self.next:
            return None
        return BatchCursor(self, number)

    def read(self, start: int, most: int) -> list[bytes]:
        """Up to ``most`` batches from number ``start`` on.

        Raises:
            FellBehindError: ``start`` is no longer kept.
        """
        if start < self.oldest:
            raise FellBehindError
        stop = min(start + most, self.next)
        return [self._batches[number] for number in range(start, stop)]


class BatchCursor:
    """One reader's place."""

    __slots__ = ("_log", "next")

    def __init__(self, log: RetainedBatches, start: int | None) -> None:
        self._log = log
        self.next = start
        """The number of the batch to read next; None for the rank's first one."""

    def read(self, most: int) -> list[bytes]:
        """Up to ``most`` batches that this reader has not had; none when there are no others.

        Raises:
            FellBehindError: the reader has lost batches.
        """
        if self.next is None:
            if self._log.first is None:
                return []
            self.next = self._log.first
        batches = self._log.read(self.next, most)
        self.next += len(batches)
        return batches

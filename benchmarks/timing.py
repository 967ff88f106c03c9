"""When the messages of streams arrived, as their reader saw it."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """What the reader of all streams of one pass saw; times in seconds."""

    wall: float
    tokens: int
    messages: int
    """Those that carried tokens; a stream's closing messages are left out."""
    ttft_p50: float
    """From sending the request to its first message with a token."""
    ttft_p99: float
    gap_p50: float
    """Between two messages of a stream, however many tokens they carry."""
    gap_p99: float
    reader_cpu: float
    """CPU time that the reading process used."""

    def to_line(self) -> str:
        """The timings as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"


class Recorder:
    """Collects the times of a pass, which starts now."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._cpu_before = time.process_time()
        self._first: array[float] = array("d")
        self._gaps: array[float] = array("d")
        self._tokens = 0

    def stream(self) -> StreamClock:
        """The clock of a stream whose request is sent now."""
        return StreamClock(self._first, self._gaps)

    def ended(self, tokens: int) -> None:
        """Count a stream that has ended with so many tokens."""
        self._tokens += tokens

    def timings(self) -> Timings:
        """The outcome of a pass that ends now."""
        wall = time.perf_counter() - self._started
        return Timings(
            wall=wall,
            tokens=self._tokens,
            messages=len(self._first) + len(self._gaps),
            ttft_p50=percentile(self._first, 50),
            ttft_p99=percentile(self._first, 99),
            gap_p50=percentile(self._gaps, 50),
            gap_p99=percentile(self._gaps, 99),
            reader_cpu=time.process_time() - self._cpu_before,
        )


class StreamClock:
    """Notes the arrival of each message of one stream."""

    __slots__ = ("_first", "_gaps", "_last", "_seen")

    def __init__(self, first: array[float], gaps: array[float]) -> None:
        self._first = first
        self._gaps = gaps
        self._seen = False
        self._last = time.perf_counter()

    def message(self) -> None:
        """A message with at least one token has arrived."""
        now = time.perf_counter()
        (self._gaps if self._seen else self._first).append(now - self._last)
        self._seen = True
        self._last = now


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` in a hundred do not exceed; 0 for none."""
    if not values:
        return 0.0
    ranked = sorted(values)
    rank = -(-len(ranked) * percent // 100)
    return ranked[max(0, int(rank) - 1)]

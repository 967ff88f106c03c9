"""Counters, gauges and histograms that cost a streamed message some hundred nanoseconds.

Those of ``prometheus_client`` take a lock for each change, which costs a stream's message more
than all the rest that is counted. Here a change is plain arithmetic on a cell that its user has
looked up before; only what is shown is ``prometheus_client``'s.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Generic, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

MOST_SERIES = 500
"""Label sets of one instrument; what comes beyond is counted together as ``other``."""
_OTHER = "other"

Labels: TypeAlias = tuple[str, ...]


class Cell:
    """One number. Add to it, or set it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class Distribution:
    """Observations of one histogram."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket, not cumulated; the last one has no bound."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one more value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


_Cell = TypeVar("_Cell", Cell, Distribution)


class Instrument(Collector):
    """A metric: its name, what it means, and its series.

    Args:
        name: in full, as it is exported, but for what a histogram's series add to it.
        meaning: one line for people.
        unit: of a value.
        labels: their names.
    """

    kind = ""

    def __init__(self, name: str, meaning: str, unit: str, labels: Labels = ()) -> None:
        self.name = name
        self.meaning = meaning
        self.unit = unit
        self.labels = labels

    def describe(self) -> Iterable[Metric]:
        """The metric without its series."""
        return [Metric(self.name.removesuffix("_total"), self.meaning, self.kind)]

    def collect(self) -> Iterable[Metric]:
        """The metric with its series."""
        return [self._family()]

    @abstractmethod
    def _family(self) -> Metric:
        """The metric with its series."""


class _Recorded(Instrument, Generic[_Cell]):
    """An instrument whose users change its cells."""

    def __init__(self, name: str, meaning: str, unit: str, labels: Labels = ()) -> None:
        super().__init__(name, meaning, unit, labels)
        self._cells: dict[Labels, _Cell] = {}
        if not labels:
            self.cell()

    def cell(self, *values: str) -> _Cell:
        """The cell of these label values; it stays the same one."""
        found = self._cells.get(values)
        if found is None:
            if len(self._cells) >= MOST_SERIES:
                values = (_OTHER,) * len(values)
            found = self._cells.setdefault(values, self._new())
        return found

    @abstractmethod
    def _new(self) -> _Cell:
        """A cell that nothing is in."""


class Counter(_Recorded[Cell]):
    """Counts upwards."""

    kind = "counter"

    def _new(self) -> Cell:
        return Cell()

    def _family(self) -> Metric:
        return _numbers(self, {values: cell.value for values, cell in self._cells.items()})


class Gauge(Counter):
    """Goes up and down."""

    kind = "gauge"


class Histogram(_Recorded[Distribution]):
    """Counts values by their size.

    Args:
        bounds: upper ones of the buckets, ascending; one without a bound follows.
    """

    kind = "histogram"

    def __init__(
        self,
        name: str,
        meaning: str,
        unit: str,
        labels: Labels = (),
        *,
        bounds: Sequence[float],
    ) -> None:
        self._bounds = tuple(bounds)
        self._shown = [*map(str, map(float, bounds)), "+Inf"]
        super().__init__(name, meaning, unit, labels)

    def _new(self) -> Distribution:
        return Distribution(self._bounds)

    def _family(self) -> Metric:
        family = HistogramMetricFamily(self.name, self.meaning, labels=self.labels)
        for values, cell in self._cells.items():
            buckets = list(zip(self._shown, accumulate(cell.counts), strict=True))
            family.add_metric(values, buckets, cell.sum)
        return family


class Reading(Instrument):
    """A number that its owner keeps anyway and that is looked up when somebody asks.

    Args:
        read: the values by label values; called on the event loop, so it has to be short.
        counts: whether they only ever grow.
    """

    def __init__(
        self,
        name: str,
        meaning: str,
        unit: str,
        read: Callable[[], Mapping[Labels, float] | float],
        labels: Labels = (),
        *,
        counts: bool = False,
    ) -> None:
        super().__init__(name, meaning, unit, labels)
        self.kind = "counter" if counts else "gauge"
        self._read = read

    def _family(self) -> Metric:
        read = self._read()
        return _numbers(self, read if isinstance(read, Mapping) else {(): read})


def _numbers(instrument: Instrument, values: Mapping[Labels, float]) -> Metric:
    family_class = CounterMetricFamily if instrument.kind == "counter" else GaugeMetricFamily
    family = family_class(instrument.name, instrument.meaning, labels=instrument.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


_Instrument = TypeVar("_Instrument", bound=Instrument)


class InstrumentSet:
    """The instruments of one server, in a registry of its own.

    Whoever has something to count makes an instrument and adds it, once.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        """Takes any other collector as well."""
        self.instruments: list[Instrument] = []
        """In the order in which they were added."""

    def add(self, instrument: _Instrument) -> _Instrument:
        """Have an instrument shown, and return it.

        Raises:
            ValueError: there is one of this name.
        """
        self.registry.register(instrument)
        self.instruments.append(instrument)
        return instrument

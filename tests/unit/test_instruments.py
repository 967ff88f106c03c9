"""Instruments by themselves: what Prometheus is shown after what was counted."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from openengine_vllm.metrics.instruments import (
    MOST_SERIES,
    Counter,
    Gauge,
    Histogram,
    InstrumentSet,
    Labels,
    Reading,
)
from tests.support.scrape import Scrape


def shown(instruments: InstrumentSet) -> Scrape:
    return Scrape(generate_latest(instruments.registry).decode())


def test_counters_and_gauges() -> None:
    instruments = InstrumentSet()
    calls = instruments.add(Counter("calls_total", "Calls.", "calls", ("rpc", "code")))
    running = instruments.add(Gauge("running", "Running.", "calls"))
    calls.cell("A", "OK").value += 1
    calls.cell("A", "OK").value += 2
    calls.cell("B", "OK").value += 5
    running.cell().value += 2
    running.cell().value -= 1
    scrape = shown(instruments)
    assert scrape.value("calls_total", rpc="A", code="OK") == 3
    assert scrape.value("calls_total", rpc="B", code="OK") == 5
    assert scrape.value("running") == 1
    assert scrape.metrics["calls"].type == "counter"
    assert scrape.metrics["running"].type == "gauge"
    assert scrape.metrics["calls"].documentation == "Calls."


def test_what_has_no_labels_is_there_before_it_is_counted() -> None:
    instruments = InstrumentSet()
    instruments.add(Counter("calls_total", "Calls.", "calls"))
    instruments.add(Histogram("time_seconds", "Time.", "seconds", bounds=(1,)))
    scrape = shown(instruments)
    assert ("calls_total", frozenset()) in scrape.samples
    assert ("time_seconds_count", frozenset()) in scrape.samples


def test_a_histogram() -> None:
    instruments = InstrumentSet()
    times = instruments.add(
        Histogram("time_seconds", "Time.", "seconds", ("rpc",), bounds=(0.1, 1, 10))
    )
    for value in (0.05, 0.1, 0.5, 1.5, 100):
        times.cell("A").observe(value)
    scrape = shown(instruments)
    buckets = {
        bound: scrape.value("time_seconds_bucket", rpc="A", le=bound)
        for bound in ("0.1", "1.0", "10.0", "+Inf")
    }
    assert buckets == {"0.1": 2, "1.0": 3, "10.0": 4, "+Inf": 5}
    assert scrape.value("time_seconds_count", rpc="A") == 5
    assert scrape.value("time_seconds_sum", rpc="A") == pytest.approx(102.15)


def test_a_reading_is_looked_up_each_time() -> None:
    instruments = InstrumentSet()
    values: dict[Labels, float] = {("a",): 1}
    instruments.add(Reading("depth", "Depth.", "events", lambda: values, ("queue",)))
    instruments.add(Reading("made_total", "Made.", "events", lambda: 7, counts=True))
    assert shown(instruments).value("depth", queue="a") == 1
    values[("b",)] = 2
    scrape = shown(instruments)
    assert scrape.value("depth", queue="b") == 2
    assert scrape.value("made_total") == 7
    assert scrape.metrics["made"].type == "counter"


def test_series_are_bounded() -> None:
    instruments = InstrumentSet()
    calls = instruments.add(Counter("calls_total", "Calls.", "calls", ("field", "code")))
    for number in range(MOST_SERIES + 50):
        calls.cell(str(number), "x").value += 1
    scrape = shown(instruments)
    assert len(scrape.samples) == MOST_SERIES + 1
    assert scrape.value("calls_total", field="other", code="other") == 50
    assert scrape.value("calls_total", field="0", code="x") == 1


@pytest.mark.parametrize("second", ["calls_total", "calls"])
def test_a_name_is_taken_once(second: str) -> None:
    instruments = InstrumentSet()
    instruments.add(Counter("calls_total", "Calls.", "calls"))
    with pytest.raises(ValueError, match="calls"):
        instruments.add(Counter(second, "Others.", "calls"))


def test_two_servers_do_not_share_what_they_count() -> None:
    first, second = InstrumentSet(), InstrumentSet()
    for instruments in (first, second):
        instruments.add(Counter("calls_total", "Calls.", "calls"))
    counter = first.instruments[0]
    assert isinstance(counter, Counter)
    counter.cell().value += 1
    assert shown(first).value("calls_total") == 1
    assert shown(second).value("calls_total") == 0

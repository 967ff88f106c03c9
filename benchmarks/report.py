"""Figures as Markdown tables and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.frontends import HTTP, IN_PROCESS, OPENENGINE, SPLIT
from benchmarks.measurement import Figures

Value = Callable[[Figures], float]
"""Takes one value of a pass's figures."""


def markdown(figures: Sequence[Figures]) -> str:
    """The report: medians over the rounds, comparisons, and each round's own figures."""
    parts = [_medians(figures), *_comparisons(figures), _rounds(figures)]
    return "\n\n".join(part for part in parts if part)


def as_json(figures: Sequence[Figures], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, with the settings it was measured under."""
    return {"settings": settings, "passes": [asdict(one) for one in figures]}


def _medians(figures: Sequence[Figures]) -> str:
    rows = []
    for concurrency in _concurrencies(figures):
        for name in _frontends(figures):
            passes = _select(figures, name, concurrency)
            if passes:
                rows.append(_median_row(name, concurrency, passes))
    heads = (
        "frontend",
        "streams",
        "CPU µs per token",
        "tokens/s",
        "TTFT p50 / p99, ms",
        "between messages p50 / p99, ms",
        "RSS idle / peak, MiB",
        "messages per token",
    )
    return table(heads, rows)


def _median_row(name: str, concurrency: int, passes: Sequence[Figures]) -> list[str]:
    def middle(value: Value, digits: int = 1) -> str:
        return f"{median(map(value, passes)):,.{digits}f}"

    return [
        name,
        str(concurrency),
        _spread([one.cpu_us_per_token for one in passes]),
        middle(lambda one: one.tokens_per_second, 0),
        f"{middle(lambda one: one.ttft_p50_ms)} / {middle(lambda one: one.ttft_p99_ms)}",
        f"{middle(lambda one: one.gap_p50_ms)} / {middle(lambda one: one.gap_p99_ms)}",
        f"{middle(lambda one: one.rss_idle_mib, 0)} / {middle(lambda one: one.rss_peak_mib, 0)}",
        middle(lambda one: one.messages_per_token, 3),
    ]


def _comparisons(figures: Sequence[Figures]) -> list[str]:
    lines = []
    for concurrency in _concurrencies(figures):
        ours = _by_round(figures, OPENENGINE, concurrency)
        http = _by_round(figures, HTTP, concurrency)
        alone = _by_round(figures, IN_PROCESS, concurrency)
        if ratios := [
            ours[round_].cpu_us_per_token / http[round_].cpu_us_per_token
            for round_ in ours.keys() & http.keys()
        ]:
            lines.append(
                f"- {concurrency} streams: {OPENENGINE} takes {_spread(ratios, 2)} times the CPU "
                f"per token of {HTTP}."
            )
        split = _by_round(figures, SPLIT, concurrency)
        if ratios := [
            split[round_].cpu_us_per_token / ours[round_].cpu_us_per_token
            for round_ in ours.keys() & split.keys()
        ]:
            lines.append(
                f"- {concurrency} streams: the split revision takes {_spread(ratios, 3)} times the "
                f"CPU per token of the contract."
            )
        if rounds := ours.keys() & alone.keys():
            lines.append(
                f"- {concurrency} streams: on top of vLLM's own process ({IN_PROCESS}), "
                f"{OPENENGINE} takes "
                f"{_added(ours, alone, rounds, lambda one: one.cpu_us_per_token)} µs per token, "
                f"{_added(ours, alone, rounds, lambda one: one.rss_idle_mib)} MiB idle and "
                f"{_added(ours, alone, rounds, lambda one: one.rss_peak_mib)} MiB at its peak."
            )
    return ["\n".join(lines)] if lines else []


def _added(
    ours: dict[int, Figures], alone: dict[int, Figures], rounds: Iterable[int], value: Value
) -> str:
    return _spread([value(ours[round_]) - value(alone[round_]) for round_ in rounds])


def _rounds(figures: Sequence[Figures]) -> str:
    rows = [
        [
            str(one.round),
            one.frontend,
            str(one.concurrency),
            f"{one.cpu_us_per_token:.1f}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.ttft_p50_ms:.1f}",
            f"{one.gap_p50_ms:.1f}",
            f"{one.frontend_cores:.2f}",
            f"{one.reader_cores:.2f}",
        ]
        for one in figures
    ]
    heads = (
        "round",
        "frontend",
        "streams",
        "CPU µs per token",
        "tokens/s",
        "TTFT p50, ms",
        "between messages p50, ms",
        "cores of the frontend",
        "cores of the reader",
    )
    return table(heads, rows)


def _spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, with the range where there is one."""
    middle = f"{median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _frontends(figures: Sequence[Figures]) -> list[str]:
    return list(dict.fromkeys(one.frontend for one in figures))


def _concurrencies(figures: Sequence[Figures]) -> list[int]:
    return list(dict.fromkeys(one.concurrency for one in figures))


def _select(figures: Sequence[Figures], frontend: str, concurrency: int) -> list[Figures]:
    return [one for one in figures if one.frontend == frontend and one.concurrency == concurrency]


def _by_round(figures: Sequence[Figures], frontend: str, concurrency: int) -> dict[int, Figures]:
    return {one.round: one for one in _select(figures, frontend, concurrency)}

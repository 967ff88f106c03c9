"""What one pass costs the frontend process, read from outside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import psutil

from benchmarks.frontends import Running
from benchmarks.timing import Timings
from benchmarks.workload import Pass

_SAMPLE_SECONDS = 0.05
_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Figures:
    """One measured pass, in the units of the report."""

    frontend: str
    concurrency: int
    round: int
    cpu_us_per_token: float
    """User and system time of the frontend process alone; no child, no reader."""
    tokens_per_second: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    rss_idle_mib: float
    """Of the frontend process after the warm-up."""
    rss_peak_mib: float
    messages_per_token: float
    frontend_cores: float
    """Processors that the frontend process kept busy, on average."""
    reader_cores: float
    """The same of the reading process; for the in-process frontend it is the same process."""


async def measure(running: Running, frontend: str, round_: int, run: Pass) -> Figures:
    """Do one pass and take its figures; what is measured is warm already."""
    process = psutil.Process(running.pid)
    idle = process.memory_info().rss
    async with _peak_rss(process) as peak:
        before = _cpu_seconds(process)
        timings = await running.run(run)
        used = _cpu_seconds(process) - before
    return _figures(frontend, round_, run, timings, used, idle, max(peak))


def _figures(
    frontend: str, round_: int, run: Pass, timings: Timings, used: float, idle: int, peak: int
) -> Figures:
    return Figures(
        frontend=frontend,
        concurrency=run.concurrency,
        round=round_,
        cpu_us_per_token=used / timings.tokens * 1e6,
        tokens_per_second=timings.tokens / timings.wall,
        ttft_p50_ms=timings.ttft_p50 * 1e3,
        ttft_p99_ms=timings.ttft_p99 * 1e3,
        gap_p50_ms=timings.gap_p50 * 1e3,
        gap_p99_ms=timings.gap_p99 * 1e3,
        rss_idle_mib=idle / _MIB,
        rss_peak_mib=peak / _MIB,
        messages_per_token=timings.messages / timings.tokens,
        frontend_cores=used / timings.wall,
        reader_cores=timings.reader_cpu / timings.wall,
    )


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@asynccontextmanager
async def _peak_rss(process: psutil.Process) -> AsyncIterator[list[int]]:
    """Samples of the resident memory in bytes, added to while the context lasts."""
    samples = [process.memory_info().rss]

    async def sample() -> None:
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            samples.append(process.memory_info().rss)

    task = asyncio.create_task(sample())
    try:
        yield samples
        samples.append(process.memory_info().rss)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, psutil.NoSuchProcess):
            await task

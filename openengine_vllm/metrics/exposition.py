"""The text that Prometheus reads, made in slices so that streams go on meanwhile.

A large engine has thousands of series, which take tens of milliseconds. A thread would not help:
it holds the interpreter for as long, five milliseconds at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SLICE_SECONDS = 0.001


class _One(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


async def exposition(*registries: CollectorRegistry) -> bytes:
    """All that these registries hold, one after another."""
    parts = []
    since = time.perf_counter()
    for registry in registries:
        for metric in registry.collect():
            parts.append(generate_latest(_One(metric)))
            if time.perf_counter() - since > _SLICE_SECONDS:
                await asyncio.sleep(0)
                since = time.perf_counter()
    return b"".join(parts)

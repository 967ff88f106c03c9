"""Reads a metrics endpoint as Prometheus does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

SCRAPE_SECONDS = 60


@dataclass(frozen=True)
class Reply:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: str


async def http(address: str, request: str = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") -> Reply:
    """Send these characters and read until the server closes the connection."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(request.encode())
        async with asyncio.timeout(SCRAPE_SECONDS):
            data = (await reader.read(-1)).decode()
    finally:
        writer.close()
    head, _, body = data.partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Reply(int(first.split()[1]), headers, body)


class Scrape:
    """All samples of one answer."""

    def __init__(self, text: str) -> None:
        self.metrics: dict[str, Metric] = {}
        """By name, as the answer's TYPE lines have it."""
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for metric in text_string_to_metric_families(text):
            assert metric.name not in self.metrics, f"{metric.name} comes twice"
            self.metrics[metric.name] = metric
            for sample in metric.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.samples, f"{key} comes twice"
                self.samples[key] = sample.value

    @property
    def names(self) -> set[str]:
        """Those of the samples."""
        return {name for name, _ in self.samples}

    def value(self, name: str, **labels: str) -> float:
        """The sample of exactly these labels, 0 where there is none."""
        return self.samples.get((name, frozenset(labels.items())), 0)

    def sum(self, name: str, **labels: str) -> float:
        """Over the samples that have these labels, whatever others they have."""
        wanted = set(labels.items())
        return sum(v for (key, has), v in self.samples.items() if key == name and wanted <= has)


async def scrape(address: str) -> Scrape:
    """What the endpoint shows now."""
    reply = await http(address)
    assert reply.status == 200
    return Scrape(reply.body)

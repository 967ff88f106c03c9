"""`top` on a real server whose engine, clock and pace the test decides.

    python -m tests.unit.top_screen --write

draws the screen that the documents show.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Final
from unittest import mock

from textual.pilot import Pilot
from textual.widgets import DataTable
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerIterationDetails, SchedulerStats

from openengine_vllm.client import Client
from openengine_vllm.client.commands.top.app import SUBSCRIBE_AGAIN_SECONDS, Top
from openengine_vllm.engine import stats as engine_stats
from openengine_vllm.engine.stats import Demand
from openengine_vllm.protocol import v1 as pb
from tests.support.calls import PATIENCE_SECONDS, eventually
from tests.unit.live_server import LiveServer, live_server

START: Final = 1_800_000_000.0
"""Seconds since the epoch: 08:00:00 UTC."""
INTERVAL: Final = 5.0
TARGET: Final = "127.0.0.1:50051"
"""What the screen shows as the address."""
SIZE: Final = (110, 34)
DOCS: Final = Path(__file__).parents[2] / "docs"
PICTURE: Final = DOCS / "top.svg"
TEXT: Final = DOCS / "operations.md"
_STEPS: Final = 55
_FONTS: Final = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
"""What a picture would fetch from elsewhere."""
_FENCE: Final = re.compile(r"(<!-- top -->\n```text\n).*?(\n```\n)", re.DOTALL)


class Time:
    """A clock that stands still, and a pace that waits for the test."""

    def __init__(self) -> None:
        self.now = START
        self._sleepers: list[tuple[float, asyncio.Event]] = []
        self._changed = asyncio.Event()

    def clock(self) -> float:
        """Seconds since the epoch."""
        return self.now

    async def pace(self, seconds: float) -> None:
        """Waits for the next :meth:`tick`."""
        sleeper = seconds, asyncio.Event()
        self._sleepers.append(sleeper)
        self._changed.set()
        try:
            await sleeper[1].wait()
        finally:
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)

    async def asked(self) -> None:
        """Waits until a round of questions is over."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not any(seconds != SUBSCRIBE_AGAIN_SECONDS for seconds, _ in self._sleepers):
                self._changed.clear()
                await self._changed.wait()

    async def tick(self, seconds: float = INTERVAL) -> None:
        """Some seconds pass, and the server is asked again."""
        await self.asked()
        self.now += seconds
        sleepers, self._sleepers = self._sleepers, []
        for _, turn in sleepers:
            turn.set()
        await self.asked()


class Shown:
    """The screen, and the time that it goes by."""

    def __init__(self, app: Top, pilot: Pilot[int], time: Time) -> None:
        self.app, self.pilot, self.time = app, pilot, time

    async def lines(self) -> list[str]:
        """The screen's text, once everything is drawn."""
        await self.pilot.pause()
        table = self.app.screen_stack[0].query_one("#events", DataTable)
        while self.app._following and table.scroll_offset.y < table.max_scroll_y:
            await self.pilot.pause()
        strips = self.app.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip).rstrip() for strip in strips]

    async def text(self) -> str:
        """The lines as one text."""
        return "\n".join(await self.lines())

    async def ticks_until(self, text: str) -> None:
        """Asks the server until the screen has this text."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while text not in await self.text():
                await self.time.tick()

    async def happened(self, kind: pb.RuntimeEventType.ValueType, at: float) -> None:
        """Waits until the last event is of this type and of this time."""
        expected = kind, round(at * 1e9)
        events = self.app.monitor.events
        await eventually(
            lambda: events and (events[-1].type, events[-1].timestamp_unix_nanos) == expected,
            "the event has come",
        )


@asynccontextmanager
async def shown(
    target: str, time: Time, types: Sequence[pb.RuntimeEventType.ValueType] = ()
) -> AsyncIterator[Shown]:
    """`top` on a server, after its first round of questions."""
    async with Client(target, timeout=PATIENCE_SECONDS) as client:
        app = Top(client, TARGET, INTERVAL, types, clock=time.clock, pace=time.pace)
        async with app.run_test(size=SIZE) as pilot:
            await time.asked()
            yield Shown(app, pilot, time)


@asynccontextmanager
async def engine_at(time: Time) -> AsyncIterator[LiveServer]:
    """A server whose engine's figures are of this time."""
    still = SimpleNamespace(monotonic=time.clock, time_ns=lambda: round(time.now * 1e9))
    info = pb.EngineInfo(
        engine_name="vllm",
        engine_version="0.32.0",
        role=pb.ENGINE_ROLE_AGGREGATED,
        instance_id="6f1d0a52c3",
        supported_models=["demo"],
    )
    with mock.patch.object(engine_stats, "time", still):
        async with live_server(engine_info=info) as live:
            live.engine.stats.configure([0], 1024, prefix_caching=True)
            yield live


async def subscribed(live: LiveServer) -> None:
    """Waits until somebody has the server's events."""
    await eventually(lambda: live.engine.stats._watchers, "somebody has the events")


def step(
    live: LiveServer,
    number: int,
    *,
    running: int,
    queued: int = 0,
    prefill: int = 0,
    usage: float = 0.0,
    tokens: int = 0,
) -> None:
    """The engine computes a step, and tells of it.

    Args:
        live: whose engine.
        number: of the step.
        running: requests in the batch.
        queued: requests that wait.
        prefill: those that run for the first time, each with a prompt of 80 tokens.
        usage: share of the KV blocks.
        tokens: that were generated since the last step.
    """
    engine = live.engine
    engine.demand = Demand(running + queued, 0, 120 * running, 80 * queued)
    engine.stats.progress.tokens += tokens
    engine.stats.record(
        0,
        SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=queued,
            kv_cache_usage=usage,
            prefix_cache_stats=PrefixCacheStats(
                requests=prefill, queries=80 * prefill, hits=32 * prefill
            ),
            iteration_details=SchedulerIterationDetails(
                iteration_index=number,
                num_ctx_requests=prefill,
                num_ctx_tokens=80 * prefill,
                num_generation_requests=running - prefill,
                num_generation_tokens=running - prefill,
                elapsed_ms=7.5,
            ),
        ),
    )


async def drawn() -> tuple[str, str]:
    """The documents' screen, as a picture and as text: some minutes of work, busier and busier."""
    time = Time()
    async with engine_at(time) as live, shown(live.address, time) as screen:
        await subscribed(live)
        for number in range(1, _STEPS + 1):
            wave = 0.5 - math.cos(number / 6) / 2
            running = 1 + round(7 * wave)
            step(
                live,
                number,
                running=running,
                # The last step tells of the queue, whatever came before it.
                queued=2 if number == _STEPS else max(0, running - 5),
                prefill=running // 3,
                usage=0.1 + wave / 2,
                tokens=round(900 * wave),
            )
            await screen.time.tick()
        await screen.happened(pb.RUNTIME_EVENT_TYPE_QUEUE, time.now - INTERVAL)
        await time.tick(0)
        text = await screen.text()
        picture = screen.app.export_screenshot(title="openengine-vllm top")
        return _FONTS.sub("", picture), text


def document_with(text: str) -> str:
    """The operator's document with this screen in it."""
    fenced, found = _FENCE.subn(
        lambda match: match[1] + text + match[2], TEXT.read_text(encoding="utf-8")
    )
    assert found == 1
    return fenced


async def _main() -> None:
    picture, text = await drawn()
    PICTURE.write_text(picture, encoding="utf-8")
    TEXT.write_text(document_with(text), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    asyncio.run(_main())

"""A server whose engine tells of more steps than it makes: ``python -m benchmarks.pumped_server``.

While anybody subscribes to runtime events, steps that never were are recorded as vLLM's stat
logger records real ones, each with a pass, another batch and another queue.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import Iterator, Sequence

from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerIterationDetails, SchedulerStats

from openengine_vllm import logs
from openengine_vllm.cli import take_over_stdout
from openengine_vllm.engine.stats import EngineStats
from openengine_vllm.lifecycle import Serving
from openengine_vllm.loading import load_engine
from openengine_vllm.process import Addresses, Process
from openengine_vllm.settings import add_server_arguments, server_settings

EVENTS_PER_STEP = 3
_TICK_SECONDS = 0.005


def main(argv: Sequence[str]) -> int:
    """Serve until told to stop: first argument events per second, then flags of vLLM's."""
    rate, *flags = argv
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    settings = server_settings(parser.parse_args(["--port", "0"]), {})
    logs.configure(settings.log_level)
    announce = take_over_stdout()
    pumps: list[asyncio.Future[None]] = []

    def load(instance_id: str) -> Serving:
        return load_engine(flags, "pumped", settings, instance_id, "0")

    def on_ready(addresses: Addresses, serving: Serving) -> None:
        pumps.append(asyncio.ensure_future(pump(serving.engine.stats, float(rate))))
        announce(f"openengine ready grpc={addresses.grpc}")

    return asyncio.run(Process(settings, load, on_ready).run())


async def pump(stats: EngineStats, events_per_second: float) -> None:
    """Record steps for as long as somebody watches them."""
    steps = _steps()
    loop = asyncio.get_running_loop()
    due, last = 0.0, loop.time()
    while True:
        await asyncio.sleep(_TICK_SECONDS)
        now = loop.time()
        due += (now - last) * events_per_second / EVENTS_PER_STEP if stats.watched else 0
        last = now
        for _ in range(int(due)):
            stats.record(0, next(steps))
        due -= int(due)


def _steps() -> Iterator[SchedulerStats]:
    """Made beforehand, since making one costs more than recording it."""
    made = [
        SchedulerStats(
            num_running_reqs=number % 2 + 1,
            num_waiting_reqs=number % 3,
            prefix_cache_stats=PrefixCacheStats(),
            iteration_details=SchedulerIterationDetails(
                iteration_index=number,
                num_ctx_requests=0,
                num_ctx_tokens=0,
                num_generation_requests=number % 2 + 1,
                num_generation_tokens=number % 2 + 1,
                elapsed_ms=1.0,
            ),
        )
        for number in range(600)
    ]
    return itertools.cycle(made)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

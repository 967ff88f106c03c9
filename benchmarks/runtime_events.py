"""What subscribers of runtime events cost: ``python -m benchmarks.runtime_events``.

Streams generate all the time. Without subscribers and with many of them, one of which never
reads, take turns on one server. While there are subscribers the server is told of many steps
beside its engine's own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import grpc
import psutil

from benchmarks.frontends import announced
from benchmarks.processes import BenchmarkError, child
from benchmarks.program import run, say
from benchmarks.report import table
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub

_WAIT_SECONDS = 600.0
_WARM_SECONDS = 3.0
_MAX_TOKENS = 1500
_NEVER_READS = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """One turn."""

    subscribers: int
    round: int
    tokens_per_second: float
    events_per_second: float
    """Told by the engine and by the pump; a merged one counts for all that it tells of."""
    deliveries_per_second: float
    frontend_cores: float
    rss_mib: float
    """Of the frontend process, the largest."""


@dataclass(slots=True)
class Counts:
    """What has arrived."""

    tokens: int = 0
    passes: int = 0
    deliveries: int = 0


class Traffic:
    """One server under test, and what is asked of it."""

    def __init__(self, address: str, server: psutil.Process) -> None:
        self._address = address
        self._server = server
        self._serial = itertools.count()
        self.counts = Counts()

    async def generate(self, stub: OpenEngineStub) -> None:
        """One stream after another."""
        while True:
            request = pb.GenerateRequest(
                request_id=f"stream-{next(self._serial)}",
                token_ids=pb.TokenIds(ids=[20, 21]),
                sampling=pb.SamplingParams(temperature=1.0),
                stopping=pb.StoppingOptions(max_tokens=_MAX_TOKENS, ignore_eos=True),
            )
            async for event in stub.Generate(request):
                self.counts.tokens += len(event.token.tokens)

    async def measure(self, subscribers: int, round_: int, seconds: float) -> Figures:
        """One turn with so many subscribers."""
        async with self._subscribed(subscribers):
            await asyncio.sleep(_WARM_SECONDS)
            before, cpu, start = asdict(self.counts), _cpu(self._server), time.perf_counter()
            largest = 0
            while time.perf_counter() < start + seconds:
                await asyncio.sleep(0.1)
                largest = max(largest, self._server.memory_info().rss)
            taken = time.perf_counter() - start
            after = asdict(self.counts)
            rates = {name: (after[name] - before[name]) / taken for name in before}
            return Figures(
                subscribers,
                round_,
                tokens_per_second=rates["tokens"],
                events_per_second=rates["passes"] * 3,
                deliveries_per_second=rates["deliveries"],
                frontend_cores=(_cpu(self._server) - cpu) / taken,
                rss_mib=largest / 2**20,
            )

    @asynccontextmanager
    async def _subscribed(self, subscribers: int) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            tasks = []
            for number in range(subscribers):
                options = _NEVER_READS if number == 0 else ()
                channel = await stack.enter_async_context(
                    grpc.aio.insecure_channel(self._address, options=options)
                )
                call = OpenEngineStub(channel).SubscribeRuntimeEvents(
                    pb.SubscribeRuntimeEventsRequest()
                )
                await call.initial_metadata()
                if number:
                    tasks.append(asyncio.ensure_future(self._read(call, number == 1)))
            yield
            for task in tasks:
                if task.done():
                    raise BenchmarkError(f"a subscription has ended: {task.exception()}")
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(
        self,
        call: grpc.aio.UnaryStreamCall[
            pb.SubscribeRuntimeEventsRequest, pb.SubscribeRuntimeEventsResponse
        ],
        counts: bool,
    ) -> None:
        async for response in call:
            self.counts.deliveries += 1
            event = response.runtime_event
            if counts and event.type == pb.RUNTIME_EVENT_TYPE_FORWARD_PASS:
                self.counts.passes += int(event.attributes["passes"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = _parser().parse_args(argv)
    return run(
        lambda logs: _run(arguments, logs),
        markdown,
        lambda figures: [asdict(one) for one in figures],
        arguments.json,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runtime_events", description=__doc__
    )
    parser.add_argument("--subscribers", type=int, default=50, help="at once (50)")
    parser.add_argument("--events", type=int, default=10_000, help="a second (10,000)")
    parser.add_argument("--streams", type=int, default=32, help="that generate (32)")
    parser.add_argument("--seconds", type=float, default=15, help="of each turn (15)")
    parser.add_argument("--rounds", type=int, default=4, help="turns of both kinds (4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    return parser


async def _run(arguments: argparse.Namespace, logs: Path) -> list[Figures]:
    from tests.support.models import model_dir

    async with AsyncExitStack() as stack:
        say("starting the server")
        command = [
            *(sys.executable, "-m", "benchmarks.pumped_server", str(arguments.events)),
            f"--model={model_dir('tiny_llama')}",
            "--enforce-eager",
            "--kv-cache-memory-bytes=256M",
            f"--max-num-seqs={arguments.streams}",
            "--generation-config=vllm",
        ]
        server = await stack.enter_async_context(child("pumped-server", command, logs))
        address = await announced(server, _WAIT_SECONDS)
        traffic = Traffic(address, psutil.Process(server.pid))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        stub = OpenEngineStub(channel)
        streams = [asyncio.ensure_future(traffic.generate(stub)) for _ in range(arguments.streams)]
        figures = []
        for round_ in range(arguments.rounds + 1):
            for subscribers in (0, arguments.subscribers):
                one = await traffic.measure(subscribers, round_, arguments.seconds)
                say(f"round {round_}, {subscribers} subscribers: {one.tokens_per_second:.0f}/s")
                figures.append(one)
        for stream in streams:
            if stream.done():
                raise BenchmarkError(f"a stream has failed: {stream.exception()}")
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return [one for one in figures if one.round]  # the first round warms up


def markdown(figures: Sequence[Figures]) -> str:
    """Medians over the rounds, and throughput as a multiple of that without subscribers."""
    alone = {one.round: one.tokens_per_second for one in figures if not one.subscribers}
    rows = []
    for subscribers in dict.fromkeys(one.subscribers for one in figures):
        chosen = [one for one in figures if one.subscribers == subscribers]
        ratios = [one.tokens_per_second / alone[one.round] for one in chosen]

        def cell(name: str, form: str = ",.0f", chosen: Sequence[Figures] = chosen) -> str:
            return format(median(getattr(one, name) for one in chosen), form)

        rows.append(
            [
                str(subscribers),
                cell("tokens_per_second"),
                f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                cell("events_per_second"),
                cell("deliveries_per_second"),
                cell("frontend_cores", ".2f"),
                cell("rss_mib"),
            ]
        )
    heads = (
        *("subscribers", "tokens/s", "of that without"),
        *("events/s told", "deliveries/s", "frontend cores", "frontend RSS, MiB"),
    )
    return table(heads, rows)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    sys.exit(main())

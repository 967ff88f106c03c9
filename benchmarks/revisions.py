"""What a revision of the schema costs a streamed token: ``python -m benchmarks.revisions``.

Short turns of both revisions take turns on one server, hundreds of times, so that whatever else
the machine does falls on both alike. The figure is the CPU of the process that clients talk to,
by the scheduler's own count of nanoseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from benchmarks.frontends import announced
from benchmarks.processes import child
from benchmarks.program import run, say
from benchmarks.report import table
from openengine_vllm.protocol import split
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.revision import OPENENGINE, REVISIONS, SPLIT
from openengine_vllm.protocol.split.service_pb2_grpc import InferenceStub
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub

_WAIT_SECONDS = 600.0
_TOKENS = 64
_WARM_PAIRS = 20
_NORMAL_QUANTILE = 1.96


@dataclass(frozen=True, slots=True)
class Pair:
    """One turn of each: CPU µs per token of the frontend process."""

    openengine: float
    split: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.revisions", description=__doc__)
    parser.add_argument("--pairs", type=int, default=400, help="turns of each revision (400)")
    parser.add_argument("--streams", type=int, default=32, help="in one turn (32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    arguments = parser.parse_args(argv)
    return run(
        lambda logs: _run(arguments, logs),
        markdown,
        lambda pairs: [asdict(pair) for pair in pairs],
        arguments.json,
    )


async def _run(arguments: argparse.Namespace, logs: Path) -> list[Pair]:
    from tests.support.models import model_dir

    async with AsyncExitStack() as stack:
        say("starting the server")
        command = [
            *(sys.executable, "-m", "openengine_vllm", "--port=0"),
            f"--model={model_dir('tiny_llama')}",
            "--enforce-eager",
            "--kv-cache-memory-bytes=256M",
            f"--max-num-seqs={arguments.streams}",
            "--generation-config=vllm",
            "--server-log-level=warning",
        ]
        server = await stack.enter_async_context(child("openengine-server", command, logs))
        address = await announced(server, _WAIT_SECONDS)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        calls: dict[str, Callable[[Any], Any]] = {
            OPENENGINE.name: OpenEngineStub(channel).Generate,
            SPLIT.name: InferenceStub(channel).Generate,
        }
        pairs = []
        for number in range(arguments.pairs + _WARM_PAIRS):
            order = list(REVISIONS) if number % 2 else list(reversed(REVISIONS))
            cost = {}
            for name in order:
                before = _cpu_ns(server.pid)
                tokens = await _turn(calls[name], name, arguments.streams)
                cost[name] = (_cpu_ns(server.pid) - before) / 1000 / tokens
            pairs.append(Pair(**cost))
            if number % 50 == 49:
                say(f"{number + 1} of {arguments.pairs + _WARM_PAIRS}")
    return pairs[_WARM_PAIRS:]


async def _turn(generate: Callable[[Any], Any], revision: str, streams: int) -> int:
    """So many streams at once; returns the tokens that came."""
    schema: Any = pb if revision == OPENENGINE.name else split

    async def read(number: int) -> int:
        request = schema.GenerateRequest(
            request_id=f"{revision}-{number}",
            token_ids=schema.TokenIds(ids=[20 + number, 21]),
            sampling=schema.SamplingParams(temperature=1.0),
            stopping=schema.StoppingOptions(max_tokens=_TOKENS, ignore_eos=True),
        )
        return sum([len(event.token.tokens) async for event in generate(request)])

    return sum(await asyncio.gather(*map(read, range(streams))))


def _cpu_ns(pid: int) -> int:
    """What all threads of a process have run for."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def markdown(pairs: Sequence[Pair]) -> str:
    """Medians, and the median of the pairs' ratios with its interval of 95% confidence."""
    ratios = sorted(pair.split / pair.openengine for pair in pairs)
    reach = _NORMAL_QUANTILE * math.sqrt(len(ratios)) / 2
    low = ratios[max(0, math.floor(len(ratios) / 2 - reach))]
    high = ratios[min(len(ratios) - 1, math.ceil(len(ratios) / 2 + reach))]
    row = [
        str(len(pairs)),
        f"{median(pair.openengine for pair in pairs):.1f}",
        f"{median(pair.split for pair in pairs):.1f}",
        f"{median(ratios):.3f} ({low:.3f} to {high:.3f})",
    ]
    return table(
        ["pairs", "contract µs per token", "split µs per token", "split / contract"], [row]
    )


if __name__ == "__main__":
    sys.exit(main())

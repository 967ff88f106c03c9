"""What long prompts do to others: ``python -m benchmarks.long_prompt``.

While one short stream runs and Health is asked again and again, prompts of many tokens come one
after another, each cancelled at its first token. All kinds of prompts, and none at all, take
turns on one server. The engine has each prompt in its prefix cache, so that what is measured is
the way into the engine and not minutes of attention on a processor.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import grpc
import psutil
from tokenizers import Tokenizer

from benchmarks.frontends import announced
from benchmarks.processes import BenchmarkError, child
from benchmarks.program import run, say
from benchmarks.report import table
from benchmarks.timing import percentile
from benchmarks.workload import plain_token_ids
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub

NONE, IDS, TEXT = "none", "ids", "text"
KINDS = (NONE, IDS, TEXT)
_CONTEXT = 131_072
_OVERRIDES = {
    "max_position_embeddings": _CONTEXT,
    # Each token attends to few, or the first pass over a prompt would take minutes as well.
    "layer_types": ["sliding_attention", "sliding_attention"],
    "sliding_window": 256,
}
_QUIET_SECONDS = 10.0
"""How long the others are watched without long prompts."""
_PAUSE_SECONDS = 0.002
_GENERATE = "/openengine.v1.OpenEngine/Generate"
_WAIT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What others saw while one kind of prompts came; times in milliseconds."""

    kind: str
    round: int
    health_p50: float
    health_p99: float
    health_max: float
    gap_p50: float
    """Between two messages of the stream that runs beside."""
    gap_p99: float
    gap_max: float
    first_token: float
    """Of the long prompts: from sending to the first message, median; 0 for none."""
    cpu_ms: float
    """The frontend's processor time a prompt, with all that it does beside; 0 for none."""


class Traffic:
    """One server under test, and what is asked of it."""

    def __init__(self, channel: grpc.aio.Channel, server: psutil.Process) -> None:
        self._stub = OpenEngineStub(channel)
        # The messages are made beforehand: to make them here takes as long as to read them there.
        self._raw: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(_GENERATE)
        self._server = server
        self._serial = itertools.count()

    async def measure(self, kind: str, round_: int, prompts: Sequence[bytes]) -> Figures:
        """Send prompts one after another, or none for as long, and watch the others."""
        health: array[float] = array("d")
        gaps: array[float] = array("d")
        first: array[float] = array("d")
        started = asyncio.Event()
        watchers = [
            asyncio.ensure_future(self._ask_health(health)),
            asyncio.ensure_future(self._stream(gaps, started)),
        ]
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                await started.wait()
                before = _cpu_seconds(self._server)
                for prompt in prompts:
                    first.append(await self._first_token(prompt))
                if not prompts:
                    await asyncio.sleep(_QUIET_SECONDS)
                used = _cpu_seconds(self._server) - before
            for watcher in watchers:
                if watcher.done():
                    watcher.result()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
        return Figures(
            kind,
            round_,
            *(percentile(health, 50) * 1e3, percentile(health, 99) * 1e3, max(health) * 1e3),
            *(percentile(gaps, 50) * 1e3, percentile(gaps, 99) * 1e3, max(gaps) * 1e3),
            first_token=median(first) * 1e3 if first else 0.0,
            cpu_ms=used / len(prompts) * 1e3 if prompts else 0.0,
        )

    async def _ask_health(self, latencies: array[float]) -> None:
        while True:
            asked = time.perf_counter()
            await self._stub.Health(pb.HealthRequest())
            latencies.append(time.perf_counter() - asked)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _stream(self, gaps: array[float], started: asyncio.Event) -> None:
        request = pb.GenerateRequest(
            request_id=f"beside-{next(self._serial)}",
            token_ids=pb.TokenIds(ids=[20]),
            sampling=pb.SamplingParams(temperature=1.0),
            stopping=pb.StoppingOptions(max_tokens=_CONTEXT - 1, ignore_eos=True),
        )
        last = None
        async for _ in self._stub.Generate(request):
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
            started.set()
        raise BenchmarkError("the stream beside the prompts has ended")

    async def _first_token(self, prompt: bytes) -> float:
        """Seconds from sending a prompt to the first event of its stream, which ends then."""
        request_id = pb.GenerateRequest(request_id=f"long-{next(self._serial)}")
        data = request_id.SerializeToString() + prompt
        sent = time.perf_counter()
        call = self._raw(data)
        event = await call.read()
        taken = time.perf_counter() - sent
        call.cancel()
        if not isinstance(event, bytes):
            raise BenchmarkError(f"a long prompt was refused: {await call.details()}")
        return taken


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_prompt", description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000, help="of each prompt (100,000)")
    parser.add_argument("--prompts", type=int, default=20, help="of each kind and round (20)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of all kinds (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    return parser


async def _run(arguments: argparse.Namespace, logs: Path) -> list[Figures]:
    from tests.support.models import model_dir

    model = model_dir("tiny_llama")
    async with AsyncExitStack() as stack:
        say("starting the server")
        command = [sys.executable, "-m", "openengine_vllm", "--port=0", *_engine_flags(model)]
        server = await stack.enter_async_context(child("openengine-server", command, logs))
        address = await announced(server, _WAIT_SECONDS)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        traffic = Traffic(channel, psutil.Process(server.pid))
        prompts = _prompts(model, arguments.tokens)
        figures = []
        for round_ in range(arguments.rounds + 1):
            for kind in KINDS:
                count = arguments.prompts if round_ else 1  # the first round fills the cache
                sent = [prompts[kind]] * count if kind in prompts else []
                one = await traffic.measure(kind, round_, sent)
                say(f"round {round_}, {kind}: Health p99 {one.health_p99:.1f} ms")
                figures.append(one)
        with suppress(BenchmarkError):
            server.check()
    return [one for one in figures if one.round]


def _engine_flags(model: Path) -> tuple[str, ...]:
    return (
        f"--model={model}",
        f"--hf-overrides={json.dumps(_OVERRIDES)}",
        "--enforce-eager",
        "--dtype=bfloat16",
        "--kv-cache-memory-bytes=512M",
        "--max-num-seqs=4",
        "--max-num-batched-tokens=2048",
        "--enable-prefix-caching",
        "--generation-config=vllm",
    )


def _prompts(model: Path, tokens: int) -> dict[str, bytes]:
    """A request of each kind, without an id and serialised, whose prompt has so many tokens."""
    tokenizer = Tokenizer.from_str((model / "tokenizer.json").read_text(encoding="utf-8"))
    ids = random.Random(1).choices(plain_token_ids(model), k=tokens)
    request = pb.GenerateRequest(
        sampling=pb.SamplingParams(temperature=1.0),
        stopping=pb.StoppingOptions(max_tokens=16, ignore_eos=True),
    )
    with_ids, with_text = pb.GenerateRequest(), pb.GenerateRequest()
    with_ids.CopyFrom(request)
    with_ids.token_ids.ids.extend(ids)
    with_text.CopyFrom(request)
    with_text.prompt = _text(tokenizer, ids)
    return {IDS: with_ids.SerializeToString(), TEXT: with_text.SerializeToString()}


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of about as many tokens, whatever becomes of the ids' own boundaries."""
    text = tokenizer.decode(ids).replace("\ufffd", "")
    encoding = tokenizer.encode(text * 2)
    start, _ = encoding.offsets[min(len(ids), len(encoding.ids) - 1)]
    return (text * 2)[:start]


def markdown(figures: Sequence[Figures]) -> str:
    """Medians over the rounds, and each as a multiple of what it is without long prompts."""
    alone = {one.round: one for one in figures if one.kind == NONE}
    rows = []
    for kind in dict.fromkeys(one.kind for one in figures):
        chosen = [one for one in figures if one.kind == kind]

        def cell(name: str, chosen: Sequence[Figures] = chosen) -> str:
            value = median(getattr(one, name) for one in chosen)
            ratio = median(getattr(one, name) / getattr(alone[one.round], name) for one in chosen)
            return f"{value:.1f} ({ratio:.1f})"

        names = ("health_p50", "health_p99", "health_max", "gap_p50", "gap_p99", "gap_max")
        first = median(one.first_token for one in chosen)
        cpu = median(one.cpu_ms for one in chosen)
        rows.append([kind, *map(cell, names), f"{first:,.0f}", f"{cpu:,.0f}"])
    heads = (
        "prompts",
        *("Health p50, ms", "p99", "largest"),
        *("between messages p50, ms", "p99", "largest"),
        "first token, ms",
        "frontend CPU a prompt, ms",
    )
    return table(heads, rows)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    sys.exit(main())

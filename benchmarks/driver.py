"""The process that opens the streams and reads them, apart from the one that is measured.

It speaks in lines: a first empty object once its target can be used; then for each pass on
stdin its timings on stdout, or an object with ``error``. It ends with its stdin. For the
in-process frontend this process is the measured one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import uvloop

from benchmarks.targets import HttpTarget, InProcessTarget, OpenEngineTarget, SplitTarget, Target
from benchmarks.timing import Recorder, Timings
from benchmarks.workload import Pass, Shape, plain_token_ids, prompts


async def run_pass(target: Target, run: Pass, requests: list[list[int]]) -> Timings:
    """Send all requests, ``run.concurrency`` at a time.

    Raises:
        ExceptionGroup: of what went wrong; all streams are closed then.
    """
    recorder = Recorder()
    waiting = enumerate(requests)

    async def stream_in_turn() -> None:
        for number, prompt in waiting:
            await target.run(f"{run.seed}-{number}", prompt, recorder)

    async with asyncio.TaskGroup() as streams:
        for _ in range(run.concurrency):
            streams.create_task(stream_in_turn())
    return recorder.timings()


async def _serve(arguments: argparse.Namespace, reply: Callable[[str], None]) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    shape = Shape(arguments.prompt_tokens, arguments.output_tokens)
    token_ids = plain_token_ids(arguments.model)
    async with _target(arguments, shape) as target:
        reply("{}\n")
        while line := await asyncio.to_thread(sys.stdin.readline):
            run = Pass.from_line(line)
            try:
                timings = await run_pass(target, run, prompts(run, shape, token_ids))
            except ExceptionGroup as group:
                reply(json.dumps({"error": repr(group.exceptions[0])}) + "\n")
                raise
            reply(timings.to_line())


def _target(arguments: argparse.Namespace, shape: Shape) -> Target:
    if arguments.http:
        return HttpTarget(shape, arguments.http)
    if arguments.grpc:
        return OpenEngineTarget(shape, arguments.grpc, arguments.channels)
    if arguments.split:
        return SplitTarget(shape, arguments.split, arguments.channels)
    return InProcessTarget(shape, arguments.engine_flags)


def _own_stdout() -> Callable[[str], None]:
    """Keep stdout for replies; whatever else is printed here goes to stderr."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(line: str) -> None:
        own.write(line)
        own.flush()

    return reply


def main() -> None:
    """Run the driver until its stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--output-tokens", type=int, required=True)
    parser.add_argument("--channels", type=int, default=1)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--http", metavar="ADDRESS")
    where.add_argument("--grpc", metavar="ADDRESS")
    where.add_argument("--split", metavar="ADDRESS")
    parser.add_argument("engine_flags", nargs="*")
    arguments = parser.parse_args()
    uvloop.run(_serve(arguments, _own_stdout()))


if __name__ == "__main__":
    main()

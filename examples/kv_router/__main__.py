"""Sends prompts with shared prefixes to several workers, once in turn and once where they are
cached, and shows how many of their tokens the workers did not have to compute."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from examples.kv_router.following import described
from examples.kv_router.routing import Choice, NoWorkerError, Router
from openengine_vllm.api_keys import API_KEY_VARIABLE
from openengine_vllm.client import OpenEngineError
from openengine_vllm.protocol import v1 as pb

ARRIVAL_SECONDS = 1.0
"""How long the program waits for the events of a prompt. They come within milliseconds, unless
the cache is so small that other prompts have taken the blocks already."""

WORDS = ("river", "stone", "lamp", "window", "garden", "copper", "thread", "sailor", "winter")

Prompt = list[int]


@dataclass
class Tally:
    """What one way of routing came to."""

    mode: str
    sent: dict[int, int] = field(default_factory=dict)
    """Prompts of each worker."""
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, worker: int, prompt_tokens: int, cached_tokens: int) -> None:
        """Count one prompt."""
        self.sent[worker] = self.sent.get(worker, 0) + 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens


def make_rounds(
    tokenizer: Tokenizer,
    chance: random.Random,
    *,
    prefixes: int,
    rounds: int,
    prefix_tokens: int,
    suffix_tokens: int,
) -> list[list[Prompt]]:
    """Prompts, in each round one with every prefix, in another order each time."""

    def text(tokens: int) -> Prompt:
        # A word is a token at least.
        words = " ".join(chance.choices(WORDS, k=tokens))
        return list(tokenizer.encode(words, add_special_tokens=False).ids[:tokens])

    shared = [text(prefix_tokens) for _ in range(prefixes)]
    return [
        [prefix + text(suffix_tokens) for prefix in chance.sample(shared, prefixes)]
        for _ in range(rounds)
    ]


async def run(
    router: Router,
    mode: str,
    choose: Callable[[Prompt], Choice],
    rounds: Sequence[Sequence[Prompt]],
    max_tokens: int,
) -> Tally:
    """Send each round's prompts at once, and the next round when the index has heard of them.

    Raises:
        NoWorkerError: no worker is left.
        OpenEngineError: a worker failed.
    """
    tally = Tally(mode)

    async def ask(prompt: Prompt) -> None:
        choice = choose(prompt)
        completion = await router.send(
            choice, prompt, max_tokens=max_tokens, ignore_eos=True, temperature=0.0
        )
        usage = completion.usage or pb.Usage()
        tally.add(choice.worker.number, usage.prompt_tokens, usage.cached_prompt_tokens)
        with suppress(TimeoutError):
            async with asyncio.timeout(ARRIVAL_SECONDS):
                await _arrived(router, choice, prompt)

    for prompts in rounds:
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(ask(prompt))
    return tally


async def _arrived(router: Router, choice: Choice, prompt: Prompt) -> None:
    """Wait until the index has all of a prompt's whole blocks on the worker that had it."""
    places = [(choice.worker.number, rank) for rank in choice.worker.ranks]
    while True:
        overlaps = router.index.overlaps(prompt)
        for place in places:
            size = router.index.block_size(place)
            if size and overlaps.get(place, 0) == len(prompt) // size * size:
                return
        await asyncio.sleep(0.005)


async def compare(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Tally]:
    """Both ways of routing, on prefixes that no worker has seen."""
    tallies = []
    async with Router(args.worker, os.environ.get(API_KEY_VARIABLE) or None) as router:
        for worker in router.workers:
            if not worker.up:
                raise NoWorkerError(f"worker {worker.target}: {worker.problem}")
        turns = itertools.count()

        def in_turn(prompt: Prompt) -> Choice:
            workers = router.up()
            return Choice(workers[next(turns) % len(workers)])

        for mode, choose in (("round-robin", in_turn), ("kv-aware", router.choose)):
            rounds = make_rounds(
                tokenizer,
                random.Random(f"{args.seed} {mode}"),
                prefixes=args.prefixes,
                rounds=args.rounds,
                prefix_tokens=args.prefix_tokens,
                suffix_tokens=args.suffix_tokens,
            )
            tallies.append(await run(router, mode, choose, rounds, args.max_tokens))
    return tallies


def table(tallies: Sequence[Tally], workers: int) -> str:
    """The tallies, a line each."""
    lines = [f"{'mode':12} {'prompts':>12} {'prompt tokens':>14} {'cached':>10} {'share':>6}"]
    for tally in tallies:
        prompts = "+".join(str(tally.sent.get(number, 0)) for number in range(workers))
        share = f"{tally.cached_tokens / tally.prompt_tokens:.0%}"
        lines.append(
            f"{tally.mode:12} {prompts:>12} {tally.prompt_tokens:14} "
            f"{tally.cached_tokens:10} {share:>6}"
        )
    return "\n".join(lines)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.kv_router",
        description=__doc__,
        epilog=f"Workers that want an API key get the one in {API_KEY_VARIABLE}.",
    )
    parser.add_argument(
        "--worker",
        action="append",
        required=True,
        metavar="HOST:PORT",
        help="a server of this package; repeat it for each",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="FILE",
        help="tokenizer.json of the model that the workers serve",
    )
    for flag, default, what in (
        ("--prefixes", 7, "prefixes that prompts share"),
        ("--rounds", 4, "prompts with each prefix"),
        ("--prefix-tokens", 256, "tokens of a prefix"),
        ("--suffix-tokens", 24, "tokens that each prompt has for itself"),
        ("--max-tokens", 4, "tokens to generate"),
    ):
        parser.add_argument(
            flag, type=_count, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    parser.add_argument(
        "--seed",
        default=secrets.token_hex(8),
        help="makes the prompts (default: others each time, which no worker has cached)",
    )
    args = parser.parse_args(arguments)
    if len(args.worker) < 2 or len(set(args.worker)) < len(args.worker):
        parser.error("--worker: give two workers or more, each once")
    return args


def main() -> int:
    """Runs the comparison; 1 when a worker can't be used."""
    args = parse_arguments()
    try:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    except Exception as error:  # tokenizers raises nothing more special
        print(f"error: {args.tokenizer} cannot be read: {error}", file=sys.stderr)
        return 2
    problem = ""
    try:
        print(table(asyncio.run(compare(args, tokenizer)), len(args.worker)))
    except* (NoWorkerError, OpenEngineError) as group:
        problem = described(group)
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())

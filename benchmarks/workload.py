"""The requests of a benchmark: how many, how long, and prompts that share no prefix."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

TEMPERATURE = 1.0
"""Sampling of every request. A random model that is sampled greedily repeats one token, and
detokenizing a token that never completes a character is not what serving looks like."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What every request looks like, in tokens."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One closed-loop run: ``concurrency`` streams are open until ``requests`` have ended."""

    requests: int
    concurrency: int
    seed: int
    """Passes with different seeds have different prompts."""

    def to_line(self) -> str:
        """The pass as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Pass:
        """The pass that such a line holds."""
        return cls(**json.loads(line))


def plain_token_ids(model: Path) -> list[int]:
    """The ids of a model's ordinary tokens; special ones may mean something to it.

    Raises:
        OSError: the folder has no ``tokenizer.json``.
    """
    tokenizer = Tokenizer.from_str((model / "tokenizer.json").read_text(encoding="utf-8"))
    special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()) - special)


def prompts(run: Pass, shape: Shape, token_ids: Sequence[int]) -> list[list[int]]:
    """One prompt a request, the same ones for the same pass."""
    source = random.Random(run.seed)
    return [source.choices(token_ids, k=shape.prompt_tokens) for _ in range(run.requests)]

"""Where requests wait before the engine has them, and how many do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

from openengine_vllm.engine.gate import BatchGate, BatchKind

Leave: TypeAlias = Callable[[], None]
"""To be called once a request has left the engine; any number of times."""


class WaitingRoom:
    """One for all of an engine's requests.

    Args:
        gate: keeps apart what must not meet in a batch; None where everything may.
    """

    def __init__(self, gate: BatchGate | None) -> None:
        self._gate = gate
        self.sequences = 0
        """That wait now."""
        self.tokens = 0
        """Of their prompts."""

    @contextlib.contextmanager
    def waiting(self, sequences: int, prompt_tokens: int) -> Iterator[None]:
        """A request waits within this context."""
        tokens = sequences * prompt_tokens
        self.sequences += sequences
        self.tokens += tokens
        try:
            yield
        finally:
            self.sequences -= sequences
            self.tokens -= tokens

    async def enter(self, kind: BatchKind | None) -> Leave:
        """Wait until a request of this kind may be in the engine."""
        if kind is None or self._gate is None:
            return lambda: None
        await self._gate.enter(kind)
        return _once(self._gate.leave)


def _once(action: Callable[[], None]) -> Leave:
    actions = [action]

    def act() -> None:
        while actions:
            actions.pop()()

    return act

"""Scores as the engine computes them, kept as its arrays until they are encoded.

vLLM's own processor makes Python objects of every number on the event loop and keeps all of
them until the request ends: with a whole vocabulary a token, seconds and gigabytes. The ones
here stand in for it, cost a few microseconds a token, and forget what has been taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex, cast, overload

import numpy as np
import numpy.typing as npt
from vllm.v1.engine.logprobs import LogprobsProcessor

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.async_llm import AsyncLLM

MOST_PENDING_BYTES = 32 * 1024 * 1024
"""Scores of one request that may wait for a client that reads too slowly."""
_ROW_OVERHEAD = 320
"""Bytes of the objects around one row's numbers, which are most of it with few candidates."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRow:
    """The scores at one position.

    Attributes:
        token_ids: the position's own token, then the candidates in the engine's order.
        logprobs: one for each of the token ids.
        rank: the own token's rank in the vocabulary, from 1.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    rank: int

    @property
    def size(self) -> int:
        """Bytes that it takes in memory."""
        return self.token_ids.nbytes + self.logprobs.nbytes + _ROW_OVERHEAD


class PendingScores:
    """Bytes of scores that wait for the client, over all outputs of a request.

    Args:
        on_overflow: runs once, when they pass ``MOST_PENDING_BYTES``.
    """

    __slots__ = ("_bytes", "_on_overflow", "overflowed")

    def __init__(self, on_overflow: Callable[[], None]) -> None:
        self._on_overflow = on_overflow
        self._bytes = 0
        self.overflowed = False
        """Whether they have ever passed the limit."""

    def add(self, row: ScoreRow) -> None:
        """The engine has made a row."""
        self._bytes += row.size
        if self._bytes > MOST_PENDING_BYTES and not self.overflowed:
            self.overflowed = True
            self._on_overflow()

    def remove(self, rows: Iterable[ScoreRow]) -> None:
        """Rows were taken."""
        self._bytes -= sum(row.size for row in rows)


class ScoreRows:
    """Rows that wait to be taken; does what vLLM asks of a container of logprobs."""

    __slots__ = ("_pending", "_rows")

    def __init__(self, pending: PendingScores, rows: Iterable[ScoreRow] = ()) -> None:
        self._pending = pending
        self._rows = list(rows)

    def append(self, row: ScoreRow) -> None:
        """One more position."""
        self._rows.append(row)
        self._pending.add(row)

    def take(self) -> list[ScoreRow]:
        """The rows, which wait no longer."""
        rows, self._rows = self._rows, []
        self._pending.remove(rows)
        return rows

    def extend(self, more: Iterable[ScoreRow]) -> None:
        """Rows of a later output, merged in because nobody has taken the earlier ones."""
        self._rows.extend(more)

    def __len__(self) -> int:
        return len(self._rows)

    def __bool__(self) -> bool:
        # vLLM hands an empty container on as it is: rows to come would land in what waits.
        return True

    def __iter__(self) -> Iterator[ScoreRow]:
        return iter(self._rows)

    @overload
    def __getitem__(self, index: SupportsIndex) -> ScoreRow: ...
    @overload
    def __getitem__(self, index: slice) -> ScoreRows: ...
    def __getitem__(self, index: SupportsIndex | slice) -> ScoreRow | ScoreRows:
        """A slice is vLLM moving the rows to an output: they are not kept here."""
        if not isinstance(index, slice):
            return self._rows[index]
        given = ScoreRows(self._pending, self._rows[index])
        if len(given):
            self._rows.clear()
        return given


class PromptScores:
    """The scores of a prompt's positions after the first, as three arrays.

    Args:
        token_ids: (positions, 1 + candidates), the prompt's own token first.
        logprobs: of the same shape.
        ranks: (positions,), of the own tokens.
    """

    __slots__ = ("_logprobs", "_ranks", "_token_ids")

    def __init__(
        self,
        token_ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        ranks: npt.NDArray[Any],
    ) -> None:
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._ranks = ranks

    def __len__(self) -> int:
        """Positions of the prompt, the first included."""
        return len(self._ranks) + 1

    def row(self, position: int) -> ScoreRow:
        """The scores at a position from 1 on; the first has none."""
        index = position - 1
        return ScoreRow(self._token_ids[index], self._logprobs[index], int(self._ranks[index]))


class ScoreProcessor(LogprobsProcessor):
    """Takes one request's scores from the engine's answers, in place of vLLM's own processor."""

    def update_from_output(self, output: EngineCoreOutput) -> None:
        """Keep the scores of one answer."""
        if (new := output.new_logprobs) is not None:
            rows = cast("ScoreRows", self.logprobs)
            for token_ids, logprobs, rank in zip(*new[:3], strict=True):
                rows.append(self._row(token_ids, logprobs, int(rank)))
        if (prompt := output.new_prompt_logprobs_tensors) is not None:
            token_ids, logprobs, ranks = (tensor.numpy() for tensor in prompt[:3])
            self.prompt_logprobs = cast("Any", PromptScores(token_ids, logprobs, ranks))

    def _row(
        self, token_ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], rank: int
    ) -> ScoreRow:
        # Rows are as wide as the batch's widest request; a view would keep all of the batch.
        width = len(logprobs) if self.num_logprobs in (None, -1) else self.num_logprobs + 1
        return ScoreRow(token_ids[:width].copy(), logprobs[:width].copy(), rank)


def keep_arrays(llm: AsyncLLM, internal_id: str, pending: PendingScores) -> None:
    """Have the scores of a request come as :class:`ScoreRows` and :class:`PromptScores`.

    It has to be called before the event loop runs again after the request was added.

    Args:
        internal_id: vLLM's id of the request.
        pending: counts what waits to be taken.
    """
    state = llm.output_processor.request_states[internal_id]
    old = state.logprobs_processor
    assert old is not None
    state.logprobs_processor = ScoreProcessor(
        tokenizer=None,
        logprobs=None if old.logprobs is None else cast("Any", ScoreRows(pending)),
        prompt_logprobs=None,
        cumulative_logprob=None,
        num_logprobs=old.num_logprobs,
        num_prompt_logprobs=old.num_prompt_logprobs,
    )

"""Tokens and their scores, put into the records that a request asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from openengine_vllm.engine.decode import Detokenizer
from openengine_vllm.engine.outputs import Token
from openengine_vllm.engine.pieces import Pieces
from openengine_vllm.engine.token_information import TOKEN_IDS, Candidates, TokenInformation
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.generation_encoding import token_info

if TYPE_CHECKING:
    from openengine_vllm.engine.scores import PromptScores, ScoreRow


class InformationReader:
    """Makes the TokenInfo records of one request.

    Args:
        wanted: what the request asked for.
        pieces: the texts of candidates.
    """

    def __init__(self, wanted: TokenInformation, pieces: Pieces) -> None:
        self.wanted = wanted
        self._pieces = pieces

    def record(self, token: Token) -> tuple[bytes, str]:
        """An output token's record, serialised, and the text that the token adds."""
        text = "" if token.special else token.text
        if token.score is None:
            return token_info(token.token_id, token.text), text
        candidates = self.wanted.output_candidates
        return self._scored(token.token_id, token.text, token.score, candidates), text

    def prompt_records(
        self, prompt_ids: Sequence[int], scores: PromptScores | None, detokenizer: Detokenizer
    ) -> Iterator[bytes]:
        """The records of the prompt from the start that was asked for.

        Args:
            scores: of the whole prompt; None for a prompt of one token, which has none.
        """
        start = self.wanted.prompt_start
        special = detokenizer.special_tokens
        decoder = detokenizer.decoder(prompt_ids[:start])
        for position in range(start, len(prompt_ids)):
            token_id = prompt_ids[position]
            text = decoder.step(token_id) or special.get(token_id, "")
            row = scores.row(position) if position and scores is not None else None
            if row is None:
                yield token_info(token_id, text)
            else:
                yield self._scored(token_id, text, row, self.wanted.prompt_candidates)

    def _scored(
        self, token_id: int, text: str, row: ScoreRow, candidates: Candidates | None
    ) -> bytes:
        logprobs = row.logprobs.tolist()
        record = pb.TokenInfo(token_id=token_id, token=text)
        if math.isfinite(logprobs[0]):
            record.logprob = logprobs[0]
        if row.rank > 0:
            record.rank = row.rank
        if candidates is None:
            return record.SerializeToString()
        for candidate_id, logprob, rank in _chosen(row, logprobs, candidates):
            if math.isfinite(logprob):
                piece = self._pieces[candidate_id]
                if not piece and candidate_id == token_id:
                    piece = text
                record.candidates.add(
                    token_id=candidate_id, logprob=logprob, token=piece, rank=rank
                )
        return record.SerializeToString()


def _chosen(
    row: ScoreRow, logprobs: list[float], candidates: Candidates
) -> Iterator[tuple[int, float, int | None]]:
    """The candidates' ids, scores and ranks, in the order that was asked for."""
    own, *others = row.token_ids.tolist()
    if candidates.mode != TOKEN_IDS:
        yield from zip(others, logprobs[1:], range(1, len(others) + 1), strict=True)
        return
    scores = dict(zip(others, logprobs[1:], strict=True))
    for token_id in candidates.token_ids:
        # The engine numbers listed ids by their place: only the own token's rank is one.
        yield token_id, scores[token_id], row.rank if token_id == own and row.rank > 0 else None

"""TokenInfo records of scored tokens, in each mode."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from openengine_vllm.engine.decode import FastDetokenizer
from openengine_vllm.engine.information import InformationReader
from openengine_vllm.engine.outputs import Token
from openengine_vllm.engine.pieces import Pieces
from openengine_vllm.engine.scores import PromptScores, ScoreRow
from openengine_vllm.engine.token_information import (
    ALL,
    TOKEN_IDS,
    TOP_N,
    Candidates,
    TokenInformation,
)
from openengine_vllm.protocol import v1 as pb
from tests.unit.byte_tokenizers import byte_ids, byte_level, special_id

PIECES = Pieces(["zero", "one", "two", "three", "", "five"])
OWN = TokenInformation(outputs=True)
NOT_FINITE = [-math.inf, math.inf, math.nan]


def asking(mode: pb.CandidateTokenSelectionMode.ValueType, *ids: int) -> TokenInformation:
    return TokenInformation(outputs=True, output_candidates=Candidates(mode, 3, ids))


def row(ids: Sequence[int], logprobs: Sequence[float], rank: int) -> ScoreRow:
    return ScoreRow(np.array(ids, np.int32), np.array(logprobs, np.float32), rank)


def record(wanted: TokenInformation, token: Token) -> pb.TokenInfo:
    return pb.TokenInfo.FromString(InformationReader(wanted, PIECES).record(token)[0])


def candidates(info: pb.TokenInfo) -> list[tuple[int, float, str, int | None]]:
    return [
        (one.token_id, one.logprob, one.token, one.rank if one.HasField("rank") else None)
        for one in info.candidates
    ]


class TestOutput:
    def test_without_a_score(self) -> None:
        assert record(OWN, Token(1, "one")) == pb.TokenInfo(token_id=1, token="one")

    def test_own_score_alone(self) -> None:
        info = record(OWN, Token(1, "one", False, row([1], [-0.5], 7)))

        assert info == pb.TokenInfo(token_id=1, token="one", logprob=-0.5, rank=7)

    def test_the_text_is_what_the_token_adds(self) -> None:
        """In a record it may differ from the token's own text, as a candidate it does not."""
        reader = InformationReader(asking(TOP_N), PIECES)
        score = row([1, 1], [-0.5, -0.5], 1)
        data, text = reader.record(Token(1, "on", False, score))
        info = pb.TokenInfo.FromString(data)

        assert (info.token, text) == ("on", "on")
        assert candidates(info) == [(1, -0.5, "one", 1)]

    def test_special_tokens_add_no_text(self) -> None:
        reader = InformationReader(OWN, PIECES)

        for score in (None, row([1], [-0.5], 1)):
            data, text = reader.record(Token(1, "<one>", True, score))
            assert (pb.TokenInfo.FromString(data).token, text) == ("<one>", "")

    def test_top_n_is_in_order_with_ranks(self) -> None:
        info = record(
            asking(TOP_N), Token(5, "five", False, row([5, 2, 0, 1], [-3, -0.5, -1, -2], 4))
        )

        assert (info.token_id, info.logprob, info.rank) == (5, -3, 4)
        assert candidates(info) == [(2, -0.5, "two", 1), (0, -1, "zero", 2), (1, -2, "one", 3)]

    def test_the_whole_vocabulary(self) -> None:
        ids, values = [3, 3, 1, 0, 2], [-1, -1, -1.5, -2, -2.5]
        info = record(asking(ALL), Token(3, "three", False, row(ids, values, 1)))

        assert candidates(info) == [
            (3, -1, "three", 1),
            (1, -1.5, "one", 2),
            (0, -2, "zero", 3),
            (2, -2.5, "two", 4),
        ]

    def test_listed_ids_are_in_the_callers_order(self) -> None:
        """Only the own token's rank is known; a repeated id is answered as often as asked."""
        score = row([0, 2, 0, 1], [-1, -2, -1, -3], 2)
        info = record(asking(TOKEN_IDS, 2, 0, 2, 1), Token(0, "zero", False, score))

        assert candidates(info) == [
            (2, -2, "two", None),
            (0, -1, "zero", 2),
            (2, -2, "two", None),
            (1, -3, "one", None),
        ]

    def test_a_part_of_a_character_has_no_text(self) -> None:
        info = record(asking(TOP_N), Token(1, "one", False, row([1, 4], [-1, -2], 2)))

        assert candidates(info) == [(4, -2, "", 1)]

    def test_the_own_token_completes_the_character(self) -> None:
        info = record(asking(TOP_N), Token(4, "€", False, row([4, 4, 1], [-1, -1, -2], 1)))

        assert candidates(info) == [(4, -1, "€", 1), (1, -2, "one", 2)]

    @pytest.mark.parametrize("value", NOT_FINITE)
    def test_what_is_not_finite_is_left_out(self, value: float) -> None:
        score = row([1, 2, 3, 0], [value, -0.5, value, -1], 4)
        ranked = record(asking(TOP_N), Token(1, "one", False, score))
        listed = record(asking(TOKEN_IDS, 0, 3, 2), Token(1, "one", False, score))

        assert not ranked.HasField("logprob")
        assert ranked.rank == 4
        assert candidates(ranked) == [(2, -0.5, "two", 1), (0, -1, "zero", 3)]
        assert candidates(listed) == [(0, -1, "zero", None), (2, -0.5, "two", None)]

    @pytest.mark.parametrize("rank", [0, -1])
    def test_an_unknown_rank_is_absent(self, rank: int) -> None:
        info = record(asking(TOKEN_IDS, 1), Token(1, "one", False, row([1, 1], [-1, -1], rank)))

        assert not info.HasField("rank")
        assert candidates(info) == [(1, -1, "one", None)]

    def test_scores_are_the_engines_floats(self) -> None:
        info = record(OWN, Token(1, "one", False, row([1], [-0.1], 1)))

        assert info.logprob == float(np.float32(-0.1))


def prompt(count: int, positions: int) -> PromptScores:
    """Position 1 has the ids 10 (its own), 0, 1, ...; position 2 has 20, 0, 1, ..."""
    ids = np.array(
        [[10 * position, *range(count)] for position in range(1, positions)], np.int32
    ).reshape(-1, count + 1)
    return PromptScores(ids, -ids.astype(np.float32), np.arange(1, positions) * 2)


class TestPrompt:
    tokenizer = byte_level()
    detokenizer = FastDetokenizer(tokenizer)

    def records(
        self, wanted: TokenInformation, ids: list[int], scores: PromptScores | None
    ) -> list[pb.TokenInfo]:
        reader = InformationReader(wanted, PIECES)
        records = reader.prompt_records(ids, scores, self.detokenizer)
        return [pb.TokenInfo.FromString(data) for data in records]

    def test_the_first_position_has_no_score(self) -> None:
        ids = byte_ids(self.tokenizer, b"abc")
        wanted = TokenInformation(prompt=True, prompt_candidates=Candidates(TOP_N, 2))
        first, *others = self.records(wanted, ids, prompt(2, 3))

        assert first == pb.TokenInfo(token_id=ids[0], token="a")
        assert [(one.token_id, one.token) for one in others] == [(ids[1], "b"), (ids[2], "c")]
        assert [(one.logprob, one.rank) for one in others] == [(-10, 2), (-20, 4)]
        assert candidates(others[1]) == [(0, 0, "zero", 1), (1, -1, "one", 2)]

    def test_scores_without_candidates(self) -> None:
        ids = byte_ids(self.tokenizer, b"ab")
        records = self.records(TokenInformation(prompt=True), ids, prompt(0, 2))

        assert records[1] == pb.TokenInfo(token_id=ids[1], token="b", logprob=-10, rank=2)

    @pytest.mark.parametrize("start", [0, 1, 2, 3])
    def test_from_a_start(self, start: int) -> None:
        ids = byte_ids(self.tokenizer, b"abcd")
        wanted = TokenInformation(prompt=True, prompt_start=start)
        whole = self.records(TokenInformation(prompt=True), ids, prompt(0, 4))

        assert self.records(wanted, ids, prompt(0, 4)) == whole[start:]

    @pytest.mark.parametrize("start", [0, 1, 2, 3])
    def test_a_character_comes_with_the_token_that_completes_it(self, start: int) -> None:
        ids = byte_ids(self.tokenizer, "€x".encode())
        wanted = TokenInformation(prompt=True, prompt_start=start)
        records = self.records(wanted, ids, prompt(0, 4))

        assert [one.token for one in records] == ["", "", "€", "x"][start:]

    def test_special_tokens_carry_their_names(self) -> None:
        ids = [special_id(self.tokenizer, "<bos>"), *byte_ids(self.tokenizer, b"a")]
        records = self.records(TokenInformation(prompt=True), ids, prompt(0, 2))

        assert [one.token for one in records] == ["<bos>", "a"]

    @pytest.mark.parametrize("scores", [None, prompt(0, 1)])
    def test_a_prompt_of_one_token(self, scores: PromptScores | None) -> None:
        ids = byte_ids(self.tokenizer, b"a")

        assert self.records(TokenInformation(prompt=True), ids, scores) == [
            pb.TokenInfo(token_id=ids[0], token="a")
        ]

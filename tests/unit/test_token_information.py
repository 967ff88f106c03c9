"""The response options of a request: what is allowed, what the engine is told, what fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams

from openengine_vllm.engine.facts import ModelFacts
from openengine_vllm.engine.gate import BatchKind
from openengine_vllm.engine.information import InformationReader
from openengine_vllm.engine.outputs import StopRules, Token
from openengine_vllm.engine.pieces import Pieces
from openengine_vllm.engine.scores import PromptScores, ScoreRow
from openengine_vllm.engine.stops import StopAutomaton
from openengine_vllm.engine.token_information import (
    ALL,
    BYTES_A_SCORE,
    MOST_HELD_BYTES,
    MOST_LISTED_IDS,
    NO_INFORMATION,
    TOKEN_IDS,
    TOP_N,
    Candidates,
    TokenInformation,
    check_output_information,
    check_prompt_information,
    output_modes,
    plan_information,
    prompt_modes,
)
from openengine_vllm.limits import MAX_REQUEST_ID_LENGTH, MIB
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError
from openengine_vllm.protocol.generation_encoding import GenerationEncoder

VOCABULARY = 1000
MODEL = ModelFacts(
    served_names=("model",),
    max_model_len=100,
    vocab_size=VOCABULARY,
    has_tokenizer=True,
    generates=True,
    prefix_caching=True,
    priority_scheduling=True,
    data_parallel_ranks=(0,),
    pieces=Pieces([f"{token_id:03}" for token_id in range(VOCABULARY)]),
)
NO_RANKED = replace(MODEL, max_logprobs=0)
EVERYTHING = replace(MODEL, max_logprobs=VOCABULARY)
UINT32 = 2**32 - 1
LONGEST_ID = "\U0010ffff" * MAX_REQUEST_ID_LENGTH

EMPTY = pb.CandidateTokenSelection()
WHOLE = pb.CandidateTokenSelection(all=pb.AllCandidates())


def top(count: int) -> pb.CandidateTokenSelection:
    return pb.CandidateTokenSelection(top_n=count)


def listed(*ids: int) -> pb.CandidateTokenSelection:
    return pb.CandidateTokenSelection(token_ids=pb.TokenIds(ids=ids))


def plan(model: ModelFacts = MODEL, **options: Any) -> TokenInformation:
    return plan_information(pb.GenerateRequest(response=pb.ResponseOptions(**options)), model)


def rejection(model: ModelFacts = MODEL, **options: Any) -> OpenEngineError:
    with pytest.raises(OpenEngineError) as caught:
        plan(model, **options)
    return caught.value


def check(error: OpenEngineError, code: str, field: str, *says: str) -> None:
    assert error.code_name == code
    assert error.field == field
    assert field in error.message
    for part in says:
        assert part in error.message


class TestPlan:
    def test_nothing_asked(self) -> None:
        assert plan_information(pb.GenerateRequest(), MODEL) is NO_INFORMATION
        assert plan() == NO_INFORMATION
        assert plan(return_output_logprobs=False, return_prompt_logprobs=False) == NO_INFORMATION

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"return_output_logprobs": True}, TokenInformation(outputs=True)),
            ({"return_prompt_logprobs": True}, TokenInformation(prompt=True)),
            (
                {"return_prompt_logprobs": True, "prompt_logprob_start": UINT32},
                TokenInformation(prompt=True, prompt_start=UINT32),
            ),
            (
                {"output_candidates": top(3)},
                TokenInformation(outputs=True, output_candidates=Candidates(TOP_N, 3)),
            ),
            (
                {"output_candidates": listed(7, 0, 7), "return_output_logprobs": False},
                TokenInformation(
                    outputs=True, output_candidates=Candidates(TOKEN_IDS, 3, (7, 0, 7))
                ),
            ),
            (
                {"prompt_candidates": top(3), "prompt_logprob_start": 2},
                TokenInformation(
                    prompt=True, prompt_candidates=Candidates(TOP_N, 3), prompt_start=2
                ),
            ),
        ],
    )
    def test_each_option(self, options: dict[str, Any], expected: TokenInformation) -> None:
        """Candidates ask for the token's own score as well."""
        assert plan(**options) == expected

    def test_the_whole_vocabulary(self) -> None:
        wanted = plan(EVERYTHING, output_candidates=WHOLE)

        assert wanted.output_candidates == Candidates(ALL, VOCABULARY)

    @pytest.mark.parametrize("name", ["output_candidates", "prompt_candidates"])
    def test_an_empty_selection(self, name: str) -> None:
        options: dict[str, Any] = {name: EMPTY}
        error = rejection(**options)
        check(error, "INVALID_ARGUMENT", f"response.{name}", "top_n", "token_ids")

    @pytest.mark.parametrize("name", ["output_candidates", "prompt_candidates"])
    @pytest.mark.parametrize("model", [MODEL, EVERYTHING])
    def test_ends_of_top_n(self, name: str, model: ModelFacts) -> None:
        most = model.max_logprobs
        for count in (1, most):
            wanted = plan(model, **{name: top(count)})
            assert getattr(wanted, name) == Candidates(TOP_N, count)
        for count in (0, most + 1, UINT32):
            error = rejection(model, **{name: top(count)})
            check(
                error, "INVALID_ARGUMENT", f"response.{name}.top_n", f"is {count};", f"1 to {most}"
            )

    def test_ends_of_the_listed_ids(self) -> None:
        ids = range(MOST_LISTED_IDS)
        assert plan(output_candidates=listed(*ids)).output_candidates == Candidates(
            TOKEN_IDS, MOST_LISTED_IDS, tuple(ids)
        )
        path = "response.output_candidates.token_ids.ids"
        for wrong in ((), range(MOST_LISTED_IDS + 1), [5] * (MOST_LISTED_IDS + 1)):
            error = rejection(output_candidates=listed(*wrong))
            check(error, "INVALID_ARGUMENT", path, f"has {len(wrong)} ", f"1 to {MOST_LISTED_IDS}")
        assert plan(output_candidates=listed(VOCABULARY - 1)).output_candidates
        for beyond in (VOCABULARY, UINT32):
            error = rejection(output_candidates=listed(0, beyond))
            check(error, "INVALID_ARGUMENT", path, str(beyond), f"0 to {VOCABULARY - 1}")

    @pytest.mark.parametrize(
        ("model", "name", "selection", "kind"),
        [
            (NO_RANKED, "output_candidates", top(1), "top_n"),
            (NO_RANKED, "prompt_candidates", top(1), "top_n"),
            (MODEL, "output_candidates", WHOLE, "all"),
            (replace(MODEL, max_logprobs=VOCABULARY - 1), "output_candidates", WHOLE, "all"),
            (EVERYTHING, "prompt_candidates", WHOLE, "all"),
            (EVERYTHING, "prompt_candidates", listed(1), "token_ids"),
        ],
    )
    def test_what_the_engine_can_not_do(
        self, model: ModelFacts, name: str, selection: pb.CandidateTokenSelection, kind: str
    ) -> None:
        check(
            rejection(model, **{name: selection}), "UNSUPPORTED_FEATURE", f"response.{name}.{kind}"
        )

    @pytest.mark.parametrize("model", [NO_RANKED, MODEL, EVERYTHING])
    def test_what_is_offered_is_what_is_taken(self, model: ModelFacts) -> None:
        selections = {TOP_N: top(1), TOKEN_IDS: listed(1), ALL: WHOLE}
        for name, modes in (
            ("output_candidates", output_modes(model)),
            ("prompt_candidates", prompt_modes(model)),
        ):
            for mode, selection in selections.items():
                if mode in modes:
                    plan(model, **{name: selection})
                else:
                    assert rejection(model, **{name: selection}).code_name == "UNSUPPORTED_FEATURE"

    def test_scores_alone_need_no_ranked_candidates(self) -> None:
        wanted = plan(NO_RANKED, return_output_logprobs=True, return_prompt_logprobs=True)

        assert (wanted.outputs, wanted.prompt) == (True, True)


class TestEngineOptions:
    @pytest.mark.parametrize(
        ("options", "first", "others"),
        [
            ({}, {}, {}),
            ({"return_output_logprobs": True}, {"logprobs": 0}, {"logprobs": 0}),
            ({"output_candidates": top(3)}, {"logprobs": 3}, {"logprobs": 3}),
            ({"output_candidates": WHOLE}, {"logprobs": -1}, {"logprobs": -1}),
            (
                {"output_candidates": listed(9, 2, 9, 5)},
                {"logprobs": 3, "logprob_token_ids": [9, 2, 5]},
                {"logprobs": 3, "logprob_token_ids": [9, 2, 5]},
            ),
            ({"return_prompt_logprobs": True}, {"prompt_logprobs": 0}, {}),
            (
                {"prompt_candidates": top(4), "return_output_logprobs": True},
                {"logprobs": 0, "prompt_logprobs": 4},
                {"logprobs": 0},
            ),
        ],
    )
    def test_each_output(
        self, options: dict[str, Any], first: dict[str, Any], others: dict[str, Any]
    ) -> None:
        wanted = plan(EVERYTHING, **options)

        for index, expected in enumerate((first, others, others)):
            assert wanted.engine_options(index) == expected
            SamplingParams(**wanted.engine_options(index))

    @pytest.mark.parametrize(
        ("options", "kind"),
        [
            ({}, None),
            ({"return_output_logprobs": True, "return_prompt_logprobs": True}, None),
            ({"prompt_candidates": top(1)}, None),
            ({"output_candidates": top(1)}, BatchKind.RANKED),
            ({"output_candidates": WHOLE}, BatchKind.RANKED),
            ({"output_candidates": listed(1)}, BatchKind.LISTED),
        ],
    )
    def test_batch_kind(self, options: dict[str, Any], kind: BatchKind | None) -> None:
        assert plan(EVERYTHING, **options).batch_kind is kind


class Plain:
    """Decodes each token to its text in a list."""

    special_tokens: Mapping[int, str] = MappingProxyType({})

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def decoder(self, prompt_ids: Sequence[int], *, special: bool = False) -> Plain:
        return self

    def step(self, token_id: int) -> str:
        return self._texts[token_id]

    def pieces(self, vocab_size: int) -> Pieces:
        return Pieces(self._texts)


def model_of(texts: Sequence[str]) -> ModelFacts:
    return replace(MODEL, vocab_size=len(texts), max_logprobs=len(texts), pieces=Pieces(texts))


def worst_candidates(candidates: Candidates | None, texts: Sequence[str]) -> list[int]:
    """The ids that take most bytes, of those that may come."""
    if candidates is None:
        return []
    if candidates.mode == TOKEN_IDS:
        return list(dict.fromkeys(candidates.token_ids))
    longest = sorted(range(len(texts)), key=lambda one: len(texts[one].encode()), reverse=True)
    return longest[: candidates.count]


def worst_row(own: int, candidates: Candidates | None, texts: Sequence[str]) -> ScoreRow:
    ids = [own, *worst_candidates(candidates, texts)]
    return ScoreRow(np.array(ids, np.int32), np.full(len(ids), -1.5, np.float32), 2**31 - 1)


def estimate(error: OpenEngineError) -> int:
    """The bytes that a rejection says."""
    return int(error.message.split(" may take ")[1].split()[0])


def prompt_estimate(wanted: TokenInformation, ids: Sequence[int], model: ModelFacts) -> int:
    with pytest.raises(OpenEngineError) as caught:
        check_prompt_information(wanted, ids, model, 0)
    return estimate(caught.value)


def output_estimate(wanted: TokenInformation, model: ModelFacts) -> int:
    with pytest.raises(OpenEngineError) as caught:
        check_output_information(wanted, model, 0, 1, StopRules())
    return estimate(caught.value)


vocabularies = st.lists(
    st.one_of(st.text("a€😀", max_size=6), st.integers(0, 5000).map("x".__mul__)),
    min_size=1,
    max_size=20,
)


class TestPromptSize:
    def test_nothing_asked_is_not_checked(self) -> None:
        check_prompt_information(TokenInformation(prompt_start=99), [1], MODEL, 0)

    def test_ends_of_the_start(self) -> None:
        for start in (0, 2):
            check_prompt_information(
                TokenInformation(prompt=True, prompt_start=start), [1, 2, 3], MODEL, MIB
            )
        for start in (3, 4, UINT32):
            with pytest.raises(OpenEngineError) as caught:
                check_prompt_information(
                    TokenInformation(prompt=True, prompt_start=start), [1, 2, 3], MODEL, MIB
                )
            check(
                caught.value,
                "INVALID_ARGUMENT",
                "response.prompt_logprob_start",
                f"is {start};",
                "0 to 2",
            )

    @pytest.mark.parametrize(
        ("candidates", "field"),
        [(None, "return_prompt_logprobs"), (Candidates(TOP_N, 20), "prompt_candidates")],
    )
    def test_what_just_fits(self, candidates: Candidates | None, field: str) -> None:
        wanted = TokenInformation(prompt=True, prompt_candidates=candidates, prompt_start=2)
        ids = list(range(50))
        size = prompt_estimate(wanted, ids, MODEL)

        check_prompt_information(wanted, ids, MODEL, size)
        with pytest.raises(OpenEngineError) as caught:
            check_prompt_information(wanted, ids, MODEL, size - 1)
        check(
            caught.value,
            "INVALID_ARGUMENT",
            f"response.{field}",
            "48 positions",
            str(size - 1),
            "prompt_logprob_start",
        )

    def test_a_later_start_takes_less(self) -> None:
        ids = [1] * 50
        sizes = [
            prompt_estimate(TokenInformation(prompt=True, prompt_start=start), ids, MODEL)
            for start in range(50)
        ]

        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == 50

    @given(st.data(), vocabularies)
    def test_the_worst_answer_is_within_the_estimate(
        self, data: st.DataObject, texts: list[str]
    ) -> None:
        model = model_of(texts)
        ids = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=20))
        count = data.draw(st.integers(0, len(texts)))
        candidates = Candidates(TOP_N, count) if count else None
        start = data.draw(st.integers(0, len(ids) - 1))
        wanted = TokenInformation(prompt=True, prompt_candidates=candidates, prompt_start=start)
        rows = [worst_row(own, candidates, texts) for own in ids[1:]]
        scores = PromptScores(
            np.array([row.token_ids for row in rows]),
            np.array([row.logprobs for row in rows]),
            np.array([row.rank for row in rows]),
        )
        event = GenerationEncoder(LONGEST_ID, MIB).prompt(
            InformationReader(wanted, model.pieces).prompt_records(ids, scores, Plain(texts))
        )

        assert len(event) <= prompt_estimate(wanted, ids, model)


class TestOutputSize:
    def test_scores_alone_always_fit(self) -> None:
        """They are split into as many events as needed."""
        check_output_information(TokenInformation(outputs=True), MODEL, 0, 128, StopRules())

    @pytest.mark.parametrize(
        "candidates",
        [Candidates(TOP_N, 20), Candidates(TOKEN_IDS, 2, (5, 5)), Candidates(ALL, VOCABULARY)],
    )
    def test_what_just_fits(self, candidates: Candidates) -> None:
        wanted = TokenInformation(outputs=True, output_candidates=candidates)
        size = output_estimate(wanted, MODEL)

        check_output_information(wanted, MODEL, size, 1, StopRules())
        with pytest.raises(OpenEngineError) as caught:
            check_output_information(wanted, MODEL, size - 1, 1, StopRules())
        check(
            caught.value,
            "INVALID_ARGUMENT",
            "response.output_candidates",
            f"of {candidates.count} tokens",
            str(size - 1),
        )

    @given(st.data(), vocabularies)
    def test_the_worst_event_is_within_the_estimate(
        self, data: st.DataObject, texts: list[str]
    ) -> None:
        model = model_of(texts)
        ids = st.integers(0, len(texts) - 1)
        candidates = data.draw(
            st.one_of(
                st.integers(1, len(texts)).map(lambda count: Candidates(TOP_N, count)),
                st.lists(ids, min_size=1, max_size=30).map(
                    lambda listed: Candidates(TOKEN_IDS, len(listed), tuple(listed))
                ),
                st.just(Candidates(ALL, len(texts))),
            )
        )
        wanted = TokenInformation(outputs=True, output_candidates=candidates)
        own = data.draw(ids)
        token = Token(own, texts[own], False, worst_row(own, candidates, texts))
        (event,) = GenerationEncoder(LONGEST_ID, MIB).tokens(
            2**32 - 1, [InformationReader(wanted, model.pieces).record(token)]
        )

        assert len(event) <= output_estimate(wanted, model)

    @pytest.mark.parametrize("sequences", [1, 4])
    def test_what_stop_texts_hold_back(self, sequences: int) -> None:
        """A stop text holds back all of its characters but one, of four tokens each at most."""
        count = MODEL.vocab_size
        wanted = TokenInformation(outputs=True, output_candidates=Candidates(ALL, count))
        longest = MOST_HELD_BYTES // (sequences * 4 * count * BYTES_A_SCORE)

        def check_stop(length: int, **more: Any) -> None:
            rules = StopRules(StopAutomaton(["b", "a" * length]), **more)
            check_output_information(wanted, MODEL, MIB, sequences, rules)

        check_stop(longest)
        with pytest.raises(OpenEngineError) as caught:
            check_stop(longest + 1)
        check(
            caught.value,
            "INVALID_ARGUMENT",
            "response.output_candidates",
            f"of {count} tokens",
            str(MOST_HELD_BYTES),
        )
        check_stop(longest + 1, include_in_output=True)

    def test_a_stop_text_of_one_character_holds_nothing_back(self) -> None:
        wanted = TokenInformation(outputs=True, output_candidates=Candidates(ALL, VOCABULARY))

        check_output_information(wanted, MODEL, MIB, 1 << 20, StopRules(StopAutomaton(["a"])))

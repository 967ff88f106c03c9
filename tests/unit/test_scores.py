"""Scores on their way through vLLM's own output processor and collector, and the containers."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from openengine_vllm.engine import scores
from openengine_vllm.engine.scores import (
    PendingScores,
    PromptScores,
    ScoreProcessor,
    ScoreRow,
    ScoreRows,
    keep_arrays,
)

PROMPT = [5, 6, 7]


def row(token_id: int, candidates: int = 0) -> ScoreRow:
    ids = np.arange(token_id, token_id + 1 + candidates, dtype=np.int32)
    return ScoreRow(ids, -ids.astype(np.float32), token_id + 1)


def own_ids(rows: Any) -> list[int]:
    """The tokens that rows belong to."""
    return [int(one.token_ids[0]) for one in rows]


def no_overflow() -> None:
    raise AssertionError("no overflow was due")


def quiet() -> PendingScores:
    return PendingScores(no_overflow)


def batch(*token_ids: int, width: int) -> LogprobsLists:
    """As the engine makes it: a row a token, with ``width`` candidates behind it."""
    ids = torch.tensor(
        [[token_id, *range(100, 100 + width)] for token_id in token_ids], dtype=torch.int32
    )
    ranks = torch.tensor([token_id + 1 for token_id in token_ids])
    lists: LogprobsLists = LogprobsTensors(ids, -ids.float() / 8, ranks).tolists()
    return lists


def prompt_tensors(width: int) -> LogprobsTensors:
    """Of all positions of the prompt but the first."""
    ids = torch.tensor([[own, *range(100, 100 + width)] for own in PROMPT[1:]], dtype=torch.int32)
    return LogprobsTensors(ids, -ids.float() / 8, torch.tensor([3, 4]))


class TestRows:
    def test_a_slice_takes_the_last_rows_and_leaves_nothing(self) -> None:
        rows = ScoreRows(quiet(), [row(1), row(2), row(3)])
        taken = rows[-2:]

        assert own_ids(taken) == [2, 3]
        assert len(rows) == 0
        rows.append(row(4))
        assert own_ids(rows[-1:]) == [4]
        assert own_ids(taken) == [2, 3]

    def test_an_empty_slice_takes_nothing(self) -> None:
        rows = ScoreRows(quiet(), [row(1), row(2)])

        assert len(rows[:0]) == 0
        assert own_ids(rows) == [1, 2]

    def test_an_index_takes_nothing(self) -> None:
        rows = ScoreRows(quiet(), [row(1), row(2)])

        assert own_ids([rows[0], rows[-1]]) == [1, 2]
        assert len(rows) == 2

    def test_merging_appends(self) -> None:
        rows = ScoreRows(quiet(), [row(1)])
        rows.extend(ScoreRows(quiet(), [row(2), row(3)]))

        assert own_ids(rows) == [1, 2, 3]

    def test_what_waits_is_counted_over_all_outputs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scores, "MOST_PENDING_BYTES", 4 * row(0).size)
        told: list[None] = []
        pending = PendingScores(lambda: told.append(None))
        one, other = ScoreRows(pending), ScoreRows(pending)
        for token_id in range(2):
            one.append(row(token_id))
            other.append(row(token_id))
        assert told == []
        assert own_ids(one.take()) == [0, 1]
        assert len(one) == 0
        other.append(row(2, candidates=1))
        assert told == []
        other.append(row(3))
        other.append(row(4))
        assert told == [None]

    @pytest.mark.parametrize("candidates", [0, 20, 1023])
    def test_size_is_what_a_row_takes(self, candidates: int) -> None:
        tracemalloc.start()
        try:
            rows = [row(1000, candidates) for _ in range(1000)]
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert sum(one.size for one in rows) == pytest.approx(taken, rel=0.2)


class TestPromptScores:
    def test_positions_count_from_the_second_token(self) -> None:
        ids = np.array([[6, 1], [7, 2]], dtype=np.int32)
        prompt = PromptScores(ids, -ids.astype(np.float32), np.array([3, 4]))

        assert len(prompt) == 3
        assert [prompt.row(position).token_ids.tolist() for position in (1, 2)] == [[6, 1], [7, 2]]
        assert [prompt.row(position).logprobs.tolist() for position in (1, 2)] == [
            [-6, -1],
            [-7, -2],
        ]
        assert [prompt.row(position).rank for position in (1, 2)] == [3, 4]

    def test_it_is_true_also_for_one_token(self) -> None:
        """vLLM hands on what is true only."""
        none = np.empty((0, 1))

        assert PromptScores(none.astype(np.int32), none.astype(np.float32), np.empty(0))


def processor(num_logprobs: int | None, num_prompt_logprobs: int | None = None) -> ScoreProcessor:
    return ScoreProcessor(
        tokenizer=None,
        logprobs=None if num_logprobs is None else cast("Any", ScoreRows(quiet())),
        prompt_logprobs=None,
        cumulative_logprob=None,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


class TestProcessor:
    @pytest.mark.parametrize(("asked", "kept"), [(0, 1), (2, 3), (4, 5), (-1, 5)])
    def test_several_positions_each_as_wide_as_asked(self, asked: int, kept: int) -> None:
        one = processor(asked)
        one.update_from_output(EngineCoreOutput("r", [1, 2], new_logprobs=batch(1, 2, width=4)))
        rows = list(cast("ScoreRows", one.logprobs))

        assert own_ids(rows) == [1, 2]
        assert [one.rank for one in rows] == [2, 3]
        for own, found in zip((1, 2), rows, strict=True):
            ids = [own, 100, 101, 102, 103][:kept]
            assert found.token_ids.tolist() == ids
            assert found.logprobs.tolist() == [-token_id / 8 for token_id in ids]

    @pytest.mark.parametrize("asked", [0, 4, -1])
    def test_rows_do_not_keep_the_batch(self, asked: int) -> None:
        one, whole = processor(asked), batch(1, 2, 3, width=4)
        one.update_from_output(EngineCoreOutput("r", [2], new_logprobs=whole.slice_request(1, 1)))
        (found,) = cast("ScoreRows", one.logprobs)

        assert found.token_ids[0] == 2
        assert not np.shares_memory(found.token_ids, whole.logprob_token_ids)
        assert not np.shares_memory(found.logprobs, whole.logprobs)

    def test_prompt(self) -> None:
        one = processor(None, 2)
        one.update_from_output(
            EngineCoreOutput("r", [1], new_prompt_logprobs_tensors=prompt_tensors(2))
        )
        prompt = cast("PromptScores", one.pop_prompt_logprobs())

        assert len(prompt) == len(PROMPT)
        assert prompt.row(2).token_ids.tolist() == [7, 100, 101]
        assert prompt.row(2).rank == 4
        assert not one.pop_prompt_logprobs()

    def test_an_answer_without_scores(self) -> None:
        one = processor(None)
        one.update_from_output(EngineCoreOutput("r", [1]))

        assert one.logprobs is None
        assert one.pop_prompt_logprobs() is None


class Pipeline:
    """vLLM's processor and collector of one request, without an engine."""

    def __init__(
        self,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        on_overflow: Any = no_overflow,
    ) -> None:
        params = SamplingParams(
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.processor = OutputProcessor(None, log_stats=False)
        request = EngineCoreRequest(
            "internal", PROMPT, None, params, None, 0.0, None, None, None, external_req_id="r"
        )
        self.collector = RequestOutputCollector(params.output_kind, request.request_id)
        self.processor.add_request(request, None, queue=self.collector)
        llm: Any = SimpleNamespace(output_processor=self.processor)
        keep_arrays(llm, self.collector.request_id, PendingScores(on_overflow))

    def answer(
        self,
        *token_ids: int,
        width: int | None = None,
        prompt: LogprobsTensors | None = None,
        finish: FinishReason | None = None,
    ) -> None:
        """An answer of the engine."""
        new = None if width is None or not token_ids else batch(*token_ids, width=width)
        self.processor.process_outputs(
            [
                EngineCoreOutput(
                    "internal",
                    list(token_ids),
                    new_logprobs=new,
                    new_prompt_logprobs_tensors=prompt,
                    finish_reason=finish,
                )
            ]
        )

    def take(self) -> RequestOutput:
        return cast("RequestOutput", self.collector.get_nowait())


def check_rows(output: RequestOutput, token_ids: Sequence[int], width: int) -> None:
    """A row for each token, each as wide as asked."""
    completion = output.outputs[0]
    rows = list(cast("ScoreRows", completion.logprobs))
    assert list(completion.token_ids) == list(token_ids)
    assert own_ids(rows) == list(token_ids)
    assert {len(one.logprobs) for one in rows} <= {width + 1}


class TestThroughVllm:
    async def test_one_by_one(self) -> None:
        pipeline = Pipeline(logprobs=2)
        for token_id in (1, 2):
            pipeline.answer(token_id, width=5)
            check_rows(pipeline.take(), [token_id], 2)
        pipeline.answer(3, width=2, finish=FinishReason.LENGTH)
        check_rows(pipeline.take(), [3], 2)
        assert pipeline.collector.get_nowait() is None

    async def test_merged(self) -> None:
        pipeline = Pipeline(logprobs=0)
        pipeline.answer(1, 2, width=1)
        pipeline.answer(3, width=0)
        pipeline.answer(4, 5, width=3, finish=FinishReason.STOP)

        check_rows(pipeline.take(), [1, 2, 3, 4, 5], 0)

    async def test_nothing_stays_behind(self) -> None:
        pipeline = Pipeline(logprobs=1)
        processor = pipeline.processor.request_states["internal"].logprobs_processor
        assert isinstance(processor, ScoreProcessor)
        for token_id in range(5):
            pipeline.answer(token_id, width=1)
            assert len(cast("ScoreRows", processor.logprobs)) == 0

    async def test_a_merge_that_grows_too_large_is_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(scores, "MOST_PENDING_BYTES", 3 * row(0).size)
        told: list[None] = []
        pipeline = Pipeline(0, on_overflow=lambda: told.append(None))
        for token_id in range(3):
            pipeline.answer(token_id, width=0)
        cast("ScoreRows", pipeline.take().outputs[0].logprobs).take()
        for token_id in range(3):
            pipeline.answer(token_id, width=0)
        assert told == []
        pipeline.answer(3, width=0)
        assert told == [None]

    async def test_prompt_comes_once(self) -> None:
        pipeline = Pipeline(prompt_logprobs=1)
        pipeline.answer(1, prompt=prompt_tensors(1))
        first = pipeline.take()
        pipeline.answer(2)
        second = pipeline.take()
        prompt = first.prompt_logprobs

        assert isinstance(prompt, PromptScores)
        assert prompt.row(1).token_ids.tolist() == [6, 100]
        assert first.outputs[0].logprobs is None
        assert not second.prompt_logprobs

    async def test_prompt_survives_a_merge(self) -> None:
        pipeline = Pipeline(logprobs=0, prompt_logprobs=0)
        pipeline.answer(1, width=0, prompt=prompt_tensors(0))
        pipeline.answer(2, width=0)
        output = pipeline.take()

        assert len(cast("PromptScores", output.prompt_logprobs)) == len(PROMPT)
        check_rows(output, [1, 2], 0)

    @pytest.mark.parametrize("taken", [True, False])
    async def test_abort(self, taken: bool) -> None:
        pipeline = Pipeline(logprobs=0)
        pipeline.answer(1, 2, width=0)
        if taken:
            pipeline.take()
        pipeline.processor.abort_requests(["r"], internal=False)
        output = pipeline.take()

        assert output.outputs[0].finish_reason == "abort"
        check_rows(output, [] if taken else [1, 2], 0)

    async def test_abort_before_the_prompt(self) -> None:
        pipeline = Pipeline(prompt_logprobs=0)
        pipeline.processor.abort_requests(["r"], internal=False)

        assert pipeline.take().prompt_logprobs is None

    async def test_an_answer_without_tokens(self) -> None:
        """What waits is not the container that takes in the next answers."""
        pipeline = Pipeline(logprobs=0)
        pipeline.answer(width=0)
        pipeline.answer(1, width=0)
        pipeline.answer(2, width=0)

        check_rows(pipeline.take(), [1, 2], 0)

    @given(
        st.lists(
            st.tuples(st.lists(st.integers(0, 50), max_size=3), st.integers(3, 6), st.booleans()),
            max_size=12,
        )
    )
    async def test_rows_stay_with_their_tokens(
        self, answers: list[tuple[list[int], int, bool]]
    ) -> None:
        pipeline = Pipeline(logprobs=3)
        waiting: list[int] = []
        for token_ids, width, take in answers:
            pipeline.answer(*token_ids, width=width)
            waiting += token_ids
            if take:
                check_rows(pipeline.take(), waiting, 3)
                waiting = []
        pipeline.answer(finish=FinishReason.LENGTH)
        check_rows(pipeline.take(), waiting, 3)

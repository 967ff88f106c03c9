"""Random requests over all options: tokens, text, scores and ends are vLLM's own.

The scores are compared with those of transformers too, which shares no code with vLLM.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from openengine_vllm.protocol import v1 as pb
from tests.engine.cases import Case
from tests.engine.peers import Peer
from tests.engine.random_requests import RANDOM, message
from tests.engine.streams import Generation
from tests.engine.test_equality import expected, same
from tests.support.models import model_dir

pytestmark = pytest.mark.timeout(900)
_TOLERANCE = 1e-4
Row = dict[str, list[Any]]


@pytest.fixture(scope="module")
def transformer() -> PreTrainedModel:
    """The same model in transformers."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        str(model_dir("tiny_llama")), dtype=torch.float32
    )
    model.eval()
    return model


@pytest.mark.parametrize("case", RANDOM, ids=lambda case: case.name)
async def test_random_request_equals_vllm_and_transformers(
    case: Case,
    random_reference: dict[str, Any],
    scored: Peer,
    tiny_tokenizer: Tokenizer,
    transformer: PreTrainedModel,
) -> None:
    answer = random_reference["answers"][case.name]
    request = message(case, tiny_tokenizer, answer["options"])
    generation = await scored.send(request)
    if any(output["finish_reason"] == "error" for output in answer["outputs"]):
        # vLLM masks stop ids under a guide; where the guide needs one of them, nothing is left.
        assert request.HasField("guided")
        assert generation.error is not None
        assert generation.error.code == pb.ERROR_CODE_INTERNAL
        return
    assert generation.error is None
    assert generation.usage is not None
    assert generation.usage.prompt_tokens == len(answer["prompt_ids"])
    made = sum(len(output["token_ids"]) for output in answer["outputs"])
    assert generation.usage.completion_tokens == made
    assert len(generation.outputs) == len(answer["outputs"])
    for output, vllm in zip(generation.outputs, answer["outputs"], strict=True):
        same(output, expected(vllm, answer["options"], tiny_tokenizer))
        rows = vllm["scores"] or [None] * len(vllm["token_ids"])
        for record, row in zip(output.records, rows[: len(output.records)], strict=True):
            check_scores(record, row, request.response.output_candidates)
        if not request.HasField("guided"):  # a guide masks tokens before the scores are taken
            check_transformers(transformer, answer["prompt_ids"], output.records)
    check_prompt(generation, request, answer, transformer)


def close(one: float, other: float) -> bool:
    """Whether two scores are the same but for rounding."""
    return abs(one - other) <= _TOLERANCE


def check_scores(record: pb.TokenInfo, row: Row | None, wanted: pb.CandidateTokenSelection) -> None:
    """A record's scores are those of vLLM's row for its position."""
    assert record.HasField("logprob") == (row is not None)
    if row is None:
        return
    logprob, rank = row[str(record.token_id)]
    assert close(record.logprob, logprob)
    kind = wanted.WhichOneof("selection")

    def possible(token_id: str) -> bool:
        return math.isfinite(row[token_id][0])

    ids = [candidate.token_id for candidate in record.candidates]
    # In vLLM's table a listed token has its place among the listed in place of its rank.
    assert record.rank == rank or (kind == "token_ids" and record.token_id in ids)
    match kind:
        case "top_n":
            assert len(ids) == min(wanted.top_n, sum(map(possible, row)))
        case "all":
            assert len(ids) == sum(map(possible, row))
        case "token_ids":
            assert ids == [i for i in wanted.token_ids.ids if possible(str(i))]
        case _:
            assert not ids
    for candidate in record.candidates:
        logprob, rank = row[str(candidate.token_id)]
        assert close(candidate.logprob, logprob)
        if kind != "token_ids":
            assert candidate.rank == rank


def check_prompt(
    generation: Generation,
    request: pb.GenerateRequest,
    answer: dict[str, Any],
    transformer: PreTrainedModel,
) -> None:
    """The prompt event has each position from the start on, with vLLM's scores."""
    wanted = request.response
    assert (generation.prompt is not None) == wanted.return_prompt_logprobs
    if generation.prompt is None:
        return
    start, ids = wanted.prompt_logprob_start, answer["prompt_ids"]
    records = list(generation.prompt.tokens)
    assert [record.token_id for record in records] == ids[start:]
    for record, row in zip(records, answer["prompt_scores"][start:], strict=True):
        if row is not None:
            check_scores(record, row, wanted.prompt_candidates)
    check_transformers(transformer, ids[:start], records)


def check_transformers(
    transformer: PreTrainedModel, before: list[int], records: list[pb.TokenInfo]
) -> None:
    """All scores of a sequence are those that transformers computes for it."""
    if not any(record.HasField("logprob") for record in records):
        return
    ids = [*before, *(record.token_id for record in records)]
    with torch.inference_mode():
        table = torch.log_softmax(transformer(torch.tensor([ids])).logits[0], -1).numpy()
    for position, record in enumerate(records, len(before)):
        if not record.HasField("logprob"):
            continue
        row = table[position - 1]
        assert close(record.logprob, row[record.token_id])
        better = int((row > row[record.token_id] + _TOLERANCE).sum())
        as_good = int((row > row[record.token_id] - _TOLERANCE).sum())
        assert better < record.rank <= as_good
        assert all(close(one.logprob, row[one.token_id]) for one in record.candidates)


def test_random_requests_cover_the_options(random_reference: dict[str, Any]) -> None:
    reasons = {
        (output["finish_reason"], type(output["stop_reason"]).__name__)
        for answer in random_reference["answers"].values()
        for output in answer["outputs"]
    }
    assert {("stop", "str"), ("stop", "int"), ("length", "NoneType")} <= reasons

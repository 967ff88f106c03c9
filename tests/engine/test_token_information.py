"""What streams tell of each token, clause by clause, on a live engine.

streams.py checks the shape of every record; test_random_requests.py compares the numbers with
vLLM and transformers. Here is what one request alone does not show.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any, cast

import pytest

from openengine_vllm.client import GenerateOptions, OpenEngineError, generate_request
from openengine_vllm.protocol import v1 as pb
from tests.engine.peers import MULTI_EOS_RESPONSE_BYTES, SCORED_SLOTS, Peer
from tests.engine.streams import Output
from tests.engine.test_generate import PROMPT, SAMPLED, cached, fresh_prompt
from tests.engine.test_rejections import Stream, refusal
from tests.support.models import VOCAB_SIZE

TOP_20 = pb.ResponseOptions(output_candidates=pb.CandidateTokenSelection(top_n=20))
LISTED = pb.ResponseOptions(
    output_candidates=pb.CandidateTokenSelection(token_ids=pb.TokenIds(ids=[300, 8, 999]))
)
EVERYTHING = pb.ResponseOptions(
    output_candidates=pb.CandidateTokenSelection(all=pb.AllCandidates())
)
PROMPT_SCORES = pb.ResponseOptions(
    return_prompt_logprobs=True, prompt_candidates=pb.CandidateTokenSelection(top_n=3)
)
Scores = list[tuple[int, float, list[tuple[int, float]]]]


def asking(prompt: Any, response: pb.ResponseOptions, **options: Any) -> pb.GenerateRequest:
    """A request for this information."""
    request = generate_request(prompt, cast("GenerateOptions", {**SAMPLED, **options}))
    request.response.CopyFrom(response)
    return request


def scores(output: Output) -> Scores:
    """What an output tells of its tokens."""
    return [
        (record.token_id, record.logprob, [(c.token_id, c.logprob) for c in record.candidates])
        for record in output.records
    ]


def assert_close(one: Scores, other: Scores) -> None:
    """The same tokens and candidates, and the same scores but for a batch's rounding."""
    for (token_id, logprob, candidates), (other_id, other_logprob, others) in zip(
        one, other, strict=True
    ):
        assert token_id == other_id
        assert logprob == pytest.approx(other_logprob, abs=1e-4)
        assert [c for c, _ in candidates] == [c for c, _ in others]
        assert [s for _, s in candidates] == pytest.approx([s for _, s in others], abs=1e-4)


# Output tokens


async def test_no_scores_unless_asked_for(scored: Peer) -> None:
    generation = await scored.send(asking(PROMPT, pb.ResponseOptions()))
    assert all(not record.HasField("logprob") for record in generation.only.records)


async def test_candidates_without_the_flag_imply_the_tokens_own_score(scored: Peer) -> None:
    generation = await scored.send(asking(PROMPT, LISTED))
    assert all(record.HasField("logprob") for record in generation.only.records)


async def test_top_n_is_n_distinct_ids_also_when_the_token_is_not_among_them(
    scored: Peer,
) -> None:
    generation = await scored.send(asking(PROMPT, TOP_20, temperature=2.0))
    outside = 0
    for record in generation.only.records:
        ids = {candidate.token_id for candidate in record.candidates}
        assert len(ids) == len(record.candidates) == 20
        outside += record.token_id not in ids
    assert outside


async def test_whole_vocabulary_is_a_distribution(scored: Peer) -> None:
    generation = await scored.send(asking(PROMPT, EVERYTHING, max_tokens=3))
    for record in generation.only.records:
        assert len(record.candidates) == VOCAB_SIZE
        assert math.fsum(math.exp(c.logprob) for c in record.candidates) == pytest.approx(1)


async def test_candidates_that_a_grammar_masks_are_left_out(scored: Peer) -> None:
    for response, most in ((TOP_20, 20), (EVERYTHING, VOCAB_SIZE)):
        request = asking(PROMPT, response)
        request.guided.choice.choices.extend(["yes", "no"])
        output = (await scored.send(request)).only
        assert output.text in ("yes", "no")
        for record in output.records:
            assert math.isfinite(record.logprob)
            assert record.token_id in [candidate.token_id for candidate in record.candidates]
            assert len(record.candidates) < most
            total = math.fsum(math.exp(candidate.logprob) for candidate in record.candidates)
            assert total == pytest.approx(1)


async def test_scores_stay_with_their_tokens_through_held_back_stops(scored: Peer) -> None:
    free = await scored.send(asking(PROMPT, TOP_20, num_sequences=3))
    texts = [output.text for output in free.outputs]
    stops = [texts[0][20:29], texts[1][-9:] + "never", texts[2][:5] + "never"]
    held = await scored.send(asking(PROMPT, TOP_20, num_sequences=3, stop=stops))
    assert held.outputs[0].stop_match == ("stop_text", stops[0])
    for output, whole in zip(held.outputs, free.outputs, strict=True):
        assert_close(scores(output), scores(whole)[: len(output.records)])


async def test_included_stop_token_has_its_scores(scored: Peer) -> None:
    free = (await scored.send(asking(PROMPT, TOP_20))).only
    stop = free.token_ids[9]
    end = free.token_ids.index(stop) + 1
    request = asking(PROMPT, TOP_20, stop_token_ids=[stop], include_stop_in_output=True)
    assert_close(scores((await scored.send(request)).only), scores(free)[:end])


async def test_kinds_of_candidates_do_not_spoil_each_other(scored: Peer) -> None:
    """Explicit ids in the batch of ranked candidates make vLLM's V1 runner answer wrongly."""
    kinds = [TOP_20, LISTED, EVERYTHING, pb.ResponseOptions(return_output_logprobs=True)]
    alone = [(await scored.send(asking(PROMPT, kind))).only for kind in kinds]
    together = await asyncio.gather(*(scored.send(asking(PROMPT, k)) for k in 3 * kinds))
    for number, generation in enumerate(together):
        assert_close(scores(generation.only), scores(alone[number % len(kinds)]))


async def abort_once_known(peer: Peer, request_id: str) -> None:
    """Abort a request as soon as the server has it."""
    known = False
    while not known:
        with contextlib.suppress(OpenEngineError):  # not found, yet
            known = (await peer.client.abort(request_id)).status == pb.ABORT_STATUS_ABORTED


async def test_request_that_waits_for_another_kind_can_be_aborted(scored: Peer) -> None:
    endless = asking([9], TOP_20, max_tokens=2000, ignore_eos=True)
    stream = scored.stub.Generate(endless)
    await anext(aiter(stream))
    waiting = asking(PROMPT, LISTED)
    aborted = asyncio.create_task(scored.send(waiting))
    await abort_once_known(scored, waiting.request_id)
    assert (await aborted).only.finish == "CANCELLED"
    await scored.client.abort(endless.request_id)
    assert (await scored.send(waiting)).error is None


# The prompt


async def test_prompt_event_comes_first_and_once(scored: Peer) -> None:
    """The reader of the stream (streams.py) asserts the order."""
    generation = await scored.send(asking(fresh_prompt(), PROMPT_SCORES, num_sequences=4))
    assert generation.prompt is not None
    assert len(generation.outputs) == 4


async def test_first_position_has_no_scores(scored: Peer) -> None:
    for prompt in ([77], [77, 78]):
        generation = await scored.send(asking(prompt, PROMPT_SCORES, max_tokens=1))
        assert generation.prompt is not None
        assert [record.token_id for record in generation.prompt.tokens] == prompt
        assert not generation.prompt.tokens[0].HasField("logprob")


async def test_prompt_scores_begin_where_asked(scored: Peer) -> None:
    prompt = fresh_prompt()
    whole = (await scored.send(asking(prompt, PROMPT_SCORES, max_tokens=1))).prompt
    assert whole is not None
    for start in (0, 1, 130, len(prompt) - 1):
        response = pb.ResponseOptions()
        response.CopyFrom(PROMPT_SCORES)
        response.prompt_logprob_start = start
        part = (await scored.send(asking(prompt, response, max_tokens=1))).prompt
        assert part is not None
        assert_close(
            scores(Output(records=list(part.tokens))),
            scores(Output(records=list(whole.tokens[start:]))),
        )


async def test_prompt_pieces_concatenate_to_the_prompt(scored: Peer) -> None:
    text = "Größe 速い茶色 👍🏽 and the rest"
    generation = await scored.send(asking(text, PROMPT_SCORES, max_tokens=1))
    assert generation.prompt is not None
    assert "".join(record.token for record in generation.prompt.tokens[1:]) == text


async def test_prompt_scores_are_equal_for_a_cached_prompt(scored: Peer) -> None:
    prompt = fresh_prompt()
    cold = await scored.send(asking(prompt, PROMPT_SCORES))
    warm = await scored.send(asking(prompt, pb.ResponseOptions()))
    again = await scored.send(asking(prompt, PROMPT_SCORES))
    assert cached(warm) > 0
    assert cold.prompt is not None
    assert again.prompt is not None
    assert_close(
        scores(Output(records=list(again.prompt.tokens))),
        scores(Output(records=list(cold.prompt.tokens))),
    )
    assert_close(scores(again.only), scores(cold.only))


async def test_twenty_candidates_on_a_long_prompt_arrive(scored: Peer) -> None:
    prompt = [7 + 31 * position % (VOCAB_SIZE - 7) for position in range(1900)]
    response = pb.ResponseOptions(prompt_candidates=pb.CandidateTokenSelection(top_n=20))
    generation = await scored.send(asking(prompt, response))
    assert generation.prompt is not None
    assert [record.token_id for record in generation.prompt.tokens] == prompt
    assert {len(record.candidates) for record in generation.prompt.tokens[1:]} == {20}


async def test_answer_that_cannot_fit_is_refused_beforehand(multi_eos: Peer) -> None:
    response = pb.ResponseOptions(prompt_candidates=pb.CandidateTokenSelection(top_n=20))
    long = [7 + 31 * position % (VOCAB_SIZE - 7) for position in range(450)]
    error = await refusal(multi_eos.stub.Generate(asking(long, response)))
    assert error.field == "response.prompt_candidates"
    assert str(MULTI_EOS_RESPONSE_BYTES) in error.message
    response.prompt_logprob_start = 440
    request = asking(long, response)
    generation = await multi_eos.send(request)
    assert generation.prompt is not None
    assert len(generation.prompt.tokens) == 10


# Priority


async def finish_order(peer: Peer, priorities: list[int]) -> list[int]:
    """The order in which requests of these priorities end that queue behind a full engine."""
    order: list[int] = []

    async def finish(priority: int, call: Stream) -> None:
        async for _ in call:
            pass
        order.append(priority)

    def start(priority: int, most: int) -> Stream:
        options: GenerateOptions = {"max_tokens": most, "ignore_eos": True, "priority": priority}
        return peer.stub.Generate(generate_request([9], options))

    running = [start(2**31 - 1, 300) for _ in range(SCORED_SLOTS)]
    for call in running:
        await anext(aiter(call))
    queued = [start(priority, 20) for priority in priorities]
    await asyncio.gather(*map(finish, priorities, queued))
    for call in running:
        call.cancel()
    return order


async def test_late_request_of_high_priority_overtakes(scored: Peer) -> None:
    low = [0] * (2 * SCORED_SLOTS) + [-(2**31)] * SCORED_SLOTS
    order = await finish_order(scored, [*low, 5])
    assert order.index(5) < SCORED_SLOTS
    assert order[-SCORED_SLOTS:] == [-(2**31)] * SCORED_SLOTS

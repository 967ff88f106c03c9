"""What a Generate stream means, clause by clause, on a live engine.

Every stream that a test reads here is checked against the contract's rules as well
(streams.py); that the tokens are the right ones is the matter of test_equality.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from openengine_vllm.client import GenerateOptions, generate_request
from openengine_vllm.protocol import v1 as pb
from tests.engine.peers import MULTI_EOS_CAPACITY, MULTI_EOS_MAX_TOKENS, Peer
from tests.engine.streams import Generation, Output, gather
from tests.engine.test_rejections import refusal
from tests.support.models import (
    EOS_ID,
    FIRST_BYTE_ID,
    MULTI_EOS_IDS,
    MULTI_EOS_TEMPERATURE,
    SPECIAL_TOKENS,
)

BLOCK = 128
"""Tokens in a block of the prefix cache, on a CPU."""
PROMPT = "The quick brown fox"
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 40}

_fresh = itertools.count(1)


def fresh_prompt(blocks: int = 2) -> list[int]:
    """A prompt that no test has sent, a little longer than this many blocks."""
    number = next(_fresh)
    return [7 + number, *(7 + (number * 37 + 11 * i) % 1000 for i in range(blocks * BLOCK + 40))]


def cached(generation: Generation) -> int:
    """What usage says about the prefix cache; it has to say something."""
    assert generation.usage is not None
    assert generation.usage.HasField("cached_prompt_tokens")
    return generation.usage.cached_prompt_tokens


def text_of_pieces(output: Output) -> str:
    """The tokens' own texts in a row, special tokens left out."""
    return "".join(
        piece
        for token_id, piece in zip(output.token_ids, output.pieces, strict=True)
        if token_id >= len(SPECIAL_TOKENS)
    )


@pytest.fixture(scope="session")
def made_once() -> list[Output]:
    """Long outputs, once a test has asked for them."""
    return []


@pytest.fixture
async def long_outputs(tiny: Peer, made_once: list[Output]) -> list[Output]:
    """Three thousands of tokens that hold whatever a model can say."""
    if not made_once:
        generation = await tiny.generate(
            PROMPT, temperature=2.0, seed=4, num_sequences=3, max_tokens=1000, ignore_eos=True
        )
        made_once.extend(generation.outputs)
    return made_once


# Events and texts


async def test_tokens_come_as_they_are_made(tiny: Peer) -> None:
    generation = await tiny.generate(PROMPT, **SAMPLED)
    assert len(generation.only.token_ids) == 40
    assert len(generation.only.deltas) > 1
    assert len(generation.only.deltas[0].tokens) < 40


async def test_text_of_a_delta_is_that_of_its_tokens(long_outputs: list[Output]) -> None:
    for output in long_outputs:
        for delta in output.deltas:
            pieces = [t.token for t in delta.tokens if t.token_id >= len(SPECIAL_TOKENS)]
            assert delta.text == "".join(pieces)


async def test_pieces_concatenate_to_the_text(long_outputs: list[Output]) -> None:
    for output in long_outputs:
        assert text_of_pieces(output) == output.text


async def test_special_token_carries_its_own_string_and_no_text(
    long_outputs: list[Output],
) -> None:
    seen = set()
    for output in long_outputs:
        for token_id, piece in zip(output.token_ids, output.pieces, strict=True):
            if token_id < len(SPECIAL_TOKENS):
                assert piece == SPECIAL_TOKENS[token_id]
                seen.add(token_id)
        assert not any(special in output.text for special in SPECIAL_TOKENS)
    assert len(seen) > 1


async def test_character_of_several_tokens_comes_whole_with_the_last(
    long_outputs: list[Output],
) -> None:
    whole = [
        (output.token_ids[i], piece)
        for output in long_outputs
        for i, piece in enumerate(output.pieces)
        if i and not output.pieces[i - 1] and len(piece.encode()) > len(piece) == 1
    ]
    assert any(piece != "\ufffd" for _, piece in whole), "no such character was generated"


async def test_text_prompt_is_the_prompt_of_its_tokens(
    tiny: Peer, tiny_tokenizer: Tokenizer
) -> None:
    by_text = await tiny.generate(PROMPT, **SAMPLED)
    by_ids = await tiny.generate(tiny_tokenizer.encode(PROMPT).ids, **SAMPLED)
    assert by_text.only.token_ids == by_ids.only.token_ids
    assert by_text.only.text == by_ids.only.text
    assert by_text.usage == by_ids.usage


async def test_prompt_text_is_never_part_of_the_output(tiny: Peer, tiny_tokenizer: Any) -> None:
    prompt = tiny_tokenizer.encode("A price in €").ids[:-1]
    assert tiny_tokenizer.decode(prompt).endswith("\ufffd")
    generation = await tiny.generate(prompt, **SAMPLED, stop=["price", "in \ufffd"])
    assert generation.only.finish == "LENGTH"
    assert "price" not in generation.only.text


# Several outputs


async def test_each_output_finishes_once_and_the_last_has_usage(tiny: Peer) -> None:
    generation = await tiny.generate(PROMPT, **SAMPLED, num_sequences=5)
    assert [output.finish for output in generation.outputs] == ["LENGTH"] * 5
    assert len({tuple(output.token_ids) for output in generation.outputs}) == 5


async def test_outputs_that_end_at_different_times_do_not_disturb_each_other(tiny: Peer) -> None:
    options: dict[str, Any] = {**SAMPLED, "num_sequences": 4}
    free = await tiny.generate(PROMPT, **options)
    stop = free.outputs[2].token_ids[5]
    stopped = await tiny.generate(PROMPT, **options, stop_token_ids=[stop])
    assert stopped.outputs[2].finish == "STOP"
    for output, whole in zip(stopped.outputs, free.outputs, strict=True):
        ids = whole.token_ids
        end = ids.index(stop) if stop in ids else len(ids)
        assert output.token_ids == ids[:end]


async def test_one_sequence_may_be_asked_for_explicitly(tiny: Peer) -> None:
    one = await tiny.generate(PROMPT, temperature=0.0, max_tokens=3, num_sequences=1)
    none = await tiny.generate(PROMPT, temperature=0.0, max_tokens=3)
    assert one.only.token_ids == none.only.token_ids


# Stops


async def free_run(peer: Peer) -> Output:
    return (await peer.generate(PROMPT, **SAMPLED)).only


async def test_stop_token_is_in_neither_tokens_nor_text(tiny: Peer) -> None:
    free = await free_run(tiny)
    stop = free.token_ids[9]
    end = free.token_ids.index(stop)
    generation = await tiny.generate(PROMPT, **SAMPLED, stop_token_ids=[stop])
    assert generation.only.token_ids == free.token_ids[:end]
    assert generation.only.text == "".join(free.pieces[:end])
    assert generation.only.stop_match == ("stop_token_id", stop)


async def test_included_stop_token_is_in_both(tiny: Peer) -> None:
    free = await free_run(tiny)
    stop = free.token_ids[9]
    end = free.token_ids.index(stop) + 1
    generation = await tiny.generate(
        PROMPT, **SAMPLED, stop_token_ids=[stop], include_stop_in_output=True
    )
    assert generation.only.token_ids == free.token_ids[:end]
    assert generation.only.text == "".join(free.pieces[:end])
    assert generation.only.stop_match == ("stop_token_id", stop)


async def test_usage_counts_the_stop_in_both_settings(tiny: Peer) -> None:
    free = await free_run(tiny)
    stop = free.token_ids[9]
    made = free.token_ids.index(stop) + 1
    for include in (False, True):
        generation = await tiny.generate(
            PROMPT, **SAMPLED, stop_token_ids=[stop], include_stop_in_output=include
        )
        assert generation.usage is not None
        assert generation.usage.completion_tokens == made


def _token_with_text(output: Output, length: int) -> int:
    """The first token but a few whose piece is plain, this long, and new to the text."""
    for position, piece in enumerate(output.pieces):
        before = "".join(output.pieces[:position])
        if position > 2 and len(piece) >= length and piece.isascii() and piece[1:] not in before:
            return position
    raise AssertionError(f"no such token in {output.pieces}")


async def test_token_that_carries_text_before_the_stop_is_emitted_with_that(tiny: Peer) -> None:
    free = await free_run(tiny)
    position = _token_with_text(free, 3)
    stop = free.pieces[position][1:]
    generation = await tiny.generate(PROMPT, **SAMPLED, stop=[stop])
    assert generation.only.stop_match == ("stop_text", stop)
    assert generation.only.token_ids == free.token_ids[: position + 1]
    assert generation.only.pieces[-1] == free.pieces[position][0]
    assert generation.only.text == "".join(free.pieces[:position]) + free.pieces[position][0]


async def test_token_that_begins_inside_the_stop_is_not_emitted(tiny: Peer) -> None:
    free = await free_run(tiny)
    position = _token_with_text(free, 3)
    stop = free.pieces[position - 1] + free.pieces[position][:2]
    generation = await tiny.generate(PROMPT, **SAMPLED, stop=[stop])
    assert generation.only.stop_match == ("stop_text", stop)
    assert generation.only.text == "".join(free.pieces)[: "".join(free.pieces).index(stop)]
    assert len(generation.only.token_ids) < position
    assert generation.usage is not None
    assert generation.usage.completion_tokens == position + 1


async def test_included_stop_text_ends_the_text(tiny: Peer) -> None:
    free = await free_run(tiny)
    position = _token_with_text(free, 3)
    stop = free.pieces[position][:2]
    generation = await tiny.generate(PROMPT, **SAMPLED, stop=[stop], include_stop_in_output=True)
    assert generation.only.text.endswith(stop)
    assert free.text.startswith(generation.only.text)
    assert generation.only.text.count(stop) == 1


async def test_held_back_text_is_flushed_before_the_end(tiny: Peer) -> None:
    free = await free_run(tiny)
    generation = await tiny.generate(PROMPT, **SAMPLED, stop=[free.text[-6:] + "no such text"])
    assert generation.only.text == free.text
    assert generation.only.token_ids == free.token_ids
    assert generation.only.finish == "LENGTH"


async def test_text_of_a_special_token_does_not_match_a_stop(
    tiny: Peer, long_outputs: list[Output]
) -> None:
    stops = [SPECIAL_TOKENS[i] for i in long_outputs[0].token_ids if i < len(SPECIAL_TOKENS)]
    assert stops
    generation = await tiny.generate(
        PROMPT, temperature=2.0, seed=4, max_tokens=1000, ignore_eos=True, stop=stops
    )
    assert generation.only.token_ids == long_outputs[0].token_ids


async def test_min_tokens_holds_off_stops(tiny: Peer) -> None:
    free = await free_run(tiny)
    generation = await tiny.generate(
        PROMPT, **SAMPLED, stop=list(dict.fromkeys(free.text)), min_tokens=20
    )
    assert generation.usage is not None
    assert generation.usage.completion_tokens > 20
    assert generation.only.finish == "STOP"


# EOS and the model's own defaults


@pytest.fixture(scope="session")
def eos_seeds() -> dict[int, int]:
    """Seeds by the EOS id that they end with, filled by the first test that asks."""
    return {}


HOT: dict[str, Any] = {"temperature": 2.0, "max_tokens": 600}


async def seed_for(eos: int, peer: Peer, seeds: dict[int, int]) -> int:
    """A seed with which the multi-EOS model ends at this id."""
    for first in range(0, 400, MULTI_EOS_CAPACITY):
        if eos in seeds:
            break
        batch = range(first, first + MULTI_EOS_CAPACITY)
        runs = await asyncio.gather(*(peer.generate(PROMPT, **HOT, seed=s) for s in batch))
        for seed, run in zip(batch, runs, strict=True):
            # One that ends inside a character would show its bytes with whatever comes next.
            if run.only.stop_match is not None and run.only.pieces[-2:-1] != [""]:
                kind, value = run.only.stop_match
                assert kind == "eos_token_id"
                seeds.setdefault(int(value), seed)
    assert set(seeds) <= set(MULTI_EOS_IDS)
    return seeds[eos]


@pytest.mark.parametrize("eos", MULTI_EOS_IDS)
async def test_every_eos_id_of_the_model_is_an_eos_match(
    eos: int, multi_eos: Peer, eos_seeds: dict[int, int]
) -> None:
    seed = await seed_for(eos, multi_eos, eos_seeds)
    for include in (False, True):
        run = await multi_eos.generate(PROMPT, **HOT, seed=seed, include_stop_in_output=include)
        output = run.only
        assert output.stop_match == ("eos_token_id", eos)
        assert output.token_ids[-1] == eos
        assert output.text == text_of_pieces(output)
        assert output.pieces[-1] == (SPECIAL_TOKENS[eos] if eos < FIRST_BYTE_ID else "")
        assert run.usage is not None
        assert run.usage.completion_tokens == len(output.token_ids)


@pytest.mark.parametrize("eos", MULTI_EOS_IDS)
async def test_callers_stop_id_wins_over_the_models_eos(
    eos: int, multi_eos: Peer, eos_seeds: dict[int, int]
) -> None:
    seed = await seed_for(eos, multi_eos, eos_seeds)
    free = (await multi_eos.generate(PROMPT, **HOT, seed=seed)).only
    options: dict[str, Any] = {**HOT, "seed": seed, "stop_token_ids": [900, eos]}
    for ignore in (False, True):
        run = await multi_eos.generate(PROMPT, **options, ignore_eos=ignore)
        assert run.only.stop_match == ("stop_token_id", eos)
        assert run.only.token_ids == free.token_ids[:-1]
        assert run.only.text == free.text
        assert run.usage is not None
        assert run.usage.completion_tokens == len(free.token_ids)
    run = await multi_eos.generate(PROMPT, **options, include_stop_in_output=True)
    assert run.only.stop_match == ("stop_token_id", eos)
    assert run.only.token_ids == free.token_ids
    assert run.only.text == free.text + ("" if eos < FIRST_BYTE_ID else "!")


async def test_ignored_eos_does_not_end_the_output(
    multi_eos: Peer, eos_seeds: dict[int, int]
) -> None:
    seed = await seed_for(EOS_ID, multi_eos, eos_seeds)
    free = (await multi_eos.generate(PROMPT, **HOT, seed=seed)).only
    longer = {**HOT, "max_tokens": len(free.token_ids) + 5}
    run = (await multi_eos.generate(PROMPT, **longer, seed=seed, ignore_eos=True)).only
    assert run.finish == "LENGTH"
    assert run.token_ids[: len(free.token_ids)] == free.token_ids
    assert run.text.startswith(free.text)


async def test_absent_temperature_is_the_models_own(multi_eos: Peer) -> None:
    absent = await multi_eos.generate(PROMPT, seed=3)
    own = await multi_eos.generate(PROMPT, seed=3, temperature=MULTI_EOS_TEMPERATURE)
    other = await multi_eos.generate(PROMPT, seed=3, temperature=1.5)
    greedy = await multi_eos.generate(PROMPT, seed=3, temperature=0.0)
    assert absent.only.token_ids == own.only.token_ids
    assert absent.only.token_ids != other.only.token_ids
    assert absent.only.token_ids != greedy.only.token_ids


async def test_absent_max_tokens_is_the_models_own(multi_eos: Peer) -> None:
    absent = await multi_eos.generate(PROMPT, ignore_eos=True)
    assert len(absent.only.token_ids) == MULTI_EOS_MAX_TOKENS
    assert absent.only.finish == "LENGTH"
    explicit = await multi_eos.generate(
        PROMPT, ignore_eos=True, max_tokens=MULTI_EOS_MAX_TOKENS + 10
    )
    assert len(explicit.only.token_ids) == MULTI_EOS_MAX_TOKENS + 10


async def test_absent_max_tokens_without_a_default_is_the_rest_of_the_context(tiny: Peer) -> None:
    generation = await tiny.generate([9] * 2000, temperature=0.0, ignore_eos=True)
    assert len(generation.only.token_ids) == 48
    assert generation.only.finish == "LENGTH"


async def test_absent_temperature_without_a_default_is_one(tiny: Peer) -> None:
    absent = await tiny.generate(PROMPT, seed=3, max_tokens=20)
    explicit = await tiny.generate(PROMPT, seed=3, max_tokens=20, temperature=1.0)
    assert absent.only.token_ids == explicit.only.token_ids


# Usage and the prefix cache


async def test_prompt_tokens_count_once_and_completion_over_all_outputs(tiny: Peer) -> None:
    generation = await tiny.generate([9] * 30, **SAMPLED, num_sequences=3, ignore_eos=True)
    assert generation.usage is not None
    assert generation.usage.prompt_tokens == 30
    assert generation.usage.completion_tokens == 3 * 40


async def test_cached_prompt_tokens_are_present_when_none_and_when_some(tiny: Peer) -> None:
    prompt = fresh_prompt()
    first = await tiny.generate(prompt, temperature=0.0, max_tokens=4)
    second = await tiny.generate(prompt, temperature=0.0, max_tokens=4)
    assert cached(first) == 0
    assert cached(second) == 2 * BLOCK
    assert first.only.token_ids == second.only.token_ids


async def test_outputs_of_one_request_are_no_cache_hits_of_each_other(tiny: Peer) -> None:
    prompt = fresh_prompt()
    first = await tiny.generate(prompt, **SAMPLED, num_sequences=6)
    again = await tiny.generate(prompt, **SAMPLED, num_sequences=6)
    assert cached(first) == 0
    assert cached(again) == 2 * BLOCK


async def test_cached_prompt_tokens_are_absent_without_prefix_caching(multi_eos: Peer) -> None:
    generation = await multi_eos.generate([9] * 300, max_tokens=2)
    assert generation.usage is not None
    assert not generation.usage.HasField("cached_prompt_tokens")


async def test_cache_salt_separates_prefixes(tiny: Peer) -> None:
    prompt = fresh_prompt()
    plain = cached(await tiny.generate(prompt, temperature=0.0, max_tokens=1))
    hits = [
        cached(await tiny.generate(prompt, temperature=0.0, max_tokens=1, cache_salt=salt))
        for salt in ("a", "a", "b", "é" * 512, "b", "")
    ]
    assert [hit // BLOCK for hit in (plain, *hits)] == [0, 0, 2, 0, 0, 2, 2]


async def send_bypassing(peer: Peer, prompt: list[int], bypass: bool) -> int:
    request = generate_request(prompt, {"temperature": 0.0, "max_tokens": 1})
    request.kv.bypass_prefix_cache = bypass
    return cached(await peer.send(request))


async def test_bypass_reads_nothing_from_the_prefix_cache(tiny: Peer) -> None:
    prompt = fresh_prompt()
    assert await send_bypassing(tiny, prompt, False) == 0
    assert await send_bypassing(tiny, prompt, True) == 0
    assert await send_bypassing(tiny, prompt, False) == 2 * BLOCK


async def test_bypass_still_fills_the_prefix_cache(tiny: Peer) -> None:
    prompt = fresh_prompt()
    assert await send_bypassing(tiny, prompt, True) == 0
    assert await send_bypassing(tiny, prompt, False) == 2 * BLOCK


async def test_cache_salt_without_prefix_caching_is_refused(multi_eos: Peer) -> None:
    request = generate_request(PROMPT, {"cache_salt": "a"})
    error = await refusal(multi_eos.stub.Generate(request))
    assert error.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE
    assert error.status is grpc.StatusCode.INVALID_ARGUMENT
    assert error.field == "kv.cache_salt"


# Seeds, names, ranks, ids


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1])
async def test_seed_is_deterministic(seed: int, tiny: Peer) -> None:
    runs = [
        await tiny.generate(PROMPT, temperature=1.0, seed=seed, max_tokens=20, num_sequences=2)
        for _ in range(2)
    ]
    first, second = ([output.token_ids for output in run.outputs] for run in runs)
    assert first == second
    assert first[0] != first[1]


async def test_seeds_differ_from_each_other_and_from_none(tiny: Peer) -> None:
    # torch seeds its generator on a CPU with the lower 32 bits alone, so these differ there.
    seeds = (0, 1, 2**32 - 1, 2**62 + 5, 2**63 + 7)
    runs = [await tiny.generate(PROMPT, temperature=1.0, seed=s, max_tokens=20) for s in seeds]
    runs += [await tiny.generate(PROMPT, temperature=1.0, max_tokens=20) for _ in range(2)]
    assert len({tuple(run.only.token_ids) for run in runs}) == len(runs)


@pytest.mark.parametrize("model", ["", "tiny", "tiny-alias"])
async def test_model_may_be_empty_its_name_or_an_alias(model: str, tiny: Peer) -> None:
    generation = await tiny.generate(PROMPT, model=model, temperature=0.0, max_tokens=6)
    unnamed = await tiny.generate(PROMPT, temperature=0.0, max_tokens=6)
    assert generation.only.token_ids == unnamed.only.token_ids


async def test_own_rank_may_be_named(tiny: Peer) -> None:
    request = generate_request(PROMPT, {"temperature": 0.0, "max_tokens": 6})
    plain = await tiny.send(request)
    request.kv.data_parallel_rank = 0
    assert (await tiny.send(request)).only.token_ids == plain.only.token_ids


async def test_id_is_free_again_when_its_request_has_ended(tiny: Peer) -> None:
    request = generate_request(PROMPT, {"request_id": "again and again", "max_tokens": 2})
    for _ in range(5):
        assert (await tiny.send(request)).error is None


async def test_abort_finishes_each_output_as_cancelled(tiny: Peer) -> None:
    options = GenerateOptions(
        request_id="to abort", temperature=1.0, seed=5, num_sequences=3, ignore_eos=True
    )
    request = generate_request(PROMPT, options)
    call = tiny.stub.Generate(request)

    async def aborted_after_the_first_event() -> AsyncIterator[pb.GenerateResponse]:
        async for response in call:
            if response.HasField("token") and not answers:
                answers.append(await tiny.client.abort("to abort"))
            yield response

    answers: list[pb.AbortResponse] = []
    generation = await gather(aborted_after_the_first_event(), request)
    assert [answer.status for answer in answers] == [pb.ABORT_STATUS_ABORTED]
    assert [output.finish for output in generation.outputs] == ["CANCELLED"] * 3
    assert await call.code() is grpc.StatusCode.OK
    late = await tiny.client.abort("to abort")
    assert late.status == pb.ABORT_STATUS_ALREADY_FINISHED

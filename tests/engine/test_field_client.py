"""A client that forgives nothing (tests/support/field_client.py) on a live server, with KV events
flowing and without adapters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import StatusCode, aio

from openengine_vllm.protocol import split
from openengine_vllm.protocol.channel import client_options
from tests.engine.peers import Peer
from tests.engine.test_load import idle
from tests.support.calls import ENDLESS_TOKENS, eventually
from tests.support.field_client import FieldClient, KvReader, is_callers_fault
from tests.support.models import VOCAB_SIZE

TOKENS = 20
SALT = split.KvOptions(cache_salt="pepper")
BYPASS = split.KvOptions(bypass_prefix_cache=True)


def prompt(start: int, length: int = 300) -> list[int]:
    """Token ids that no other start gives."""
    return [7 + (start * 37 + index * (start + 11)) % (VOCAB_SIZE - 7) for index in range(length)]


def asked(request_id: str, prompt_ids: list[int], **fields: Any) -> split.GenerateRequest:
    """A greedy request, unless fields say otherwise."""
    request = split.GenerateRequest(
        request_id=request_id,
        token_ids=split.TokenIds(ids=prompt_ids),
        sampling=split.SamplingParams(temperature=0.0),
        stopping=split.StoppingOptions(max_tokens=TOKENS, ignore_eos=True),
    )
    request.MergeFrom(split.GenerateRequest(**fields))
    return request


def endless(request_id: str, start: int, **fields: Any) -> split.GenerateRequest:
    return asked(
        request_id,
        prompt(start),
        stopping=split.StoppingOptions(max_tokens=ENDLESS_TOKENS),
        **fields,
    )


@pytest.fixture
async def client(operated: Peer) -> AsyncIterator[FieldClient]:
    """Registered."""
    options = client_options()
    async with aio.insecure_channel(operated.server.target, options=options) as channel:
        client = FieldClient(channel)
        await client.register()
        yield client


@pytest.fixture
async def reader(client: FieldClient) -> AsyncIterator[KvReader]:
    """Of the only rank's KV events, without offence until the end of the test."""
    [reader] = await client.follow(snapshot=True)
    yield reader
    await reader.leave()


async def test_requests_of_all_kinds(client: FieldClient, reader: KvReader) -> None:
    plain = await client.generate(asked("plain", prompt(1)))
    assert len(plain.only.token_ids) == TOKENS
    assert plain.only.reason == split.FINISH_REASON_LENGTH
    several = await client.generate(
        asked(
            "several",
            prompt(2),
            sampling=split.SamplingParams(temperature=1.0, seed=3, num_sequences=3),
            response=split.ResponseOptions(
                return_prompt_logprobs=True,
                return_output_logprobs=True,
                output_candidates=split.CandidateTokenSelection(top_n=3),
            ),
        )
    )
    assert sorted(several.outputs) == [0, 1, 2]
    assert all(len(output.logprobs) == TOKENS for output in several.outputs.values())
    # A word that the output holds, and the token that it has in its middle.
    for condition in (
        split.StopCondition(stop_text=plain.only.text[3:6]),
        split.StopCondition(stop_token_id=plain.only.token_ids[TOKENS // 2]),
    ):
        stopped = await client.generate(
            asked("stopped", prompt(1), stopping=split.StoppingOptions(conditions=[condition]))
        )
        assert stopped.only.reason == split.FINISH_REASON_STOP
        assert len(stopped.only.token_ids) < TOKENS
        assert plain.only.text.startswith(stopped.only.text)
    guided = await client.generate(
        asked(
            "guided",
            prompt(3),
            guided=split.GuidedDecoding(choice=split.ChoiceConstraint(choices=["fox", "dog"])),
            stopping=split.StoppingOptions(ignore_eos=False),
        )
    )
    assert guided.only.text in {"fox", "dog"}
    spoken = asked("text", [], prompt="The quick brown fox")
    assert (await client.generate(spoken)).usage.prompt_tokens > 1
    reader.check()


async def test_the_cache_as_its_events_tell_of_it(client: FieldClient, reader: KvReader) -> None:
    """What the reader has of a prompt is what is reused of it; of a salted one it has nothing."""
    block = client.block_size
    length = 3 * block + 5
    for number in range(4):
        ids = prompt(50 + number, length)
        await client.generate(asked(f"kv-{number}", ids))
        await eventually(lambda ids=ids: reader.cached(ids) == 3 * block, "its blocks")  # type: ignore[misc]
        again = await client.generate(asked(f"kv-{number}", ids))
        assert again.usage.cached_prompt_tokens == 3 * block
        bypassed = await client.generate(asked(f"kv-{number}", ids, kv=BYPASS))
        assert bypassed.usage.cached_prompt_tokens == 0
        assert bypassed.only == again.only

        salted_ids = prompt(70 + number, length)
        salted = asked(f"salted-{number}", salted_ids, kv=SALT)
        await client.generate(salted)
        assert (await client.generate(salted)).usage.cached_prompt_tokens == 3 * block
        unsalted = asked(f"unsalted-{number}", salted_ids)
        # Batches come in turn: what follows is told after all of the salted one was.
        before = await client.generate(unsalted)
        assert before.usage.cached_prompt_tokens == 0
        await eventually(
            lambda ids=salted_ids: reader.cached(ids) == 3 * block,  # type: ignore[misc]
            "its blocks without the salt",
        )
        told = [tokens for _, tokens in reader.blocks.values()]
        assert [told.count(tuple(salted_ids[at : at + block])) for at in (0, block)] == [1, 1]
        reader.check()
    assert reader.stored >= 8 * 3


async def test_streams_that_are_dropped(
    client: FieldClient, reader: KvReader, operated: Peer
) -> None:
    for number in range(6):
        kv = SALT if number % 2 else split.KvOptions()
        await client.drop(endless(f"dropped-{number}", 100 + number, kv=kv), events=number)
    several = split.SamplingParams(temperature=1.0, num_sequences=4)
    await asyncio.gather(
        *(
            client.drop(endless(f"together-{number}", 120 + number, sampling=several), events=2)
            for number in range(3)
        )
    )
    for request_id in ("dropped-0", "together-2", "never-seen"):
        await client.abort(request_id)
    await eventually(lambda: idle(operated), "idle")
    await client.check_load()
    await client.check_health()
    await client.generate(asked("dropped-0", prompt(1)))
    reader.check()


async def test_refusals_are_told_apart(client: FieldClient) -> None:
    for request, status in (
        (asked("", prompt(1)), StatusCode.INVALID_ARGUMENT),
        (asked("refused", [VOCAB_SIZE]), StatusCode.INVALID_ARGUMENT),
        (asked("refused", prompt(1), model="nobody's"), StatusCode.NOT_FOUND),
        (asked("refused", prompt(1), lora_name="nobody's"), StatusCode.INVALID_ARGUMENT),
        (
            asked("refused", prompt(1), kv=split.KvOptions.FromString(b"\x22\x01s")),
            StatusCode.INVALID_ARGUMENT,
        ),
    ):
        error = await client.refused(request)
        assert error.code() is status
        assert is_callers_fault(error)
    await client.check_health()


async def test_load_while_requests_run(client: FieldClient, operated: Peer) -> None:
    dropped = asyncio.ensure_future(client.drop(endless("loaded", 200), events=200))

    async def is_busy() -> bool:
        return (await client.check_load()).running_requests == 1

    await eventually(is_busy, "the load tells of it")
    await dropped
    await eventually(lambda: idle(operated), "idle")

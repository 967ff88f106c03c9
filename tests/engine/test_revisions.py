"""One table of scenarios through clients of both revisions on one server, with equal answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from openengine_vllm.client import Client, GenerateOptions, OpenEngineError, generate_request
from openengine_vllm.client.requests import Prompt
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.revision import REVISIONS
from tests.engine.peers import Peer
from tests.engine.streams import gather
from tests.engine.test_load import idle
from tests.support.calls import ENDLESS_TOKENS, PATIENCE_SECONDS, eventually

PROMPT = list(range(20, 32))
TOKENS = 24
GREEDY: GenerateOptions = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
SEEDED: GenerateOptions = {**GREEDY, "temperature": 1.0, "seed": 11}


@pytest.fixture
async def clients(operated: Peer) -> AsyncIterator[tuple[Client, Client]]:
    """Of the contract and of the split revision."""
    target = operated.server.target
    async with (
        Client(target, revision="openengine", timeout=PATIENCE_SECONDS) as contract,
        Client(target, revision="split", timeout=PATIENCE_SECONDS) as split,
    ):
        yield contract, split


def scored(options: pb.ResponseOptions) -> pb.GenerateRequest:
    """A greedy request with these scores."""
    request = generate_request(PROMPT, GREEDY)
    request.response.CopyFrom(options)
    return request


TEXTS: Prompt = "The quick brown fox"
GENERATIONS: dict[str, pb.GenerateRequest] = {
    "greedy": generate_request(PROMPT, GREEDY),
    "seeded": generate_request(PROMPT, SEEDED),
    "text": generate_request(TEXTS, GREEDY),
    "salt": generate_request(PROMPT, {**GREEDY, "cache_salt": "pepper"}),
    "n": generate_request(PROMPT, {**SEEDED, "num_sequences": 3}),
    "penalties": generate_request(
        PROMPT, {**SEEDED, "presence_penalty": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
    ),
    "logprobs": scored(
        pb.ResponseOptions(
            return_prompt_logprobs=True,
            prompt_candidates=pb.CandidateTokenSelection(top_n=2),
            return_output_logprobs=True,
            output_candidates=pb.CandidateTokenSelection(top_n=4),
        )
    ),
    "listed candidates": scored(
        pb.ResponseOptions(
            output_candidates=pb.CandidateTokenSelection(token_ids=pb.TokenIds(ids=[300, 8]))
        )
    ),
    "stop token": generate_request(
        PROMPT, {**SEEDED, "max_tokens": 400, "stop_token_ids": range(7, 263)}
    ),
    "stop text": generate_request(
        PROMPT, {**SEEDED, "max_tokens": 400, "stop": "aeiou", "include_stop_in_output": True}
    ),
    "choice": generate_request(
        PROMPT, {**SEEDED, "ignore_eos": False, "choices": ["fox", "a dog"]}
    ),
    "regex": generate_request(PROMPT, {**GREEDY, "ignore_eos": False, "regex": "(fox|dog)+"}),
    "json": generate_request(
        PROMPT,
        {
            **SEEDED,
            "ignore_eos": False,
            "max_tokens": 60,
            "json_schema": '{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}',
        },
    ),
}


@pytest.mark.parametrize("name", GENERATIONS)
async def test_generations_are_equal(clients: tuple[Client, Client], name: str) -> None:
    request = GENERATIONS[name]
    one, other = [await gather(client.generate(request), request) for client in clients]
    assert len(one.outputs) == (request.sampling.num_sequences or 1)
    for output, twin in zip(one.outputs, other.outputs, strict=True):
        assert output.token_ids == twin.token_ids
        assert output.text == twin.text
        assert output.records == twin.records
        assert (output.finish, output.stop_match) == (twin.finish, twin.stop_match)
        assert (output.finish == "STOP") == (name.startswith("stop") or name in {"choice", "json"})
    assert one.prompt == other.prompt
    assert one.usage == other.usage


async def test_discovery(clients: tuple[Client, Client]) -> None:
    one, other = [await client.require_compatible() for client in clients]
    releases = [info.schema_release for info in (one, other)]
    assert releases == [revision.schema_release for revision in REVISIONS.values()]
    other.schema_release = one.schema_release
    assert one == other
    model, twin = [await client.model_info(one.supported_models[0]) for client in clients]
    assert model == twin
    assert model.kv_block_size
    for client in clients:
        with pytest.raises(OpenEngineError) as caught:
            await client.model_info("other")
        assert caught.value.code == pb.ERROR_CODE_MODEL_NOT_FOUND


async def test_health_and_load(clients: tuple[Client, Client], operated: Peer) -> None:
    await eventually(lambda: idle(operated), "idle")
    health, twin = [await client.health(include_inference_probe=True) for client in clients]
    assert health.state == pb.HEALTH_STATE_READY
    assert health == twin
    load, load_twin = [await client.load(include_per_rank=True) for client in clients]
    assert 0 < load.timestamp_unix_nanos < load_twin.timestamp_unix_nanos
    load_twin.timestamp_unix_nanos = load.timestamp_unix_nanos
    assert load == load_twin
    assert len(load.ranks) == 1


async def test_a_cancelled_request(clients: tuple[Client, Client], operated: Peer) -> None:
    for client in clients:
        async with aclosing(
            client.generate(PROMPT, max_tokens=ENDLESS_TOKENS, ignore_eos=True)
        ) as responses:
            await anext(responses)
            assert not await idle(operated)
        await eventually(lambda: idle(operated), "idle")


async def test_either_aborts_what_the_other_began(clients: tuple[Client, Client]) -> None:
    request = generate_request(PROMPT, {"max_tokens": ENDLESS_TOKENS, "ignore_eos": True})
    for client, other in (clients, clients[::-1]):
        for aborting in (client, other):
            events: list[Any] = []
            async with aclosing(client.generate(request)) as responses:
                events.append(await anext(responses))
                answer = await aborting.abort(request.request_id)
                assert answer.status == pb.ABORT_STATUS_ABORTED
                events += [response async for response in responses]
            assert events[-1].finished.reason == pb.FINISH_REASON_CANCELLED
            assert [event.HasField("usage") for event in events].index(True) == len(events) - 1
            again = await aborting.abort(request.request_id)
            assert again.status == pb.ABORT_STATUS_ALREADY_FINISHED
            with pytest.raises(OpenEngineError) as caught:
                await aborting.abort("never seen")
            assert caught.value.code == pb.ERROR_CODE_REQUEST_NOT_FOUND


async def test_kv_events_are_of_the_same_blocks(
    clients: tuple[Client, Client], operated: Peer
) -> None:
    """One by one: the hashes of either are the same numbers, and the tokens the prompt's."""
    [model] = (await clients[0].engine_info()).supported_models
    block = (await clients[0].model_info(model)).kv_block_size
    ids = [900 - index for index in range(2 * block + 1)]
    await operated.generate(ids[::-1], max_tokens=1)  # so that there is a batch to begin with
    streams = [client.subscribe_kv_events(include_snapshot=True) for client in clients]
    async with aclosing(streams[0]) as full, aclosing(streams[1]) as plain:
        parts = [await anext(full), await anext(plain)]  # the snapshots
        await operated.generate(ids, max_tokens=1)
        tokens: list[int] = []
        while len(tokens) < 2 * block:
            parts = [await anext(full), await anext(plain)]
            one, other = [part.batch for part in parts]
            assert one.sequence_number == other.sequence_number
            assert one.timestamp_unix_nanos == other.timestamp_unix_nanos
            for event, twin in zip(one.events, other.events, strict=True):
                told, told_twin = event.block_stored, twin.block_stored
                tokens += told.token_ids
                assert told.token_ids == told_twin.token_ids
                assert [
                    int.from_bytes(each.value[-8:], "big", signed=True)
                    for each in told.block_hashes
                ] == [int(each.value) for each in told_twin.block_hashes]
    assert tokens == ids[: 2 * block]

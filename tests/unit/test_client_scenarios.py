"""One table of scenarios, through the client in each revision, with the same to show for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import pytest

from openengine_vllm.client import Client, OpenEngineError
from openengine_vllm.engine.stats import Demand
from openengine_vllm.lifecycle import Serving
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.revision import REVISIONS
from tests.support.calls import PATIENCE_SECONDS
from tests.support.kv_messages import stored, tokens_of
from tests.support.kv_publisher import publishers
from tests.unit.live_server import live_server
from tests.unit.scripted_engine import Service, request, scheduler_stats, serve

ENGINE = pb.EngineInfo(
    engine_name="vllm",
    engine_version="1",
    role=pb.ENGINE_ROLE_AGGREGATED,
    instance_id="instance",
    supported_models=["model", "alias"],
    parallelism=pb.ParallelismInfo(tensor_parallel_size=2, data_parallel_start_rank=0),
    kv_connector=pb.KvConnectorInfo(enabled=False),
    schema_revision=1,
    minimum_client_revision=1,
)
MODEL = pb.ModelInfo(
    model_id="org/model",
    served_model_name="model",
    served_model_aliases=["alias"],
    max_context_length=1000,
    kv_block_size=16,
    total_kv_blocks=0,
    max_running_requests=4,
    max_batched_tokens=64,
    supports_token_ids_input=True,
    supports_lora=False,
    generation=pb.GenerationCapabilities(supports_priority=True),
)
Scenario = Callable[[Service, Client], Awaitable[Any]]


async def discovery(service: Service, client: Client) -> Any:
    info = await client.require_compatible()
    assert info.schema_release == REVISIONS[str(client.revision)].schema_release
    info.ClearField("schema_release")
    assert info == ENGINE
    model = await client.model_info("alias")
    assert model == MODEL
    return info, model


async def unknown_model(service: Service, client: Client) -> Any:
    with pytest.raises(OpenEngineError) as caught:
        await client.model_info("other")
    return caught.value.code, caught.value.message, caught.value.status


async def several_outputs(service: Service, client: Client) -> Any:
    asked = request(
        model="alias",
        priority=-2,
        kv=pb.KvOptions(data_parallel_rank=0, bypass_prefix_cache=True, cache_salt="s"),
        sampling=pb.SamplingParams(temperature=0.5, seed=1, num_sequences=2),
        stopping=pb.StoppingOptions(max_tokens=9, min_tokens=1),
    )
    completion = asyncio.create_task(client.complete(asked))
    one, two = await service.engine.accepted("r")
    one.put("ab.", "stop", cached=1)
    two.put("xy", "length", cached=1)
    result = await completion
    assert [output.text for output in result.outputs] == ["ab", "xy"]
    assert [output.reason_name for output in result.outputs] == ["stop", "length"]
    plan = service.engine.plan
    assert (plan.priority, plan.data_parallel_rank) == (-2, 0)
    assert (plan.cache_salt, plan.bypass_prefix_cache) == ("s", True)
    return (
        result,
        plan.prompt_ids,
        plan.sampling,
        plan.seed,
        plan.max_tokens,
        plan.min_tokens,
    )


async def stop_text(service: Service, client: Client) -> Any:
    conditions = [pb.StopCondition(stop_text="c"), pb.StopCondition(stop_token_id=ord("z"))]
    asked = request(stopping=pb.StoppingOptions(conditions=conditions))
    completion = asyncio.create_task(client.complete(asked))
    [output] = await service.engine.accepted("r")
    output.put("abcd")
    result = await completion
    assert result.text == "ab"
    assert result.outputs[0].stop_match == pb.StopMatch(stop_text="c")
    return result


async def refused(service: Service, client: Client) -> Any:
    with pytest.raises(OpenEngineError) as caught:
        await client.complete(request(sampling=pb.SamplingParams(top_p=5)))
    assert caught.value.code == pb.ERROR_CODE_INVALID_ARGUMENT
    return caught.value.code, caught.value.message, caught.value.status, caught.value.retryable


async def aborted(service: Service, client: Client) -> Any:
    completion = asyncio.create_task(client.complete(request()))
    [output] = await service.engine.accepted("r")
    output.put("ab")
    await output.taken.wait()
    answers = [await client.abort("r")]
    result = await completion
    assert [output.reason_name for output in result.outputs] == ["cancelled"]
    assert service.engine.aborted == {"r/0"}
    answers.append(await client.abort("r"))
    with pytest.raises(OpenEngineError) as caught:
        await client.abort("never")
    return result, answers, caught.value.code, caught.value.message


async def load(service: Service, client: Client) -> Any:
    stats = service.engine.stats
    stats.configure((0,), 101, prefix_caching=True)
    stats.record(0, scheduler_stats(num_running_reqs=2, kv_cache_usage=0.25, prefill=1))
    service.engine.demand = Demand(2, 1, 70, 30)
    told = [await client.load(), await client.load(include_per_rank=True)]
    assert told[1].ranks
    assert told[0].attributes
    for answer in told:
        assert answer.timestamp_unix_nanos
        answer.ClearField("timestamp_unix_nanos")
    return told


async def health(service: Service, client: Client) -> Any:
    told = await client.health(include_inference_probe=True)
    assert told.state == pb.HEALTH_STATE_READY
    assert service.engine.probes == 1
    with pytest.raises(OpenEngineError) as caught:
        await client.health(role=pb.ENGINE_ROLE_DECODE)
    return told, caught.value.code, caught.value.status


async def adapters(service: Service, client: Client) -> Any:
    failures = []
    for call in (
        lambda: client.load_lora(1, "a", "/a"),
        lambda: client.unload_lora("a"),
        client.list_loras,
    ):
        with pytest.raises(OpenEngineError) as caught:
            await call()
        failures.append((caught.value.code, caught.value.status, caught.value.message))
    return failures


SCENARIOS: dict[str, Scenario] = {
    function.__name__: function
    for function in (
        discovery,
        unknown_model,
        several_outputs,
        stop_text,
        refused,
        aborted,
        load,
        health,
        adapters,
    )
}


async def played(scenario: Scenario, revision: str) -> Any:
    """What a client of this revision gets from a server that has both."""
    async with serve(ready=False) as service:
        engine = pb.EngineInfo()
        engine.CopyFrom(ENGINE)
        # Each revision has one of its own, and Control's does not come from here.
        engine.schema_release = REVISIONS["openengine"].schema_release
        serving = Serving(cast("Any", service.engine), engine, MODEL, has_chat_template=False)
        service.lifecycle.ready(serving)
        async with asyncio.timeout(PATIENCE_SECONDS):
            async with Client(service.target, revision=revision) as client:
                return await scenario(service, client)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_both_revisions_have_the_same_to_show(name: str) -> None:
    one, other = [await played(SCENARIOS[name], revision) for revision in REVISIONS]
    assert one == other


async def test_kv_events_of_both() -> None:
    async with publishers() as [publisher]:
        publisher.publish(stored([7, -8]))
        async with live_server(kv_publishers=[publisher.described()]) as live:
            sources, blocks = {}, {}
            for revision in REVISIONS:
                async with (
                    Client(live.address, revision=revision) as client,
                    asyncio.timeout(PATIENCE_SECONDS),
                ):
                    sources[revision] = (await client.kv_event_sources([0])).sources
                    blocks[revision] = await first_blocks(client, 2)
    full, plain = sources["openengine"], sources["split"]
    assert list(plain) == [source for source in full if source.transport == "grpc"]
    # Each in the form in which the server sends them.
    assert {block.encoding for block, _ in blocks["openengine"]} == {"int64"}
    assert {block.encoding for block, _ in blocks["split"]} == {"decimal_int64"}
    expected = [(number, tokens_of(number)) for number in (7, -8)]
    full_blocks, plain_blocks = blocks["openengine"], blocks["split"]
    assert [(signed(block.value), ids) for block, ids in full_blocks] == expected
    assert [(int(block.value), ids) for block, ids in plain_blocks] == expected


def signed(value: bytes) -> int:
    return int.from_bytes(value, "big", signed=True)


async def first_blocks(client: Client, count: int) -> list[tuple[pb.KvBlockHash, list[int]]]:
    """Blocks and their tokens, whether a snapshot or a batch tells them, alone or together."""
    blocks: list[tuple[pb.KvBlockHash, list[int]]] = []
    async with aclosing(client.subscribe_kv_events(include_snapshot=True)) as responses:
        async for response in responses:
            for event in response.batch.events:
                told, size = event.block_stored, event.block_stored.block_size
                for index, block in enumerate(told.block_hashes):
                    blocks.append((block, list(told.token_ids[index * size : (index + 1) * size])))
            if len(blocks) >= count:
                break
    return blocks

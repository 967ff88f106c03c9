"""GetLoad and runtime events against work that the test knows of."""

from __future__ import annotations

import math

from openengine_vllm.client import generate_request
from openengine_vllm.protocol import v1 as pb
from tests.engine.peers import OPERATED_SLOTS, Peer
from tests.support.calls import ENDLESS_TOKENS, RunningCall, eventually

PROMPT_TOKENS = 20
WAITING = 3


def request(tokens: int, first: int = 10) -> pb.GenerateRequest:
    prompt = list(range(first, first + PROMPT_TOKENS))
    return generate_request(prompt, {"max_tokens": tokens, "ignore_eos": True})


async def idle(peer: Peer) -> bool:
    load = await peer.client.load()
    return load.running_requests == load.queued_requests == 0


async def test_an_idle_engine(operated: Peer) -> None:
    await eventually(lambda: idle(operated), "idle")
    load = await operated.client.load(include_per_rank=True)
    info = await operated.client.engine_info()
    model = await operated.client.model_info(info.supported_models[0])
    assert load.instance_id == info.instance_id
    present = {field.name: value for field, value in load.ListFields()}
    scalars = {field.name for field in pb.LoadInfo.DESCRIPTOR.fields if field.has_presence}
    assert scalars <= present.keys()
    zero = scalars - {"timestamp_unix_nanos", "total_kv_blocks"}
    assert {name: present[name] for name in zero} == dict.fromkeys(zero, 0)
    assert load.total_kv_blocks == model.total_kv_blocks > 0
    [rank] = load.ranks
    assert rank.data_parallel_rank == 0
    assert rank.HasField("data_parallel_rank")
    assert rank.total_kv_blocks == load.total_kv_blocks
    later = await operated.client.load()
    assert later.timestamp_unix_nanos > load.timestamp_unix_nanos


async def test_what_runs_and_what_waits(operated: Peer) -> None:
    info = await operated.client.engine_info()
    block = (await operated.client.model_info(info.supported_models[0])).kv_block_size
    running = [
        RunningCall(operated.channel, request(ENDLESS_TOKENS, 10 + 30 * n))
        for n in range(OPERATED_SLOTS)
    ]
    for call in running:
        await call.tokens(50)
    waiting = [
        RunningCall(operated.channel, request(ENDLESS_TOKENS, 300 + 30 * n)) for n in range(WAITING)
    ]

    async def all_are_there() -> bool:
        """They are, and a step has told of them since: it comes after the requests do."""
        load = await operated.client.load()
        counts = (load.running_requests, load.queued_requests, load.decode_batch_size)
        return counts == (OPERATED_SLOTS, WAITING, OPERATED_SLOTS)

    await eventually(all_are_there, "the engine has them all")
    before = [len(call.token_ids) for call in running]
    load = await operated.client.load(include_per_rank=True)
    for call, count in zip(running, before, strict=True):
        await call.tokens(count + 1)
    after = await operated.client.load()
    assert load.running_requests == load.decode_batch_size == OPERATED_SLOTS
    assert load.queued_requests == WAITING
    assert load.prefill_batch_size == 0
    assert load.waiting_tokens == WAITING * PROMPT_TOKENS
    least = sum(PROMPT_TOKENS + count for count in before)
    assert least <= load.running_tokens <= after.running_tokens
    assert sum(math.ceil((PROMPT_TOKENS + count) / block) for count in before) <= (
        load.used_kv_blocks
    )
    assert load.used_kv_blocks <= after.used_kv_blocks
    assert after.used_kv_blocks <= after.running_tokens / block + 2 * OPERATED_SLOTS
    assert load.timestamp_unix_nanos <= after.timestamp_unix_nanos
    [rank] = load.ranks
    assert (rank.running_requests, rank.queued_requests) == (OPERATED_SLOTS, WAITING)
    assert rank.used_kv_blocks == load.used_kv_blocks
    assert float(after.attributes["generation_tokens_per_second"]) > 0
    for call in (*waiting, *running):
        call.cancel()
        await call.end()
    await eventually(lambda: idle(operated), "idle again")
    load = await operated.client.load()
    assert load.running_tokens == load.waiting_tokens == load.used_kv_blocks == 0
    assert load.decode_batch_size == 0


async def test_the_cache_hit_rate(operated: Peer) -> None:
    info = await operated.client.engine_info()
    block = (await operated.client.model_info(info.supported_models[0])).kv_block_size
    whole = [n % 1000 for n in range(2 * block + 3)]
    prompt = generate_request(whole, {"max_tokens": 1})
    await operated.client.complete(prompt)
    before = (await operated.client.load()).attributes
    await operated.client.complete(prompt)
    after = (await operated.client.load()).attributes
    queried = int(after["prefix_cache_queried_tokens"]) - int(before["prefix_cache_queried_tokens"])
    hit = int(after["prefix_cache_hit_tokens"]) - int(before["prefix_cache_hit_tokens"])
    assert (queried, hit) == (len(whole), 2 * block)
    assert 0 < float(after["prefix_cache_hit_rate"]) < 1
    assert after["preemptions"] == "0"


async def test_the_events_of_one_request(operated: Peer) -> None:
    await eventually(lambda: idle(operated), "idle")
    tokens = 5
    calls = [
        operated.stub.SubscribeRuntimeEvents(pb.SubscribeRuntimeEventsRequest(types=types))
        for types in ([], [pb.RUNTIME_EVENT_TYPE_FORWARD_PASS])
    ]
    for call in calls:
        await call.initial_metadata()
    await operated.client.complete(request(tokens, 700))
    events: list[pb.RuntimeEvent] = []
    async for response in calls[0]:
        events.append(response.runtime_event)
        attributes = events[-1].attributes
        ended = attributes.get("live_requests") == "0"
        passes = [e for e in events if e.type == pb.RUNTIME_EVENT_TYPE_FORWARD_PASS]
        if ended and sum(int(e.attributes["decode_tokens"]) for e in passes) >= tokens - 1:
            break
    ids = [event.event_id for event in events]
    assert ids == sorted(set(ids))
    assert passes[0].attributes["prefill_tokens"] == str(PROMPT_TOKENS)
    assert [e.attributes["decode_requests"] for e in passes][1:tokens] == ["1"] * (tokens - 1)
    assert all(float(e.attributes["duration_ms"]) > 0 for e in passes)
    iterations = [int(e.attributes["iteration"]) for e in passes]
    assert iterations == sorted(set(iterations))
    batches = [e.attributes for e in events if e.type == pb.RUNTIME_EVENT_TYPE_BATCH]
    assert (batches[0]["prefill_batch_size"], batches[0]["decode_batch_size"]) == ("1", "0")
    assert (batches[1]["prefill_batch_size"], batches[1]["decode_batch_size"]) == ("0", "1")
    queues = [e.attributes for e in events if e.type == pb.RUNTIME_EVENT_TYPE_QUEUE]
    assert [q["live_requests"] for q in queues if q["queue"] == "server"] == ["1", "0"]
    seen = [(await anext(aiter(calls[1]))).runtime_event for _ in passes]
    assert seen == passes
    for call in calls:
        call.cancel()

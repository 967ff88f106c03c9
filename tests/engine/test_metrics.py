"""The metrics of a live engine, vLLM's and the server's, after work of which the test knows all."""

from __future__ import annotations

import json

import pytest

from openengine_vllm.client import OpenEngineError, generate_request
from tests.engine.peers import Peer
from tests.support.calls import ENDLESS_TOKENS, RunningCall, eventually
from tests.support.dashboard import DASHBOARD, metric_names
from tests.support.scrape import Scrape, http, scrape

PROMPT = list(range(900, 920))
TOKENS = 7


async def scraped(peer: Peer) -> Scrape:
    return await scrape(peer.server.ready["metrics"])


async def idle(peer: Peer) -> Scrape:
    """What is shown once nothing runs."""
    latest: list[Scrape] = []

    async def rests() -> bool:
        shown = await scraped(peer)
        latest[:] = [shown]
        return not (
            shown.value("openengine_live_sequences")
            or shown.sum("openengine_requests_in_flight", rpc="Generate")
            or shown.sum("vllm:num_requests_running")
        )

    await eventually(rests, "idle")
    return latest[0]


class Growth:
    """How samples have grown between two scrapes."""

    def __init__(self, before: Scrape, after: Scrape) -> None:
        self._before = before
        self._after = after

    def of(self, name: str, **labels: str) -> float:
        """Over all series that have these labels."""
        return self._after.sum(name, **labels) - self._before.sum(name, **labels)


async def test_one_request_in_both_halves(operated: Peer) -> None:
    before = await idle(operated)
    await operated.client.complete(
        generate_request(PROMPT, {"max_tokens": TOKENS, "ignore_eos": True, "num_sequences": 2})
    )
    grew = Growth(before, await idle(operated))
    assert grew.of("openengine_requests_total", rpc="Generate", code="OK") == 1
    assert grew.of("openengine_generation_tokens_total") == 2 * TOKENS
    assert grew.of("vllm:generation_tokens_total") == 2 * TOKENS
    assert grew.of("openengine_prompt_tokens_total") == len(PROMPT)
    assert grew.of("vllm:prompt_tokens_total") == 2 * len(PROMPT)
    assert grew.of("openengine_outputs_total", finish="length") == 2
    assert grew.of("vllm:request_success_total", finished_reason="length") == 2
    assert grew.of("openengine_time_to_first_token_seconds_count") == 1
    assert grew.of("vllm:time_to_first_token_seconds_count") == 2
    assert grew.of("vllm:inter_token_latency_seconds_count") == 2 * (TOKENS - 1)
    first = grew.of("openengine_time_to_first_token_seconds_sum")
    between = grew.of("openengine_inter_token_latency_seconds_sum")
    whole = grew.of("openengine_request_duration_seconds_sum", rpc="Generate")
    assert 0 < first < first + between <= whole
    assert grew.of("openengine_stream_messages_total", rpc="Generate") >= TOKENS


async def test_what_the_prefix_cache_had(operated: Peer) -> None:
    info = await operated.client.engine_info()
    block = (await operated.client.model_info(info.supported_models[0])).kv_block_size
    prompt = generate_request([n % 900 + 1 for n in range(2 * block + 3)], {"max_tokens": 1})
    await operated.client.complete(prompt)
    before = await idle(operated)
    await operated.client.complete(prompt)
    grew = Growth(before, await idle(operated))
    assert grew.of("openengine_cached_prompt_tokens_total") == 2 * block
    assert grew.of("vllm:prefix_cache_hits_total") == 2 * block
    assert grew.of("vllm:prefix_cache_queries_total") == 2 * block + 3


async def test_what_runs_is_seen_while_it_runs(operated: Peer) -> None:
    before = await idle(operated)
    call = RunningCall(
        operated.channel,
        generate_request(PROMPT, {"max_tokens": ENDLESS_TOKENS, "ignore_eos": True}),
    )
    await call.tokens(5)
    during = await scraped(operated)
    assert during.value("openengine_live_sequences") == 1
    assert during.value("openengine_requests_in_flight", rpc="Generate") == 1
    assert during.sum("vllm:num_requests_running") == 1
    assert during.sum("vllm:kv_cache_usage_perc") > 0
    assert Growth(before, during).of("openengine_generation_tokens_total") >= 5
    call.cancel()
    await call.end()
    grew = Growth(before, await idle(operated))
    assert grew.of("openengine_requests_total", rpc="Generate", code="CANCELLED") == 1
    assert grew.of("openengine_outputs_total", finish="unfinished") == 1
    assert grew.of("vllm:request_success_total") == 0


async def test_a_rejection_never_reaches_the_engine(operated: Peer) -> None:
    before = await idle(operated)
    with pytest.raises(OpenEngineError):
        await operated.client.complete(PROMPT, temperature=-1.0)
    grew = Growth(before, await idle(operated))
    told = {"rpc": "Generate", "field": "sampling.temperature", "sent_as": "status"}
    assert grew.of("openengine_errors_total", code="INVALID_ARGUMENT", **told) == 1
    assert grew.of("vllm:prompt_tokens_total") == 0


async def test_the_labels_are_vllms(operated: Peer) -> None:
    shown = await idle(operated)
    [model] = (await operated.client.engine_info()).supported_models
    assert shown.value("vllm:num_requests_running", model_name=model, engine="0") == 0
    assert ("vllm:num_requests_running", frozenset({("model_name", model), ("engine", "0")})) in (
        shown.samples
    )
    assert shown.sum("vllm:cache_config_info") == 1
    assert shown.value("openengine_health_state", state="READY") == 1
    assert shown.value("process_resident_memory_bytes") > 0


async def test_the_dashboard_asks_for_what_is_there(operated: Peer) -> None:
    await operated.client.complete(PROMPT, max_tokens=2)
    with pytest.raises(OpenEngineError):
        await operated.client.complete(PROMPT, temperature=-1.0)
    await idle(operated)
    asked = metric_names(json.loads(DASHBOARD.read_text()))
    assert asked <= (await scraped(operated)).names


async def test_nothing_else_is_served(operated: Peer) -> None:
    reply = await http(operated.server.ready["metrics"], "GET / HTTP/1.1\r\n\r\n")
    assert reply.status == 404

"""What is kept of the schedulers' statistics, and the load that it makes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from openengine_vllm.engine.stats import (
    RATE_SECONDS,
    CacheHits,
    Demand,
    EngineStats,
    RecentRate,
    Step,
)
from tests.unit.scripted_engine import scheduler_stats

IDLE = Demand(0, 0, 0, 0)


def engine_stats(ranks: Iterable[int] = (0,), blocks: int | None = 101) -> EngineStats:
    stats = EngineStats()
    stats.configure(tuple(ranks), blocks, prefix_caching=True)
    return stats


def test_before_the_first_step_everything_is_zero() -> None:
    load = engine_stats().load(IDLE)
    assert (load.running, load.queued, load.running_tokens, load.waiting_tokens) == (0, 0, 0, 0)
    assert load.blocks() == (0, 101)
    assert [(rank.rank, rank.prefill_batch, rank.decode_batch) for rank in load.ranks] == [
        (0, 0, 0)
    ]
    assert load.time_ns > 0


def test_the_last_step_counts_while_there_is_work() -> None:
    stats = engine_stats()
    stats.record(0, scheduler_stats(num_running_reqs=1, kv_cache_usage=0.5, prefill=1))
    stats.record(
        0,
        scheduler_stats(
            num_running_reqs=3,
            num_waiting_reqs=1,
            num_skipped_waiting_reqs=1,
            kv_cache_usage=0.07,
            prefill=1,
            decode=2,
        ),
    )
    load = stats.load(Demand(5, 2, 30, 20))
    assert (load.running, load.queued) == (3, 4)
    assert (load.running_tokens, load.waiting_tokens) == (30, 20)
    assert load.blocks() == (7, 101)
    [rank] = load.ranks
    assert (rank.running, rank.queued, rank.deferred) == (3, 2, 1)
    assert (rank.prefill_batch, rank.decode_batch) == (1, 2)
    assert load.time_ns == rank.time_ns


def test_an_engine_with_nothing_to_do_has_no_load_whatever_it_said_last() -> None:
    stats = engine_stats()
    stats.record(0, scheduler_stats(num_running_reqs=3, kv_cache_usage=0.5, decode=3))
    before = stats.load(Demand(3, 0, 9, 0)).time_ns
    load = stats.load(IDLE)
    assert (load.running, load.queued) == (0, 0)
    assert load.blocks() == (0, 101)
    assert (load.ranks[0].running, load.ranks[0].decode_batch) == (0, 0)
    assert load.time_ns >= before


@pytest.mark.parametrize(
    ("requests", "running", "queued"), [(4, 2, 2), (1, 1, 0)], ids=["just came", "just ended"]
)
def test_requests_that_no_step_has_told_of(requests: int, running: int, queued: int) -> None:
    stats = engine_stats()
    stats.record(0, scheduler_stats(num_running_reqs=2, decode=2))
    load = stats.load(Demand(requests, 0, 0, 0))
    assert (load.running, load.queued) == (running, queued)


def test_ranks_are_absolute_and_add_up() -> None:
    stats = engine_stats((4, 5))
    stats.record(5, scheduler_stats(num_running_reqs=2, kv_cache_usage=0.1, decode=2))
    load = stats.load(Demand(2, 0, 0, 0))
    assert [(rank.rank, rank.running, rank.used_blocks) for rank in load.ranks] == [
        (4, 0, 0),
        (5, 2, 10),
    ]
    assert load.blocks() == (10, 202)


def test_a_model_without_a_kv_cache_tells_no_blocks() -> None:
    stats = engine_stats(blocks=None)
    stats.record(0, scheduler_stats(num_running_reqs=1, kv_cache_usage=0.0))
    assert stats.load(IDLE).blocks() == stats.load(Demand(1, 0, 0, 0)).blocks() == (None, None)


def test_what_adds_up_is_told_as_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openengine_vllm.engine.stats.time.monotonic", lambda: 1000.5)
    stats = engine_stats()
    assert stats.load(IDLE).attributes == {
        "generation_tokens_per_second": "0",
        "prompt_tokens_per_second": "0",
        "prefix_cache_queried_tokens": "0",
        "prefix_cache_hit_tokens": "0",
        "preemptions": "0",
    }
    stats.record(0, scheduler_stats(prefill=3, cache={"requests": 3, "queries": 80, "hits": 20}))
    stats.progress.tokens += 15
    stats.record(0, scheduler_stats(decode=3, cache={"preempted_requests": 2}))
    assert stats.load(IDLE).attributes == {
        "generation_tokens_per_second": "1.5",
        "prompt_tokens_per_second": "3",
        "prefix_cache_queried_tokens": "80",
        "prefix_cache_hit_tokens": "20",
        "prefix_cache_hit_rate": "0.25",
        "preemptions": "2",
    }


def test_a_rate_forgets_what_is_long_past() -> None:
    rate = RecentRate()
    rate.add(50, 100.9)
    rate.add(50, 101.1)
    assert rate.per_second(101.2) == 100 / RATE_SECONDS
    assert rate.per_second(100.9 + RATE_SECONDS) == 50 / RATE_SECONDS
    assert rate.per_second(101.1 + RATE_SECONDS) == 0
    rate.add(20, 101.1 + RATE_SECONDS)
    assert rate.per_second(101.1 + RATE_SECONDS) == 20 / RATE_SECONDS


def test_the_hit_rate_is_of_recent_requests_and_the_totals_of_all() -> None:
    hits = CacheHits()
    assert hits.rate is None
    hits.add(1, 100, 100)
    assert hits.rate == 1
    for _ in range(1000):
        hits.add(1, 10, 5)
    assert hits.rate == 0.5
    assert (hits.total_queried, hits.total_hit) == (10_100, 5_100)


def test_watchers_see_each_step_until_they_leave() -> None:
    stats = engine_stats()
    seen: list[Step] = []
    stats.watch(seen.append)
    stats.record(0, scheduler_stats(prefill=1, decode=2, iteration=7))
    stats.record(0, scheduler_stats())
    stats.unwatch(seen.append)
    stats.record(0, scheduler_stats(prefill=1))
    computed, idle = seen
    assert idle.forward_pass is None
    ran = computed.forward_pass
    assert ran is not None
    assert (ran.iteration, ran.prefill_requests, ran.prefill_tokens) == (7, 1, 10)
    assert (ran.decode_requests, ran.decode_tokens, ran.milliseconds) == (2, 2, 2.5)


def test_a_dummy_pass_is_none() -> None:
    stats = engine_stats()
    seen: list[Step] = []
    stats.watch(seen.append)
    dummy = scheduler_stats(decode=0)
    assert dummy.iteration_details is not None
    dummy.iteration_details.is_dummy = True
    stats.record(0, dummy)
    assert seen[0].forward_pass is None


def test_a_connectors_figures_are_its_numbers() -> None:
    stats = engine_stats()
    seen: list[Step] = []
    stats.watch(seen.append)
    payload = {
        "bytes": [10, 20],
        "failed": [],
        "name": "x",
        "on": True,
        "inner": {"seconds": 0.5, "deep": [1]},
    }
    stats.record(0, scheduler_stats(kv_connector_stats=payload))
    stats.record(0, scheduler_stats(kv_connector_stats={str(n): n for n in range(100)}))
    assert seen[0].transfers == {
        "bytes_count": 2,
        "bytes_sum": 30,
        "inner_seconds": 0.5,
        "inner_deep_count": 1,
        "inner_deep_sum": 1,
    }
    assert len(seen[1].transfers) == 64

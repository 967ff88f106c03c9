"""vLLM's publishers as its engine client tells of them, and resets on their way to the engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.config import KVEventsConfig

from openengine_vllm.engine.kv_events import kv_publishers, tell_of_resets
from openengine_vllm.kv_events.endpoints import loopback_bind
from openengine_vllm.kv_events.source import Publisher

FACTS = cast("Any", SimpleNamespace(generates=True, prefix_caching=True))


def found(asked: str, *told: str, facts: Any = FACTS) -> tuple[Publisher, ...]:
    """The publishers of an engine that was asked for an endpoint and tells of these, by rank."""

    def config(endpoint: str) -> KVEventsConfig:
        return KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=endpoint,
            replay_endpoint="tcp://127.0.0.1:6",
            buffer_steps=7,
            hwm=8,
            max_queue_size=9,
            topic="kv",
        )

    llm = SimpleNamespace(
        get_kv_event_sources=lambda: dict(enumerate(map(config, told))),
        vllm_config=SimpleNamespace(kv_events_config=config(asked)),
    )
    return kv_publishers(cast("Any", llm), facts)


def test_what_the_operator_has_asked_for() -> None:
    [first, second] = found("tcp://*:5", "tcp://*:5", "tcp://*:6")
    assert first == Publisher(
        rank=0,
        endpoint="tcp://127.0.0.1:5",
        replay="tcp://127.0.0.1:6",
        topic="kv",
        bound="tcp://*:5",
        bound_replay="tcp://127.0.0.1:6",
        buffer_steps=7,
        hwm=8,
        max_queue_size=9,
    )
    assert (second.rank, second.endpoint, second.bound) == (1, "tcp://127.0.0.1:6", "tcp://*:6")


@pytest.mark.parametrize(
    ("asked", "told", "endpoint", "binds"),
    [
        ("tcp://*:0", "tcp://192.0.2.7:5", "tcp://192.0.2.7:5", False),
        ("tcp://[::]:5", "tcp://[::]:5", "tcp://[::1]:5", False),
        ("ipc:///x", "ipc:///x", "ipc:///x", False),
        (loopback_bind(5), loopback_bind(5), "tcp://127.0.0.1:5", False),
        ("tcp://127.0.0.1:5", "tcp://127.0.0.1:5", "tcp://127.0.0.1:5", True),
    ],
)
def test_who_binds(asked: str, told: str, endpoint: str, binds: bool) -> None:
    [publisher] = found(asked, told)
    assert (publisher.endpoint, publisher.binds) == (endpoint, binds)


@pytest.mark.parametrize("endpoint", ["tcp://192.0.2.7:5", "inproc://x"])
def test_events_that_go_elsewhere(endpoint: str) -> None:
    assert found(endpoint, endpoint) == ()


def test_nothing_is_published() -> None:
    assert found("tcp://*:5") == ()
    for facts in ({"generates": False}, {"prefix_caching": False}):
        assert (
            found("tcp://*:5", "tcp://*:5", facts=SimpleNamespace(**{**vars(FACTS), **facts})) == ()
        )


class Llm:
    """An engine client whose resets the test answers."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.answers: asyncio.Queue[bool] = asyncio.Queue()

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self.calls.append((reset_running_requests, reset_connector))
        return await self.answers.get()


async def test_resets_are_told_one_at_a_time_and_only_where_they_succeed() -> None:
    llm, told = Llm(), list[str]()

    def begin() -> Any:
        told.append("begin")
        return lambda: told.append("emptied")

    tell_of_resets(cast("Any", llm), begin)
    resets = [
        asyncio.ensure_future(llm.reset_prefix_cache(True)),
        asyncio.ensure_future(llm.reset_prefix_cache(reset_connector=True)),
        asyncio.ensure_future(llm.reset_prefix_cache()),
    ]
    await asyncio.sleep(0.01)
    assert (told, llm.calls) == (["begin"], [(True, False)])
    for answer in (True, False, True):
        llm.answers.put_nowait(answer)
    assert await asyncio.gather(*resets) == [True, False, True]
    assert told == ["begin", "emptied", "begin", "begin", "emptied"]
    assert llm.calls == [(True, False), (False, True), (False, False)]

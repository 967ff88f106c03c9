"""vLLM's publishers of KV events: switched on where the operator says nothing, and found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog
from vllm.config import KVEventsConfig

from openengine_vllm.hosts import is_loopback
from openengine_vllm.kv_events.endpoints import (
    TcpEndpoint,
    free_ports,
    is_bound_by_vllm,
    local_form,
    loopback_bind,
    parse_tcp,
)
from openengine_vllm.kv_events.source import Publisher

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from openengine_vllm.engine.facts import ModelFacts

_log = structlog.get_logger(__name__)


def publish_kv_events(args: AsyncEngineArgs) -> None:
    """Have the engine publish KV events on the loopback interface, unless that is decided.

    A rank adds its number to both ports.

    Raises:
        EndpointError: no ports are free.
    """
    if (
        args.kv_events_config is not None
        or args.enable_prefix_caching is False
        or args.runner == "pooling"
    ):
        return
    ranks = args.data_parallel_size
    port = free_ports(ranks)
    replay_port = free_ports(ranks, taken=range(port, port + ranks))
    args.kv_events_config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=loopback_bind(port),
        replay_endpoint=str(TcpEndpoint("127.0.0.1", replay_port)),
    )


def tell_of_resets(llm: AsyncLLM, begin: Callable[[], Callable[[], None]]) -> None:
    """Have each reset of the prefix cache that goes through this client told at once.

    vLLM publishes it with the events of its next step, and so never while it is idle.

    Args:
        begin: called before each reset, one at a time; what it returns, after it has succeeded.
    """
    reset, turn = llm.reset_prefix_cache, asyncio.Lock()

    async def reset_and_tell(*args: Any, **options: Any) -> bool:
        async with turn:
            emptied = begin()
            succeeded = await reset(*args, **options)
            if succeeded:
                emptied()
        return succeeded

    llm.reset_prefix_cache = reset_and_tell  # type: ignore[method-assign]


def kv_publishers(llm: AsyncLLM, facts: ModelFacts) -> tuple[Publisher, ...]:
    """The engine's publishers, by rank; none where nothing is published."""
    if not (facts.generates and facts.prefix_caching):
        return ()
    sources = sorted(llm.get_kv_event_sources().items())
    asked = llm.vllm_config.kv_events_config
    # A port of its own choice is told as an address to which it would have connected.
    bound = asked is not None and is_bound_by_vllm(asked.endpoint)
    for rank, config in sources:
        if not _can_follow(config.endpoint, bound):
            _log.warning("KV events go elsewhere", rank=rank, endpoint=config.endpoint)
            return ()
    return tuple(
        _publisher(rank, config, bound) for rank, config in sources if config.publisher == "zmq"
    )


def _can_follow(endpoint: str, bound: bool) -> bool:
    """Where vLLM connects to somebody, that has to be us."""
    if bound:
        return not endpoint.startswith("inproc://")
    parsed = parse_tcp(endpoint)
    return parsed is not None and is_loopback(parsed.host)


def _publisher(rank: int, config: KVEventsConfig, bound: bool) -> Publisher:
    return Publisher(
        rank,
        local_form(config.endpoint),
        None if config.replay_endpoint is None else local_form(config.replay_endpoint),
        config.topic,
        binds=not bound,
        bound=_plain(config.endpoint),
        bound_replay=None if config.replay_endpoint is None else _plain(config.replay_endpoint),
        buffer_steps=config.buffer_steps,
        hwm=config.hwm,
        max_queue_size=config.max_queue_size,
    )


def _plain(endpoint: str) -> str:
    """Without a source address."""
    parsed = parse_tcp(endpoint)
    return endpoint if parsed is None else str(parsed)

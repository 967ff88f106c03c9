"""Where `top` has its figures from: an engine that is asked again and again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

import grpc

from openengine_vllm.client import Client, OpenEngineError
from openengine_vllm.client.commands.running import describe
from openengine_vllm.client.commands.top.monitor import Link, Monitor
from openengine_vllm.protocol import v1 as pb

_Answer = TypeVar("_Answer")

_SERVING: Final = (
    pb.HEALTH_STATE_READY,
    pb.HEALTH_STATE_DEGRADED,
    pb.HEALTH_STATE_DRAINING,
)


class Feed:
    """Asks one engine, and tells the monitor what it said.

    Args:
        client: the connection; its own timeout bounds each question.
        monitor: what the answers go to.
        clock: seconds since the epoch.
    """

    def __init__(self, client: Client, monitor: Monitor, clock: Callable[[], float]) -> None:
        self._client = client
        self._monitor = monitor
        self._clock = clock

    async def poll(self) -> None:
        """One round of questions. Errors go to the monitor."""
        try:
            await self._poll()
        except OpenEngineError as error:
            self._monitor.failed(error, self._clock())

    async def follow_events(self, types: Sequence[pb.RuntimeEventType.ValueType]) -> None:
        """Passes on events of these types, or of all, until the stream ends or fails."""
        monitor = self._monitor
        monitor.events_problem = ""
        try:
            async with aclosing(self._client.subscribe_runtime_events(types)) as responses:
                async for response in responses:
                    monitor.happened(response.runtime_event)
        except OpenEngineError as error:
            monitor.events_problem = describe(error)

    async def _poll(self) -> None:
        monitor = self._monitor
        health = await _if_there(self._client.health())
        if health is not None and health.state not in _SERVING:
            monitor.answered(health, None, None, self._clock())
            return
        load = await _if_there(self._client.load(include_per_rank=True))
        engine = monitor.engine
        restarted = (
            engine is not None and load is not None and engine.instance_id != load.instance_id
        )
        if engine is None or restarted or monitor.link is not Link.UP:
            engine = await _if_there(self._client.engine_info())
        monitor.answered(health, engine, load, self._clock())


async def _if_there(call: Awaitable[_Answer]) -> _Answer | None:
    """An answer, or None from an engine that doesn't have the RPC."""
    try:
        return await call
    except OpenEngineError as error:
        if error.status is grpc.StatusCode.UNIMPLEMENTED:
            return None
        raise

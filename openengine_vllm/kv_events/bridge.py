"""All ranks of one engine: their publishers, their logs, and who is woken when batches come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import zmq

from openengine_vllm.hosts import is_loopback
from openengine_vllm.kv_events.endpoints import TcpEndpoint
from openengine_vllm.kv_events.feed import RankFeed
from openengine_vllm.kv_events.republisher import Republisher
from openengine_vllm.kv_events.settings import BridgeSettings
from openengine_vllm.kv_events.source import PATIENCE, Patience, Publisher, Source

_log = structlog.get_logger(__name__)


class BridgeError(Exception):
    """The bridge cannot start; the message says why."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's parts."""

    feed: RankFeed
    source: Source
    republisher: Republisher


class KvBridge:
    """Follows the publishers of all ranks from :meth:`start` to :meth:`stop`.

    Args:
        publishers: one a rank.
    """

    def __init__(
        self,
        settings: BridgeSettings,
        publishers: Sequence[Publisher],
        patience: Patience = PATIENCE,
    ) -> None:
        self.settings = settings
        self._publishers = publishers
        self._patience = patience
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self.ranks: dict[int, Rank] = {}
        """By absolute rank, in the order of the publishers."""

    def start(self) -> None:
        """Open all sockets and begin to follow the publishers, in the running loop.

        Raises:
            BridgeError: an address cannot be used.
        """
        if not is_loopback(self.settings.zmq_host):
            _log.warning(
                "anyone who can reach the ZMQ sockets can read what is cached",
                host=self.settings.zmq_host,
            )
        try:
            for publisher in self._publishers:
                self._start_rank(publisher)
        except BaseException:
            self._close()
            raise

    def _start_rank(self, publisher: Publisher) -> None:
        settings = self.settings
        feed = RankFeed(publisher.rank, settings.retain_batches, settings.retain_bytes)
        ports = [
            base + publisher.rank if base else 0
            for base in (settings.zmq_port, settings.zmq_replay_port)
        ]
        try:
            republisher = Republisher(
                self._context, feed.log, settings.zmq_topic, settings.zmq_host, *ports
            )
        except (zmq.ZMQError, OverflowError) as error:
            shown = TcpEndpoint(settings.zmq_host, ports[0] or ports[1])
            raise BridgeError(f"cannot publish KV events on {shown}: {error}") from error
        source = Source(self._context, publisher, feed, self._waker(republisher), self._patience)
        self.ranks[publisher.rank] = Rank(feed, source, republisher)
        try:
            source.open()
        except zmq.ZMQError as error:
            raise BridgeError(
                f"cannot follow KV events from {publisher.endpoint}: {error}"
            ) from error
        for coroutine in (source.run(), republisher.serve_replays()):
            task = asyncio.ensure_future(coroutine)
            task.add_done_callback(_report)
            self._tasks.append(task)

    def _waker(self, republisher: Republisher) -> Callable[[], None]:
        def on_batches() -> None:
            republisher.publish()
            self.wake()

        return on_batches

    @property
    def news(self) -> asyncio.Event:
        """Set at the next batch of any rank; read it before looking for batches."""
        return self._news

    def emptying(self) -> Callable[[], None]:
        """A reset of all ranks' caches begins; call the result once they are known to be empty.

        One reset at a time: its end, or that it has failed, comes before the next one begins.
        """
        clears = [(rank, rank.feed.mirror.next_clear) for rank in self.ranks.values()]

        def emptied() -> None:
            if self._context.closed:
                return
            for rank, clear in clears:
                if rank.feed.emptied(clear, time.time_ns()):
                    rank.republisher.publish()
            self.wake()

        return emptied

    async def reached(self, seconds: float) -> None:
        """Wait until every publisher has been reached once, for some seconds at the most."""
        reached = [rank.source.reached.wait() for rank in self.ranks.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*reached)

    def wake(self) -> None:
        """Have all readers look again."""
        self._news.set()
        self._news = asyncio.Event()

    async def stop(self) -> None:
        """Stop following and close all sockets."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close()

    def _close(self) -> None:
        for rank in self.ranks.values():
            rank.source.close()
            rank.republisher.close()
        self._context.destroy(linger=200)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("KV event bridge has failed", exc_info=error)

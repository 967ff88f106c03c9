"""Drains: waiting for what runs to end, with a deadline and without.

The Drain RPC and SIGTERM both go through here. A drain that has begun runs to its end whether or
not anybody watches it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

from openengine_vllm.lifecycle import Lifecycle
from openengine_vllm.protocol import errors
from openengine_vllm.registry import EndReason, RequestRegistry

_log = structlog.get_logger(__name__)

_LAST_WORDS_SECONDS = 2.0
"""How long requests that are told to end may take to tell their clients so."""


class Drain:
    """One drain, as :class:`Drains` begins it."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        registry: RequestRegistry,
        deadline: float | None,
        abort_after_deadline: bool,
    ) -> None:
        self._lifecycle = lifecycle
        self._registry = registry
        self._deadline = deadline
        self._abort_after_deadline = abort_after_deadline
        self._hurried = False
        self._changed = asyncio.Event()
        self._news = asyncio.Event()
        self.error: errors.OpenEngineError | None = None
        """Why it failed, once it is :attr:`done`; None when nothing is left to wait for."""
        self.done = False
        self.finished = asyncio.ensure_future(self._run())
        """Done with the drain."""

    @property
    def in_flight(self) -> int:
        """Requests that are live now."""
        return len(self._registry)

    async def news(self, seconds: float) -> None:
        """Wait until requests have come or gone, or the drain is done, at most so long.

        What happened since the last call counts. It is for one watcher.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        self._news.clear()

    def hurry(self) -> None:
        """End what still runs, now."""
        self._hurried = True
        self._changed.set()

    async def _run(self) -> None:
        self._registry.watch(self._on_change)
        try:
            if not await self._idle_in_time():
                if self._abort_after_deadline or self._hurried:
                    await self._end_all()
                else:
                    self.error = self._too_late()
            if self._lifecycle.failed:
                self.error = errors.engine_dead()
        finally:
            self._registry.unwatch(self._on_change)
            self.done = True
            self._news.set()

    def _on_change(self) -> None:
        self._changed.set()
        self._news.set()

    async def _idle_in_time(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._deadline):
                while len(self._registry) and not self._hurried:
                    self._changed.clear()
                    await self._changed.wait()
        return not len(self._registry)

    def _too_late(self) -> errors.OpenEngineError:
        milliseconds = round((self._deadline or 0) * 1000)
        return errors.draining(
            f"{self.in_flight} requests are in flight after the deadline of {milliseconds} ms"
        )

    async def _end_all(self) -> None:
        """End the requests that are live now, also those whose clients do not read."""
        entries = tuple(self._registry)
        _log.warning("ending what did not finish", live_requests=len(entries))
        for entry in entries:
            entry.end(EndReason.DRAINED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                while not all(entry.closed for entry in entries):
                    self._changed.clear()
                    await self._changed.wait()
        for entry in entries:
            self._registry.close(entry)


class Drains:
    """Begins drains; any number may run at once.

    Args:
        report: tells health checks that the state has changed.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        registry: RequestRegistry,
        report: Callable[[], Awaitable[None]],
    ) -> None:
        self._lifecycle = lifecycle
        self._registry = registry
        self._report = report
        self._running: set[asyncio.Future[None]] = set()

    async def begin(
        self, *, stop_accepting: bool, deadline: float | None, abort_after_deadline: bool
    ) -> Drain:
        """Begin to wait until no request is live.

        Args:
            stop_accepting: refuse new work from now on, for good.
            deadline: seconds; None waits for as long as it takes.
            abort_after_deadline: have what runs then fail with DRAINING, and leave it alone
                otherwise.
        """
        if stop_accepting:
            self._lifecycle.drain()
        drain = Drain(self._lifecycle, self._registry, deadline, abort_after_deadline)
        self._running.add(drain.finished)
        drain.finished.add_done_callback(self._running.discard)
        _log.info(
            "draining",
            live_requests=len(self._registry),
            stop_accepting=stop_accepting,
            deadline_s=deadline,
            abort_after_deadline=abort_after_deadline,
        )
        if stop_accepting:
            await self._report()
        return drain

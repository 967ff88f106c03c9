"""Requests that reach the engine another way than by gRPC: those of vLLM's own HTTP server.

They pass through here on their way into the engine, so that they count as live requests like all
others: for the capacity, for Abort of everything, for drains, and at the gate that keeps apart
what must not meet in a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from openengine_vllm.engine.gate import BatchKind
from openengine_vllm.engine.waiting_room import Leave, WaitingRoom
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.registry import EndReason, Entry, RequestRegistry

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class WatchedCollector(RequestOutputCollector):
    """vLLM's collector of one request's outputs, which tells when the request is over."""

    on_finished: Leave
    """The engine is done with it; may come more than once."""
    on_closed: Leave
    """Nobody takes outputs any more."""

    def put(self, output: Any) -> None:
        """Take what the engine has made."""
        super().put(output)
        if isinstance(output, Exception) or output.finished:
            self.on_finished()

    def close(self) -> None:
        """The request's generator has ended, one way or the other."""
        super().close()  # type: ignore[no-untyped-call]
        self.on_finished()
        self.on_closed()


class SharedEntrance:
    """Stands in front of an engine's own entrance, which gRPC requests use directly.

    Args:
        llm: its ``add_request`` and ``check_admission`` are replaced.
        room: where requests wait for their turn.
        registry: of the live requests.
        accepting: raises OpenEngineError while no new work is taken.
        before_guides: runs before the first request with a guide.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        room: WaitingRoom,
        registry: RequestRegistry,
        accepting: Callable[[], object],
        before_guides: Callable[[], Coroutine[None, None, None]],
    ) -> None:
        self._llm = llm
        self._room = room
        self._registry = registry
        self._accepting = accepting
        self._before_guides = before_guides
        self._guides_ready: asyncio.Task[None] | None = None
        self._serial = itertools.count()
        self._aborts: set[asyncio.Task[None]] = set()
        self._enter = llm.add_request
        self._check = llm.check_admission
        llm.add_request = self._add_request  # type: ignore[method-assign]
        llm.check_admission = self._check_admission  # type: ignore[method-assign]

    def _check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        # A server asks before it answers, without naming a request; the engine names one.
        if request_id is None:
            with _errors_as_vllm():
                self._accepting()
                self._registry.check_room(n)
        self._check(n, request_id)

    async def _add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
    ) -> RequestOutputCollector:
        with _errors_as_vllm():
            self._accepting()
            entry = self._registry.admit(
                f"http/{next(self._serial)}/{request_id}", getattr(params, "n", 1)
            )
        try:
            leave = await self._until_ready(entry, prompt, params)
            try:
                collector = await self._enter(request_id, prompt, params, *args, **options)
            except BaseException:
                leave()
                raise
        except BaseException:
            self._registry.forget(entry)
            raise
        self._watch(collector, entry, leave)
        return collector

    async def _until_ready(self, entry: Entry, prompt: Any, params: Any) -> Leave:
        """Wait for the request's turn, unless it is told to end."""
        waiting = asyncio.ensure_future(self._wait(prompt, params))

        def give_up(_: EndReason) -> None:
            waiting.cancel()

        entry.on_end(give_up)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                waiting.result()()
            if entry.end_reason is None:
                raise
            raise GracefulHTTPError(
                "the request was ended before it began", HTTPStatus.SERVICE_UNAVAILABLE
            ) from None

    async def _wait(self, prompt: Any, params: Any) -> Leave:
        with self._room.waiting(getattr(params, "n", 1), prompt_length(prompt)):
            if getattr(params, "structured_outputs", None) is not None:
                if self._guides_ready is None:
                    self._guides_ready = asyncio.ensure_future(self._before_guides())
                await asyncio.shield(self._guides_ready)
            return await self._room.enter(batch_kind(params))

    def _watch(self, collector: RequestOutputCollector, entry: Entry, leave: Leave) -> None:
        collector.__class__ = WatchedCollector
        assert isinstance(collector, WatchedCollector)
        collector.on_finished = leave
        collector.on_closed = lambda: self._registry.close(entry)
        internal_id = collector.request_id
        entry.on_end(lambda reason: self._end(internal_id, reason))

    def _end(self, internal_id: str, reason: EndReason) -> None:
        if reason is EndReason.ENGINE_DEAD:
            return  # vLLM says so to each of its requests.
        task = asyncio.ensure_future(self._abort(internal_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, internal_id: str) -> None:
        with contextlib.suppress(EngineDeadError):
            await self._llm.abort(internal_id, internal=True)


def batch_kind(params: Any) -> BatchKind | None:
    """What a request with these parameters of vLLM's must not meet in a batch, if anything."""
    if getattr(params, "logprob_token_ids", None):
        return BatchKind.LISTED
    return BatchKind.RANKED if getattr(params, "logprobs", None) else None


def prompt_length(prompt: Any) -> int:
    """Tokens of a prompt as vLLM's servers hand it over; 0 where it is not tokenized yet."""
    return len(prompt.get("prompt_token_ids") or ()) if isinstance(prompt, dict) else 0


@contextlib.contextmanager
def _errors_as_vllm() -> Iterator[None]:
    try:
        yield
    except errors.OpenEngineError as error:
        if error.code == pb.ERROR_CODE_INTERNAL:
            raise EngineDeadError() from error
        raise GracefulHTTPError(error.message, HTTPStatus.SERVICE_UNAVAILABLE) from error

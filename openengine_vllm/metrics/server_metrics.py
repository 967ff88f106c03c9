"""What the server counts of itself, by the names in ``docs/metrics.md``.

Calls are counted around their handlers, streams in their writers, requests where their log line
is made; what a service or the registry of requests knows anyway is read when somebody asks.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from openengine_vllm.metrics.instruments import (
    Cell,
    Counter,
    Distribution,
    Gauge,
    Histogram,
    InstrumentSet,
    Reading,
)
from openengine_vllm.protocol import errors

if TYPE_CHECKING:
    from openengine_vllm.engine.stream import GenerationStream

Run: TypeAlias = Callable[[bytes, Any], Awaitable[Any]]
"""A handler that parses its request itself."""

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_BETWEEN_TOKENS_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10),
)
_CALL_SECONDS = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300),
    *(600, 1800),
)
_LAG_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_LAG_PERIOD_SECONDS = 0.1

_IN_BRACKETS = re.compile(r"\[[^\]]*\]?")


class StreamCells:
    """What the writers of one RPC count in."""

    __slots__ = ("between", "messages", "stalled")

    def __init__(self, messages: Cell, stalled: Cell, between: Distribution | None) -> None:
        self.messages = messages
        self.stalled = stalled
        self.between = between
        """Seconds between what is handed over; None where nobody asks for it."""


class ServerMetrics(InstrumentSet):
    """The server's own instruments; others may be added."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = self.add(
            Counter(
                "openengine_requests_total",
                "Calls that have ended, by gRPC status; a client that left or whose deadline "
                "passed counts as CANCELLED.",
                "calls",
                ("rpc", "code"),
            )
        )
        self._in_flight = self.add(
            Gauge("openengine_requests_in_flight", "Calls that run.", "calls", ("rpc",))
        )
        self._durations = self.add(
            Histogram(
                "openengine_request_duration_seconds",
                "Time from a call's whole request to its end.",
                "seconds",
                ("rpc",),
                bounds=_CALL_SECONDS,
            )
        )
        self._errors = self.add(
            Counter(
                "openengine_errors_total",
                "Errors told to clients: by the contract's code, the path of the field at fault "
                "(without indices and keys), and whether the call's status told it (what is "
                "rejected) or a Generate stream's last event (what was accepted).",
                "errors",
                ("rpc", "code", "field", "sent_as"),
            )
        )
        self._unauthenticated = self.add(
            Counter(
                "openengine_unauthenticated_calls_total",
                "Calls turned away for want of a valid API key; they count nowhere else.",
                "calls",
            )
        ).cell()
        self._messages = self.add(
            Counter(
                "openengine_stream_messages_total",
                "Messages handed to gRPC on streams.",
                "messages",
                ("rpc",),
            )
        )
        self._first_token = self.add(
            Histogram(
                "openengine_time_to_first_token_seconds",
                "Time from a Generate call's whole request to its first event's being handed to "
                "gRPC.",
                "seconds",
                bounds=_FIRST_TOKEN_SECONDS,
            )
        ).cell()
        self._between_tokens = self.add(
            Histogram(
                "openengine_inter_token_latency_seconds",
                "Time between two times that a Generate stream hands events to gRPC, of whichever "
                "of its outputs; events of one time may hold several tokens.",
                "seconds",
                bounds=_BETWEEN_TOKENS_SECONDS,
            )
        ).cell()
        self._stalled = self.add(
            Counter(
                "openengine_stalled_clients_total",
                "Streams given up because their client did not read for --stall-timeout.",
                "streams",
                ("rpc",),
            )
        )
        self._outputs = self.add(
            Counter(
                "openengine_outputs_total",
                "Outputs of Generate requests that have ended, by finish reason; an output that "
                "never finished is unfinished.",
                "outputs",
                ("finish",),
            )
        )
        self._prompt_tokens = self.add(
            Counter(
                "openengine_prompt_tokens_total",
                "Prompt tokens of accepted requests that have ended.",
                "tokens",
            )
        ).cell()
        self._cached_tokens = self.add(
            Counter(
                "openengine_cached_prompt_tokens_total",
                "Prompt tokens from the prefix cache, of accepted requests that have ended.",
                "tokens",
            )
        ).cell()
        self._generated = 0
        self._streams: set[GenerationStream] = set()
        self.add(
            Reading(
                "openengine_generation_tokens_total",
                "Tokens generated, as far as their streams have taken them.",
                "tokens",
                lambda: self._generated + sum(stream.generated_tokens for stream in self._streams),
                counts=True,
            )
        )
        self._lag = self.add(
            Histogram(
                "openengine_event_loop_lag_seconds",
                "How late the event loop runs a callback that is due, sampled ten times a second.",
                "seconds",
                bounds=_LAG_SECONDS,
            )
        ).cell()

    def observed(self, rpc: str, run: Run) -> Run:
        """The same handler, counted."""
        in_flight = self._in_flight.cell(rpc)
        duration = self._durations.cell(rpc)

        async def counted(data: bytes, context: Any) -> Any:
            start = time.perf_counter()
            in_flight.value += 1
            code = "CANCELLED"
            try:
                answer = await run(data, context)
                code = "OK"
                return answer
            except Exception as raised:
                error = raised if isinstance(raised, errors.OpenEngineError) else errors.internal()
                code = error.status.name
                self._error(rpc, error, "status")
                raise
            finally:
                in_flight.value -= 1
                duration.observe(time.perf_counter() - start)
                self._calls.cell(rpc, code).value += 1

        return counted

    def _error(self, rpc: str, error: errors.OpenEngineError, sent_as: str) -> None:
        field = _IN_BRACKETS.sub("", error.field or "")
        self._errors.cell(rpc, error.code_name, field, sent_as).value += 1

    def stream(self, rpc: str) -> StreamCells:
        """Where the writers of an RPC's streams count."""
        between = self._between_tokens if rpc == "Generate" else None
        return StreamCells(self._messages.cell(rpc), self._stalled.cell(rpc), between)

    def turned_away(self) -> None:
        """Count a call without a valid key."""
        self._unauthenticated.value += 1

    def generation_began(self, stream: GenerationStream) -> None:
        """Count a stream's tokens from now on, until :meth:`generation_ended`."""
        self._streams.add(stream)

    def generation_ended(
        self, stream: GenerationStream, error: errors.OpenEngineError | None, ttft: float | None
    ) -> None:
        """Count an accepted request that has ended.

        Args:
            error: what its last event told.
            ttft: seconds to its first event.
        """
        self._streams.discard(stream)
        summary = stream.summary
        self._prompt_tokens.value += summary.prompt_tokens
        self._cached_tokens.value += summary.cached_tokens or 0
        self._generated += summary.completion_tokens
        for reason in summary.finish_reasons:
            self._outputs.cell("unfinished" if reason == "-" else reason).value += 1
        if ttft is not None:
            self._first_token.observe(ttft)
        if error is not None:
            self._error("Generate", error, "event")

    async def watch_loop(self) -> None:
        """Sample the event loop's lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_PERIOD_SECONDS
            await asyncio.sleep(_LAG_PERIOD_SECONDS)
            self._lag.observe(max(0.0, loop.time() - due))

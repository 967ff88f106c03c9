"""What is told of a request once it has ended: a line in the log and, where they are on, a span
and metrics.

Nothing here runs for a token. None of them tells anything of a prompt or an output.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import structlog
from grpc import StatusCode

from openengine_vllm import limits
from openengine_vllm.protocol.call_metadata import CallMetadata
from openengine_vllm.protocol.errors import OpenEngineError, internal
from openengine_vllm.protocol.trace_context import TraceContext

if TYPE_CHECKING:
    from openengine_vllm.engine.requests import GenerationPlan
    from openengine_vllm.engine.stream import GenerationStream, StreamSummary
    from openengine_vllm.engine.tracing import RequestSpan, Tracer
    from openengine_vllm.metrics.server_metrics import ServerMetrics

MAX_LOGGED_LENGTH = 256
"""Characters of an id, a model's name, or a metadata key or value in the log."""
MAX_LOGGED_METADATA = 2048
"""Characters of all metadata entries in the log, as JSON."""

_log = structlog.get_logger(__name__)

_FAULTS = frozenset(
    (
        StatusCode.UNKNOWN,
        StatusCode.DEADLINE_EXCEEDED,
        StatusCode.UNIMPLEMENTED,
        StatusCode.INTERNAL,
        StatusCode.UNAVAILABLE,
        StatusCode.DATA_LOSS,
    )
)
"""Statuses with which a server's span counts as failed."""

_SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")


class RequestRecord:
    """Follows one request from the handler's start to its end, as a context manager.

    Args:
        method: of the call, behind its service's full name and a slash.
        request_id, model, metadata: the request's own, not checked yet.
        caller: the caller's place in a trace.
        metrics: counts what a request comes to, if anybody does.
    """

    def __init__(
        self,
        method: str,
        request_id: str,
        model: str,
        metadata: Mapping[str, str],
        caller: TraceContext | None,
        metrics: ServerMetrics | None = None,
    ) -> None:
        self._metrics = metrics
        self._method = method
        self._rpc = method.rpartition("/")[2]
        self._request_id = request_id
        self._model = model
        self._metadata = metadata
        self._caller = caller
        self._priority: int | None = None
        self._rank: int | None = None
        self._routing_key: str | None = None
        self._span: RequestSpan | None = None
        self._stream: GenerationStream | None = None
        self._start = time.perf_counter()
        self._start_nanos = time.time_ns()
        self._first_event: float | None = None

    def trace(self, tracer: Tracer | None) -> None:
        """Start the request's span, if there is tracing."""
        if tracer is not None:
            self._span = tracer.start(self._method, self._caller, self._start_nanos)
            self._span.set({"rpc.system.name": "grpc", "rpc.method": self._method})

    def came_with(self, call: CallMetadata) -> None:
        """Note the call's metadata."""
        self._priority = call.priority
        self._rank = call.data_parallel_rank
        self._routing_key = call.routing_key

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """What makes the engine's span a child of this request's."""
        return None if self._span is None else self._span.headers

    def planned(self, plan: GenerationPlan, model: str) -> None:
        """Note a request that is valid, and the served name that it is for."""
        self._model = model
        self._priority = plan.priority or self._priority
        self._rank = plan.data_parallel_rank
        if self._span is not None:
            self._span.set(_asked(plan, self._model))

    def accepted(self, stream: GenerationStream) -> None:
        """Note that the engine has accepted the request."""
        self._stream = stream
        if self._metrics is not None:
            self._metrics.generation_began(stream)

    def answered(self) -> None:
        """Note that the first event is there to be written."""
        self._first_event = time.perf_counter()

    def __enter__(self) -> RequestRecord:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        duration = time.perf_counter() - self._start
        summary = None if self._stream is None else self._stream.summary
        outcome, status, error = _outcome(raised, summary)
        ttft = None
        if self._first_event is not None and summary is not None and summary.completion_tokens:
            ttft = self._first_event - self._start
        if self._metrics is not None and self._stream is not None:
            told = error if status is StatusCode.OK else None
            self._metrics.generation_ended(self._stream, told, ttft)
        if self._span is not None:
            self._end_span(self._span, status, error, summary, ttft)
        fields: dict[str, Any] = {
            "rpc": self._rpc,
            "request_id": _cut(self._request_id),
            "model": _cut(self._model),
            "priority": self._priority,
            "rank": self._rank,
            "routing_key": self._routing_key,
            "outcome": outcome,
            "status": status.name,
            "code": None if error is None else error.code_name,
            "field": None if error is None else error.field,
            "finish": None if summary is None else ",".join(summary.finish_reasons),
            **_tokens(summary),
            "ttft_ms": None if ttft is None else round(ttft * 1000, 1),
            "duration_ms": round(duration * 1000, 1),
            "trace_id": self._trace_id(),
            **logged_metadata(self._metadata),
        }
        _log.info("request", **{key: value for key, value in fields.items() if value is not None})

    def _trace_id(self) -> str | None:
        if self._span is not None:
            return self._span.trace_id
        return None if self._caller is None else self._caller.trace_id

    def _end_span(
        self,
        span: RequestSpan,
        status: StatusCode,
        error: OpenEngineError | None,
        summary: StreamSummary | None,
        ttft: float | None,
    ) -> None:
        attributes: dict[str, Any] = {
            "rpc.response.status_code": status.name,
            "gen_ai.response.id": _cut(self._request_id),
            "openengine.routing_key": self._routing_key,
        }
        if summary is not None:
            attributes |= {
                "gen_ai.response.model": self._model,
                "gen_ai.response.finish_reasons": list(summary.finish_reasons),
                "gen_ai.response.time_to_first_chunk": ttft,
                "gen_ai.usage.input_tokens": summary.prompt_tokens,
                "gen_ai.usage.output_tokens": summary.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": summary.cached_tokens,
                "gen_ai.usage.reasoning.output_tokens": summary.reasoning_tokens,
            }
        span.set({key: value for key, value in attributes.items() if value is not None})
        failed = error is not None and (self._stream is not None or status in _FAULTS)
        span.end(error.code_name if error is not None and failed else None)


def logged_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """A request's metadata map as log fields: JSON of the entries that there is room for."""
    if not metadata:
        return {}
    if len(metadata) > limits.MAX_METADATA_ENTRIES:  # refused, and too many to look at
        return {"metadata_left_out": len(metadata)}
    shown: dict[str, str] = {}
    size = 2
    for key in sorted(metadata):
        entry = {_cut(key): _cut(metadata[key])}
        size += len(json.dumps(entry))
        if size > MAX_LOGGED_METADATA:
            break
        shown |= entry
    fields: dict[str, Any] = {"metadata": json.dumps(shown)}
    if len(shown) < len(metadata):
        fields["metadata_left_out"] = len(metadata) - len(shown)
    return fields


def _outcome(
    raised: BaseException | None, summary: StreamSummary | None
) -> tuple[str, StatusCode, OpenEngineError | None]:
    """In one word how a request ended, its gRPC status, and its error, if it has one."""
    if isinstance(raised, asyncio.CancelledError):
        return "cancelled", StatusCode.CANCELLED, None
    if raised is not None:
        error = raised if isinstance(raised, OpenEngineError) else internal()
        return ("rejected" if summary is None else "failed"), error.status, error
    if summary is not None and summary.error is not None:
        return "failed", StatusCode.OK, summary.error
    if summary is not None and "cancelled" in summary.finish_reasons:
        return "aborted", StatusCode.OK, None
    return "ok", StatusCode.OK, None


def _tokens(summary: StreamSummary | None) -> dict[str, int | None]:
    if summary is None:
        return {}
    return {
        "prompt_tokens": summary.prompt_tokens,
        "completion_tokens": summary.completion_tokens,
        "cached_tokens": summary.cached_tokens,
        "reasoning_tokens": summary.reasoning_tokens,
    }


def _asked(plan: GenerationPlan, model: str) -> dict[str, Any]:
    """What a valid request asks for, in OpenTelemetry's names."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": model,
        "gen_ai.request.stream": True,
        "gen_ai.request.choice.count": plan.sequences if plan.sequences > 1 else None,
        "gen_ai.request.max_tokens": plan.max_tokens,
        "gen_ai.request.seed": plan.seed,
        "openengine.priority": plan.priority or None,
        "openengine.data_parallel_rank": plan.data_parallel_rank,
    }
    attributes |= {f"gen_ai.request.{name}": plan.sampling.get(name) for name in _SAMPLING}
    return {key: value for key, value in attributes.items() if value is not None}


def _cut(text: str) -> str:
    return text if len(text) <= MAX_LOGGED_LENGTH else text[:MAX_LOGGED_LENGTH] + "…"

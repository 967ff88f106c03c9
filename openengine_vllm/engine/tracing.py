"""Spans for requests, beside those that vLLM makes itself.

With ``--otlp-traces-endpoint`` vLLM sets OpenTelemetry's global tracer provider and its
exporter; this uses the same ones. Without that flag this module is not even imported.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TypeAlias

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from openengine_vllm.protocol.trace_context import TraceContext

_FLUSH_SECONDS = 3.0

Attributes: TypeAlias = Mapping[str, str | int | float | list[str]]


class RequestSpan:
    """One request's span: a child of the caller's, and the parent of vLLM's."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def headers(self) -> Mapping[str, str]:
        """What makes another span a child of this one."""
        context = self._span.get_span_context()
        return TraceContext(
            f"{context.trace_id:032x}",
            f"{context.span_id:016x}",
            context.trace_flags.sampled,
            context.trace_state.to_header(),
        ).headers()

    def set(self, attributes: Attributes) -> None:
        """Add to what the span tells."""
        self._span.set_attributes(dict(attributes))

    def end(self, error: str | None) -> None:
        """End the span; ``error`` is the kind of a failure of the server's."""
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()


class Tracer:
    """Starts spans, once vLLM's frontend is up."""

    def __init__(self) -> None:
        self._provider = trace.get_tracer_provider()
        self._tracer = self._provider.get_tracer("openengine_vllm")

    def start(self, name: str, parent: TraceContext | None, start_nanos: int) -> RequestSpan:
        """Start a server's span; ``start_nanos`` is when it began, since the epoch."""
        context = Context()
        if parent is not None:
            context = TraceContextTextMapPropagator().extract(parent.headers(), context)
        return RequestSpan(
            self._tracer.start_span(name, context, trace.SpanKind.SERVER, start_time=start_nanos)
        )

    def flush(self) -> None:
        """Send what has ended. Blocks for some seconds when nobody takes it."""
        flush = getattr(self._provider, "force_flush", None)
        if flush is not None:
            # The exporter retries for longer than a server's end may take.
            sending = threading.Thread(target=flush, name="trace-flush", daemon=True)
            sending.start()
            sending.join(_FLUSH_SECONDS)

"""A trace collector that keeps the spans it is sent: OTLP over gRPC, as small as can be."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from grpc import aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps all spans in the order of their arrival."""

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Take spans."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def in_trace(self, trace_id: str) -> dict[str, Span]:
        """The spans of one trace by their names, each of which is there once."""
        spans = [span for span in self.spans if span.trace_id.hex() == trace_id]
        named = {span.name: span for span in spans}
        assert len(named) == len(spans)
        return named


def attributes(span: Span) -> dict[str, Any]:
    """A span's attributes as plain values."""
    return {pair.key: _plain(pair.value) for pair in span.attributes}


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind)


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """A collector on a loopback port."""
    server = aio.server()
    result = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        result, server
    )
    result.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield result
    finally:
        await server.stop(None)

"""Drain: begin one, and tell its caller how far it is."""

from __future__ import annotations

from openengine_vllm.drain import Drain, Drains
from openengine_vllm.lifecycle import Lifecycle
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.services.handlers import Context
from openengine_vllm.services.stalls import StallWatch

_LONGEST_SILENCE_SECONDS = 1.0


class DrainService:
    """The Drain RPC."""

    def __init__(self, lifecycle: Lifecycle, drains: Drains, stalls: StallWatch) -> None:
        self._lifecycle = lifecycle
        self._drains = drains
        self._stalls = stalls

    async def drain(self, request: pb.DrainRequest, context: Context) -> None:
        """Drain; it goes on when the caller leaves."""
        _ = self._lifecycle.serving
        drain = await self._drains.begin(
            stop_accepting=request.stop_accepting_new_requests,
            deadline=request.deadline_ms / 1000 if request.HasField("deadline_ms") else None,
            abort_after_deadline=request.abort_after_deadline,
        )
        writer = self._stalls.open(context, "Drain")
        try:
            await writer.write([_state(pb.DRAIN_STATE_STARTED, drain)])
            while not drain.done:
                await writer.write([_state(pb.DRAIN_STATE_IN_PROGRESS, drain)])
                await drain.news(_LONGEST_SILENCE_SECONDS)
            await writer.write([_end(drain)])
        finally:
            writer.close()


def _state(state: pb.DrainState.ValueType, drain: Drain) -> bytes:
    return pb.DrainResponse(
        state=state, in_flight_requests=drain.in_flight, open_kv_sessions=0
    ).SerializeToString()


def _end(drain: Drain) -> bytes:
    if drain.error is None:
        return _state(pb.DRAIN_STATE_COMPLETE, drain)
    return pb.DrainResponse(
        error=errors.to_proto(drain.error), in_flight_requests=drain.in_flight, open_kv_sessions=0
    ).SerializeToString()

"""GenerateResponse messages as bytes, with all that does not change in a stream done once.

A streamed token costs one small message, so this is the hottest code of the server. Both
revisions of the schema give these events the same numbers; only EngineError differs.
"""

from __future__ import annotations

from collections.abc import Sequence

from openengine_vllm.protocol import v1 as pb


class GenerationEncoder:
    """Serialises the events of one Generate stream."""

    __slots__ = ("_request_id",)

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def token(self, index: int, tokens: Sequence[pb.TokenInfo], text: str) -> bytes:
        """A TokenOutput event."""
        return pb.GenerateResponse(
            request_id=self._request_id,
            token=pb.TokenOutput(output_index=index, tokens=tokens, text=text),
        ).SerializeToString()

    def finished(
        self,
        index: int,
        reason: pb.FinishReason.ValueType,
        stop_match: pb.StopMatch | None,
        usage: pb.Usage | None,
    ) -> bytes:
        """A GenerationFinished event; ``usage`` goes with the last one of the stream."""
        return pb.GenerateResponse(
            request_id=self._request_id,
            finished=pb.GenerationFinished(
                output_index=index, reason=reason, stop_match=stop_match
            ),
            usage=usage,
        ).SerializeToString()

    def error(self, error: pb.EngineError, usage: pb.Usage | None) -> bytes:
        """The terminal EngineError event."""
        return pb.GenerateResponse(
            request_id=self._request_id, error=error, usage=usage
        ).SerializeToString()

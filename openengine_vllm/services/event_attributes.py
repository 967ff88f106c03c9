"""What runtime events tell, by type: pure functions from figures to attributes."""

from __future__ import annotations

from collections.abc import Mapping

from openengine_vllm.engine.stats import ForwardPass, Step


def forward_pass(step: Step, ran: ForwardPass) -> dict[str, str]:
    """Of one pass through the model."""
    attributes = {
        "rank": str(step.rank),
        "prefill_requests": str(ran.prefill_requests),
        "prefill_tokens": str(ran.prefill_tokens),
        "decode_requests": str(ran.decode_requests),
        "decode_tokens": str(ran.decode_tokens),
    }
    if ran.iteration is not None:
        attributes["iteration"] = str(ran.iteration)
    if ran.milliseconds is not None:
        attributes["duration_ms"] = f"{ran.milliseconds:.3f}"
    return attributes


def batch(step: Step) -> dict[str, str]:
    """Of a batch that has changed its make-up."""
    attributes = {
        "rank": str(step.rank),
        "running_requests": str(step.running),
        "prefill_batch_size": str(step.prefill_batch),
        "decode_batch_size": str(step.decode_batch),
    }
    if step.total_blocks is not None:
        attributes["used_kv_blocks"] = str(step.used_blocks)
        attributes["total_kv_blocks"] = str(step.total_blocks)
    return attributes


def engine_queue(step: Step) -> dict[str, str]:
    """Of a scheduler's queue that has changed."""
    return {
        "queue": "engine",
        "rank": str(step.rank),
        "queued_requests": str(step.queued),
        "deferred_requests": str(step.deferred),
    }


def server_queue(requests: int, sequences: int) -> dict[str, str]:
    """Of requests that were admitted or have ended."""
    return {
        "queue": "server",
        "live_requests": str(requests),
        "live_sequences": str(sequences),
    }


def transfer(step: Step, transfers: Mapping[str, float]) -> dict[str, str]:
    """Of what the KV connector has moved."""
    figures = {f"connector.{name}": f"{value:.9g}" for name, value in transfers.items()}
    return {"rank": str(step.rank), **figures}

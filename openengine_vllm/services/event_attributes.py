"""What runtime events tell: figures of one kind that add up until they are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from openengine_vllm.engine.stats import ForwardPass, Step


class Telling(Protocol):
    """What one event is going to say."""

    @property
    def time_ns(self) -> int:
        """When the last of it happened, since the epoch."""

    @property
    def figures(self) -> object:
        """Equal for two events of which the second would say nothing new; None if there are none.

        Events that tell what happened, and not what is, always say something new.
        """

    def attributes(self) -> dict[str, str]:
        """As the event says it."""


class ForwardPasses:
    """Passes through the model of one rank, one or several in a row."""

    figures = None

    def __init__(self) -> None:
        self.time_ns = 0
        self._rank = self._passes = 0
        self._iteration: int | None = None
        self._milliseconds: float | None = None
        self._prefill_requests = self._prefill_tokens = 0
        self._decode_requests = self._decode_tokens = 0

    def add(self, step: Step, ran: ForwardPass) -> None:
        """Tell of one more."""
        self.time_ns = step.time_ns
        self._rank = step.rank
        self._passes += 1
        self._iteration = ran.iteration
        if ran.milliseconds is not None:
            self._milliseconds = (self._milliseconds or 0) + ran.milliseconds
        self._prefill_requests += ran.prefill_requests
        self._prefill_tokens += ran.prefill_tokens
        self._decode_requests += ran.decode_requests
        self._decode_tokens += ran.decode_tokens

    def attributes(self) -> dict[str, str]:
        """Sums over the passes, and the number of the last one."""
        attributes = {
            "rank": str(self._rank),
            "passes": str(self._passes),
            "prefill_requests": str(self._prefill_requests),
            "prefill_tokens": str(self._prefill_tokens),
            "decode_requests": str(self._decode_requests),
            "decode_tokens": str(self._decode_tokens),
        }
        if self._iteration is not None:
            attributes["iteration"] = str(self._iteration)
        if self._milliseconds is not None:
            attributes["duration_ms"] = f"{self._milliseconds:.3f}"
        return attributes


class Transfers:
    """What the KV connector of one rank has moved."""

    figures = None

    def __init__(self) -> None:
        self.time_ns = 0
        self._rank = 0
        self._sums: Counter[str] = Counter()

    def add(self, step: Step, transfers: Mapping[str, float]) -> None:
        """Tell of more."""
        self.time_ns = step.time_ns
        self._rank = step.rank
        for name, value in transfers.items():
            self._sums[name] += value  # type: ignore[assignment]  # a Counter adds any numbers

    def attributes(self) -> dict[str, str]:
        """Sums of the connector's figures."""
        figures = {f"connector.{name}": f"{value:.9g}" for name, value in self._sums.items()}
        return {"rank": str(self._rank), **figures}


class Batch:
    """The make-up of a rank's batch."""

    def __init__(self, step: Step) -> None:
        self.time_ns = step.time_ns
        self.figures = (step.running, step.prefill_batch, step.decode_batch)
        self._step = step

    def attributes(self) -> dict[str, str]:
        """Of the last step."""
        step = self._step
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


class EngineQueue:
    """A scheduler's queue."""

    def __init__(self, step: Step) -> None:
        self.time_ns = step.time_ns
        self.figures = (step.queued, step.deferred)
        self._step = step

    def attributes(self) -> dict[str, str]:
        """Of the last step."""
        return {
            "queue": "engine",
            "rank": str(self._step.rank),
            "queued_requests": str(self._step.queued),
            "deferred_requests": str(self._step.deferred),
        }


class ServerQueue:
    """The server's live requests."""

    def __init__(self, time_ns: int, requests: int, sequences: int) -> None:
        self.time_ns = time_ns
        self.figures = (requests, sequences)

    def attributes(self) -> dict[str, str]:
        """As they are."""
        requests, sequences = self.figures
        return {
            "queue": "server",
            "live_requests": str(requests),
            "live_sequences": str(sequences),
        }

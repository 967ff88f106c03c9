"""What `top` knows of a server: its last answers, how they changed, and whether it answers.

No clock and no connection here: the feed brings both, and the screen reads what came of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import grpc

from openengine_vllm.client.commands.running import describe
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError

HISTORY_SECONDS: Final = 300
"""How far back the curves go."""
KEPT_EVENTS: Final = 500
"""Events that can be scrolled back to."""


class Link(Enum):
    """Whether the server answers."""

    CONNECTING = "connecting"
    UP = "up"
    AWAY = "away"
    """Nobody answers."""
    REFUSED = "refused"
    """It wants another API key."""
    FAILED = "failed"
    """It answers with an error of another kind."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one moment; None for what the engine doesn't report."""

    at: float
    """Seconds since the epoch."""
    generation: float | None
    """Tokens per second."""
    prompt: float | None
    """Tokens per second."""
    queued: int | None


@dataclass(slots=True)
class Monitor:
    """One server, as it looked when it last answered."""

    link: Link = Link.CONNECTING
    since: float = 0.0
    """When `link` became what it is, in seconds since the epoch."""
    problem: str = ""
    """What the last call said if it failed."""
    engine: pb.EngineInfo | None = None
    health: pb.HealthResponse | None = None
    load: pb.LoadInfo | None = None
    history: deque[Sample] = field(default_factory=deque)
    """Oldest first, up to HISTORY_SECONDS."""
    events: deque[pb.RuntimeEvent] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    """Oldest first."""
    events_seen: int = 0
    events_problem: str = ""
    """Why there are no events at the moment."""

    def answered(
        self,
        health: pb.HealthResponse | None,
        engine: pb.EngineInfo | None,
        load: pb.LoadInfo | None,
        at: float,
    ) -> None:
        """Takes a round of answers; None for what the engine doesn't have, or not yet."""
        self._turn(Link.UP, at)
        self.problem = ""
        self.health, self.engine, self.load = health, engine, load
        if load is not None:
            self.history.append(_sample(load, at))
        self._forget(at)

    def failed(self, error: OpenEngineError, at: float) -> None:
        """Takes the error that a round ended with. The last figures stay, as the last ones."""
        self._turn(_LINKS.get(error.status, Link.FAILED), at)
        self.problem = describe(error)
        self._forget(at)

    def happened(self, event: pb.RuntimeEvent) -> None:
        """Takes a runtime event."""
        self.events.append(event)
        self.events_seen += 1

    def _turn(self, link: Link, at: float) -> None:
        if self.link is not link:
            self.link, self.since = link, at

    def _forget(self, at: float) -> None:
        while self.history and self.history[0].at <= at - HISTORY_SECONDS:
            self.history.popleft()


_LINKS: Final = {
    grpc.StatusCode.UNAVAILABLE: Link.AWAY,
    grpc.StatusCode.DEADLINE_EXCEEDED: Link.AWAY,
    grpc.StatusCode.UNAUTHENTICATED: Link.REFUSED,
    grpc.StatusCode.PERMISSION_DENIED: Link.REFUSED,
}


def number(load: pb.LoadInfo, attribute: str) -> float | None:
    """A figure that an engine reports as text, or None where it doesn't."""
    try:
        return float(load.attributes[attribute]) if attribute in load.attributes else None
    except ValueError:
        return None


def _sample(load: pb.LoadInfo, at: float) -> Sample:
    return Sample(
        at=at,
        generation=number(load, "generation_tokens_per_second"),
        prompt=number(load, "prompt_tokens_per_second"),
        queued=load.queued_requests if load.HasField("queued_requests") else None,
    )

"""Metrics of what the server and its services keep anyway, looked up when somebody asks."""

from __future__ import annotations

from openengine_vllm import __version__
from openengine_vllm.lifecycle import Lifecycle
from openengine_vllm.metrics.instruments import Reading
from openengine_vllm.metrics.server_metrics import ServerMetrics
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.registry import RequestRegistry
from openengine_vllm.services.runtime_events import RuntimeEventsService
from openengine_vllm.services.stalls import StallWatch

_STATES = (
    pb.HEALTH_STATE_STARTING,
    pb.HEALTH_STATE_READY,
    pb.HEALTH_STATE_DRAINING,
    pb.HEALTH_STATE_NOT_READY,
)


def add_readings(
    metrics: ServerMetrics,
    instance_id: str,
    lifecycle: Lifecycle,
    registry: RequestRegistry,
    stalls: StallWatch,
    events: RuntimeEventsService,
) -> None:
    """Have the server's state shown."""

    def states() -> dict[tuple[str, ...], float]:
        return {(_name(state),): float(state == lifecycle.state) for state in _STATES}

    for reading in (
        Reading(
            "openengine_info",
            "Always 1; its labels say who answers.",
            "",
            lambda: {(__version__, instance_id): 1},
            ("version", "instance_id"),
        ),
        Reading(
            "openengine_health_state", "1 for the state that Health tells.", "", states, ("state",)
        ),
        Reading(
            "openengine_live_sequences",
            "Outputs of live requests, which is what --max-concurrent-requests bounds.",
            "sequences",
            lambda: registry.sequences,
        ),
        Reading(
            "openengine_max_live_sequences",
            "Value of --max-concurrent-requests.",
            "sequences",
            lambda: registry.capacity,
        ),
        Reading(
            "openengine_slow_clients",
            "Streams whose client has not taken a message for more than 1 s.",
            "streams",
            lambda: stalls.slow,
        ),
        Reading(
            "openengine_runtime_events_subscribers",
            "Calls of SubscribeRuntimeEvents that run.",
            "calls",
            lambda: events.subscribers,
        ),
        Reading(
            "openengine_runtime_events_lag",
            "Events that the subscriber who is furthest behind has not looked at.",
            "events",
            lambda: events.lag,
        ),
        Reading(
            "openengine_runtime_events_total",
            "Events made; none are while nobody subscribes.",
            "events",
            lambda: events.published,
            counts=True,
        ),
        Reading(
            "openengine_runtime_events_dropped_subscribers_total",
            "Subscribers ended because they were further behind than events are kept.",
            "calls",
            lambda: events.fallen_behind,
            counts=True,
        ),
    ):
        metrics.add(reading)


def _name(state: pb.HealthState.ValueType) -> str:
    return pb.HealthState.Name(state).removeprefix("HEALTH_STATE_")

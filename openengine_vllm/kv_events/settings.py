"""The flags on KV events. Imports no ZMQ: help has to come at once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from openengine_vllm.flag_values import byte_count, port, positive

RETAINED_BATCHES = 10_000
RETAINED_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """What is kept and published again."""

    retain_batches: int = RETAINED_BATCHES
    """Batches kept for each rank, at the most."""
    retain_bytes: int = RETAINED_BYTES
    """And their bytes together."""
    zmq_host: str = "127.0.0.1"
    """Address of our own ZMQ sockets."""
    zmq_port: int = 0
    """Port of rank 0's PUB socket, to which other ranks add their number; 0 for free ones."""
    zmq_replay_port: int = 0
    """Likewise of the replay sockets."""
    zmq_topic: str = ""
    """Topic of our own batches."""


@dataclass(frozen=True, slots=True)
class KvEventSettings:
    """What the operator asked of KV events."""

    enabled: bool
    bridge: BridgeSettings


def add_kv_event_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the switch, and the flags of the bridge."""
    group = add_bridge_arguments(parser)
    group.add_argument(
        "--kv-events",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="have vLLM tell what enters and leaves the prefix cache; --kv-events-config, which is "
        "vLLM's, says otherwise how (on, for a generative model with prefix caching)",
    )


def add_bridge_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags on what is kept and published again."""
    group = parser.add_argument_group("KV events", "what is cached, for routers")
    group.add_argument(
        "--kv-retain-batches",
        type=positive,
        default=RETAINED_BATCHES,
        metavar="N",
        help=f"batches of each rank that can be replayed ({RETAINED_BATCHES})",
    )
    group.add_argument(
        "--kv-retain-bytes",
        type=byte_count,
        default=RETAINED_BYTES,
        metavar="N",
        help="their bytes together; whichever is reached first holds (64 MiB)",
    )
    group.add_argument(
        "--kv-zmq-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address on which the batches are published over ZMQ as well (127.0.0.1)",
    )
    group.add_argument(
        "--kv-zmq-port",
        type=port,
        default=0,
        metavar="PORT",
        help="of rank 0's PUB socket; other ranks add their number, as in vLLM; 0 picks free ones, "
        "which kv-sources shows (0)",
    )
    group.add_argument(
        "--kv-zmq-replay-port",
        type=port,
        default=0,
        metavar="PORT",
        help="likewise of the replay sockets (0)",
    )
    group.add_argument(
        "--kv-zmq-topic", default="", metavar="TOPIC", help="of the batches over ZMQ (empty)"
    )
    return group


def bridge_settings(namespace: argparse.Namespace) -> BridgeSettings:
    """What the flags of :func:`add_bridge_arguments` mean."""
    return BridgeSettings(
        retain_batches=namespace.kv_retain_batches,
        retain_bytes=namespace.kv_retain_bytes,
        zmq_host=namespace.kv_zmq_host,
        zmq_port=namespace.kv_zmq_port,
        zmq_replay_port=namespace.kv_zmq_replay_port,
        zmq_topic=namespace.kv_zmq_topic,
    )


def kv_event_settings(namespace: argparse.Namespace) -> KvEventSettings:
    """What the flags of :func:`add_kv_event_arguments` mean."""
    return KvEventSettings(namespace.kv_events, bridge_settings(namespace))

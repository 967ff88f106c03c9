"""Where one rank's KV events can be had: over gRPC, from our ZMQ sockets, from vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator

from openengine_vllm.kv_events.bridge import Rank
from openengine_vllm.kv_events.endpoints import TcpEndpoint, advertised, parse_tcp
from openengine_vllm.kv_events.republisher import HWM
from openengine_vllm.kv_events.settings import BridgeSettings
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.revision import SCHEMA_REVISION

GRPC, ZMQ, TCP = "grpc", "zmq", "tcp"


def rank_sources(
    rank: Rank, settings: BridgeSettings, address: str, advertise_host: str | None
) -> Iterator[pb.KvEventSource]:
    """The sources of one rank, the best one first.

    Args:
        address: where the gRPC server is bound: ``host:port``, or ``unix:PATH``, which no
            host and port can tell.
        advertise_host: stands for whatever is bound but the loopback interface.
    """
    number = rank.feed.rank
    grpc_source = pb.KvEventSource(
        transport=GRPC,
        encoding="protobuf",
        data_parallel_rank=number,
        schema_version=SCHEMA_REVISION,
        buffer_steps=settings.retain_batches,
    )
    if (endpoint := advertised(f"tcp://{address}", advertise_host)) is not None:
        grpc_source.endpoint_addr.CopyFrom(_endpoint(endpoint, GRPC))
    yield grpc_source
    own = rank.republisher
    source = _zmq_source(str(own.endpoint), str(own.replay_endpoint), advertise_host)
    if source is not None:
        source.MergeFrom(
            pb.KvEventSource(
                encoding="protobuf",
                topic=settings.zmq_topic,
                data_parallel_rank=number,
                schema_version=SCHEMA_REVISION,
                buffer_steps=settings.retain_batches,
                hwm=HWM,
            )
        )
        yield source
    publisher = rank.source.publisher
    if publisher.binds:
        return
    source = _zmq_source(
        publisher.bound or publisher.endpoint,
        publisher.bound_replay or publisher.replay,
        advertise_host,
    )
    if source is not None:
        source.MergeFrom(
            pb.KvEventSource(
                encoding="msgpack",
                topic=publisher.topic,
                data_parallel_rank=number,
                buffer_steps=publisher.buffer_steps,
                hwm=publisher.hwm,
                max_queue_size=publisher.max_queue_size,
            )
        )
        yield source


def _zmq_source(
    bound: str, replay: str | None, advertise_host: str | None
) -> pb.KvEventSource | None:
    """Transport and addresses; None for a socket that has no host and port."""
    endpoint = advertised(bound, advertise_host)
    if endpoint is None:
        return None
    source = pb.KvEventSource(transport=ZMQ, endpoint_addr=_endpoint(endpoint, TCP))
    if replay is not None and parse_tcp(replay) is not None:
        source.replay_endpoint = str(advertised(replay, advertise_host))
    return source


def _endpoint(endpoint: TcpEndpoint, protocol: str) -> pb.KvEndpoint:
    return pb.KvEndpoint(host=endpoint.host, port=endpoint.port, protocol=protocol)

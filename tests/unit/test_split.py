"""Inference and Control over real connections, on an engine whose output the test decides."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.unknown_fields import UnknownFieldSet
from google.rpc import status_pb2
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2
from vllm.v1.engine.exceptions import EngineDeadError

from openengine_vllm.protocol import split
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.call_metadata import TOLD_RANK_KEY
from openengine_vllm.protocol.errors import STATUS_DETAILS_KEY
from openengine_vllm.protocol.revision import OPENENGINE, REVISIONS, SPLIT
from openengine_vllm.protocol.split.service_pb2_grpc import ControlStub, InferenceStub
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub
from openengine_vllm.registry import EndReason
from tests.support.calls import standard_status
from tests.support.field_client import is_callers_fault
from tests.support.kv_messages import removed, stored
from tests.support.kv_publisher import publishers
from tests.unit.kv_service import kv_service
from tests.unit.live_server import live_server
from tests.unit.scripted_engine import Service, serve

SECONDS = 60
SERVING = health_pb2.HealthCheckResponse.SERVING


def asked(request_id: str = "r", **fields: Any) -> split.GenerateRequest:
    return split.GenerateRequest(
        request_id=request_id, token_ids=split.TokenIds(ids=[1, 2]), **fields
    )


def generate(service: Service, request: split.GenerateRequest, **metadata: str) -> Any:
    pairs = tuple((key.replace("_", "-"), value) for key, value in metadata.items())
    return InferenceStub(service.channel).Generate(request, timeout=SECONDS, metadata=pairs)


async def refusal(call: Any) -> tuple[aio.AioRpcError, split.EngineError]:
    """The status of a refused call, and its detail in this revision's form."""
    with pytest.raises(aio.AioRpcError) as caught:
        await (call.read() if hasattr(call, "read") else call)
    trailers = dict(caught.value.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers[STATUS_DETAILS_KEY])
    error = split.EngineError()
    assert status.details[0].Unpack(error)
    assert not len(UnknownFieldSet(error))
    return caught.value, error


async def test_a_stream() -> None:
    async with serve() as service:
        call = generate(service, asked())
        (collector,) = await service.engine.accepted("r")
        collector.put("a")
        collector.put("b.", "stop")
        events = [event async for event in call]

        assert "".join(event.token.text for event in events) == "ab"
        assert all(event.request_id == "r" for event in events)
        assert [event.HasField("usage") for event in events] == [False] * (len(events) - 1) + [True]
        assert await call.code() is StatusCode.OK


async def test_an_error_on_the_stream_has_three_fields() -> None:
    async with serve() as service:
        call = generate(service, asked())
        await service.engine.accepted("r")
        entry = service.registry.find("r")
        assert entry is not None
        entry.end(EndReason.DRAINED)
        *_, last = [event async for event in call]

        assert last.error.code == split.ERROR_CODE_DRAINING
        assert last.error.retryable
        assert not len(UnknownFieldSet(last.error))
        assert last.HasField("usage")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stopping": split.StoppingOptions(max_tokens=0)}, "stopping.max_tokens"),
        ({"kv": split.KvOptions.FromString(b"\x22\x01s")}, "kv"),
        ({"kv": split.KvOptions.FromString(b"\x18\x01")}, "kv"),
    ],
)
async def test_a_refusal_has_three_fields(fields: dict[str, Any], field: str) -> None:
    async with serve() as service:
        error, detail = await refusal(generate(service, asked(**fields)))

        assert error.code() is StatusCode.INVALID_ARGUMENT
        assert detail.code == split.ERROR_CODE_INVALID_ARGUMENT
        assert detail.message == error.details()
        assert field in detail.message
        assert service.engine.collectors == {}


async def test_a_starting_server_is_unavailable_and_says_three_things() -> None:
    async with serve(ready=False) as service:
        for call in (
            generate(service, asked()),
            ControlStub(service.channel).GetServerInfo(split.GetServerInfoRequest()),
            ControlStub(service.channel).GetLoad(split.GetLoadRequest()),
        ):
            error, detail = await refusal(call)
            assert error.code() is StatusCode.UNAVAILABLE
            assert detail.retryable


async def test_what_another_worker_may_try() -> None:
    """A full queue, a drain and a dead engine; a fault of the caller's own is none of these."""
    async with serve(capacity=1) as service:
        generate(service, asked())
        await service.engine.accepted("r")

        async def refused() -> split.EngineError:
            error, detail = await refusal(generate(service, asked("other")))
            assert not is_callers_fault(error)
            assert detail.retryable
            return detail

        assert (await refused()).code == split.ERROR_CODE_OVERLOADED
        service.lifecycle.drain()
        assert (await refused()).code == split.ERROR_CODE_DRAINING
        health = await ControlStub(service.channel).Health(split.HealthRequest())
        assert health.state == split.HEALTH_STATE_DRAINING
        service.lifecycle.fail()
        assert (await refused()).code == split.ERROR_CODE_INTERNAL
        health = await ControlStub(service.channel).Health(split.HealthRequest())
        assert health.state == split.HEALTH_STATE_NOT_READY


async def test_a_dying_engine_ends_the_stream() -> None:
    """With a terminal event: a stream that ends without one is fatal to the whole worker."""
    async with serve() as service:
        call = generate(service, asked())
        (collector,) = await service.engine.accepted("r")
        collector.put("a")
        collector.break_(EngineDeadError())
        *_, last = [event async for event in call]
        assert last.request_id == "r"
        assert last.error.retryable
        assert last.HasField("usage")
        assert await call.code() is StatusCode.OK


async def test_metadata_says_what_the_body_cannot() -> None:
    async with serve() as service:
        call = generate(
            service, asked(), openengine_priority="7", openengine_target_dp_rank="0", other="x"
        )
        await service.engine.accepted("r")
        assert service.engine.plan.priority == 7
        assert service.engine.plan.data_parallel_rank == 0
        assert await told_rank(call) == "0"
        call.cancel()
        for metadata in (
            {"openengine_priority": ""},
            {"openengine_priority": "x"},
            {"openengine_target_dp_rank": "-1"},
            {"openengine_target_dp_rank": "5"},
        ):
            error, _ = await refusal(generate(service, asked("other"), **metadata))
            assert error.code() is StatusCode.INVALID_ARGUMENT


async def told_rank(call: Any) -> Any:
    """What an answer says at once about the rank that was asked for; None if nothing."""
    return dict(tuple(await call.initial_metadata())).get(TOLD_RANK_KEY)


async def test_a_bypass_that_reads_as_a_rank_is_not_silent() -> None:
    """Off, it reads as 0, which every engine has; on, as 1, which those of several ranks have."""
    async with serve() as service:
        contract = OpenEngineStub(service.channel)
        for bypass, told in ((False, "0"), (None, None)):
            twin = pb.GenerateRequest(request_id=f"{told}", token_ids=pb.TokenIds(ids=[1]))
            meant = split.KvOptions(bypass_prefix_cache=bypass)
            twin.kv.MergeFromString(meant.SerializeToString())
            call = contract.Generate(twin, timeout=SECONDS)
            (collector,) = await service.engine.accepted(f"{told}")
            if told is None:
                collector.put("a", "length")
            assert await told_rank(call) == told
            call.cancel()


async def test_extra_reaches_the_plan() -> None:
    request = asked()
    request.extra.update({"logit_bias": {"3": 5}, "anything": [1]})
    async with serve() as service:
        generate(service, request)
        await service.engine.accepted("r")
        assert service.engine.plan.sampling["logit_bias"] == {3: 5.0}


async def test_one_namespace_of_requests_for_both_revisions() -> None:
    async with serve() as service:
        generate(service, asked())
        await service.engine.accepted("r")
        contract = OpenEngineStub(service.channel)
        twin = pb.GenerateRequest(request_id="r", token_ids=pb.TokenIds(ids=[1]))
        with pytest.raises(aio.AioRpcError) as caught:
            await contract.Generate(twin, timeout=SECONDS).read()
        assert caught.value.code() is StatusCode.ALREADY_EXISTS
        aborted = await ControlStub(service.channel).Abort(split.AbortRequest(request_id="r"))
        assert aborted.status == split.ABORT_STATUS_ABORTED
        again = await contract.Abort(pb.AbortRequest(request_id="r"))
        assert again.status == pb.ABORT_STATUS_ALREADY_FINISHED


async def test_discovery_and_load() -> None:
    async with serve() as service:
        control = ControlStub(service.channel)
        info = await control.GetServerInfo(split.GetServerInfoRequest())
        assert info.engine_name == "scripted"
        assert info.schema_release == SPLIT.schema_release
        assert info.parallelism.decode_context_parallel_size == 1
        assert info.capacity.max_loras == 0
        model = await control.GetModelInfo(split.GetModelInfoRequest(model="alias"))
        assert "logit_bias" in json_format.MessageToDict(model.extra)["generate_extra"]
        load = await control.GetLoad(split.GetLoadRequest(include_per_rank=True))
        assert load.instance_id == "instance"
        assert load.HasField("running_requests")
        assert [rank.data_parallel_rank for rank in load.ranks] == [0]
        assert set(load.attributes.fields)
        health = await control.Health(split.HealthRequest())
        assert health.state == split.HEALTH_STATE_READY
        error, _ = await refusal(control.ListLoras(split.ListLorasRequest()))
        assert error.code() is StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("name", ["Drain", "SubscribeRuntimeEvents", "GetEngineInfo", "Embed"])
async def test_what_is_gone_is_not_there(name: str) -> None:
    async with serve() as service:
        for prefix in SPLIT.services:
            call: Any = service.channel.unary_unary(f"/{prefix}/{name}")
            with pytest.raises(aio.AioRpcError) as caught:
                await call(b"")
            assert caught.value.code() is StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("flag", "served"), [("openengine", [OPENENGINE]), ("split", [SPLIT]), ("split,openengine", [])]
)
async def test_which_revisions_are_served(flag: str, served: list[Any]) -> None:
    async with (
        live_server("--services", flag) as live,
        aio.insecure_channel(live.address) as channel,
    ):
        for revision in REVISIONS.values():
            is_served = not served or revision in served
            control = revision.services[-1]
            call: Any = channel.unary_unary(f"/{control}/GetLoad")
            if is_served:
                await call(b"")
                assert await standard_status(channel, control) == SERVING
                continue
            for refused, status in (
                (call(b""), StatusCode.UNIMPLEMENTED),
                (standard_status(channel, control), StatusCode.NOT_FOUND),
            ):
                with pytest.raises(aio.AioRpcError) as caught:
                    await refused
                assert caught.value.code() is status


async def test_kv_events_in_the_form_of_the_revision() -> None:
    async with (
        publishers() as [publisher],
        kv_service([publisher.described()]) as kv,
        aio.insecure_channel(kv.target) as channel,
    ):
        control: Any = ControlStub(channel)
        sources = (await control.GetKvEventSources(split.GetKvEventSourcesRequest())).sources
        assert [(source.transport, source.encoding) for source in sources] == [("grpc", "protobuf")]
        call = control.SubscribeKvEvents(split.SubscribeKvEventsRequest(), timeout=SECONDS)
        await call.initial_metadata()
        await publisher.subscribed()
        publisher.publish(stored([1, 2]))
        publisher.publish(stored([3], extra_keys=[["salt"]]))
        publisher.publish(removed([2]))
        batches = [(await call.read()).batch for _ in range(3)]
        assert [batch.sequence_number for batch in batches] == [0, 1, 2]
        block = batches[0].events[0].block_stored
        assert [(one.value, one.encoding) for one in block.block_hashes] == [
            (b"1", "decimal_int64"),
            (b"2", "decimal_int64"),
        ]
        assert not batches[1].events
        # Another reader, from a number that is kept, and one with a snapshot.
        later = control.SubscribeKvEvents(
            split.SubscribeKvEventsRequest(start_sequence_number=2), timeout=SECONDS
        )
        assert (await later.read()).batch == batches[2]
        joined = control.SubscribeKvEvents(
            split.SubscribeKvEventsRequest(include_snapshot=True), timeout=SECONDS
        )
        snapshot = (await joined.read()).batch
        assert snapshot.sequence_number == 2
        assert [
            one.value for event in snapshot.events for one in event.block_stored.block_hashes
        ] == [b"1"]

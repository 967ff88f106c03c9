"""One table of scenarios, run over the stubs of both revisions on one server: equal answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from google.protobuf import json_format
from grpc import StatusCode, aio

from openengine_vllm.protocol import split
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.split.service_pb2_grpc import ControlStub, InferenceStub
from openengine_vllm.protocol.translation import copy_shared
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub
from tests.engine.peers import Peer
from tests.engine.streams import Generation, gather
from tests.engine.test_load import idle
from tests.support.calls import ENDLESS_TOKENS, PATIENCE_SECONDS, eventually

TOKENS = 24


@dataclass
class Speaker:
    """One revision: its messages, and the stubs that serve them."""

    messages: Any
    inference: Any
    control: Any

    def request(self, request_id: str, fields: dict[str, Any]) -> Any:
        """A request of this revision, with these fields as JSON has them."""
        return json_format.ParseDict(
            {"requestId": request_id, "tokenIds": {"ids": list(range(20, 32))}, **fields},
            self.messages.GenerateRequest(),
        )

    async def generate(self, request: Any) -> Generation:
        """The whole stream, which has to keep the contract's rules."""

        async def events() -> AsyncIterator[pb.GenerateResponse]:
            async for response in self.inference.Generate(request, timeout=PATIENCE_SECONDS):
                event = pb.GenerateResponse()
                copy_shared(response, event)
                yield event

        wanted = pb.GenerateRequest()
        copy_shared(request, wanted)
        return await gather(events(), wanted)


@dataclass
class Both:
    """The two on one server."""

    contract: Speaker
    split: Speaker

    def speakers(self) -> tuple[Speaker, Speaker]:
        """In turn."""
        return self.contract, self.split


async def last_of(call: Any) -> Any:
    """The last response of a call that succeeds."""
    last = None
    while (response := await call.read()) is not aio.EOF:
        last = response
    return last


@pytest.fixture
def both(operated: Peer) -> Both:
    channel = operated.channel
    contract = OpenEngineStub(channel)
    return Both(
        Speaker(pb, contract, contract),
        Speaker(split, InferenceStub(channel), ControlStub(channel)),
    )


GREEDY: dict[str, Any] = {
    "sampling": {"temperature": 0.0},
    "stopping": {"maxTokens": TOKENS, "ignoreEos": True},
}
SEEDED: dict[str, Any] = {**GREEDY, "sampling": {"temperature": 1.0, "seed": 11}}
GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "text": {**GREEDY, "tokenIds": None, "prompt": "The quick brown fox"},
    "n": {**SEEDED, "sampling": {**SEEDED["sampling"], "numSequences": 3}},
    "logprobs": {
        **GREEDY,
        "response": {
            "returnPromptLogprobs": True,
            "promptCandidates": {"topN": 2},
            "returnOutputLogprobs": True,
            "outputCandidates": {"topN": 4},
        },
    },
    "listed candidates": {
        **GREEDY,
        "response": {"outputCandidates": {"tokenIds": {"ids": [300, 8, 999]}}},
    },
    "penalties": {
        **SEEDED,
        "sampling": {**SEEDED["sampling"], "presencePenalty": 1.5, "topK": 50, "topP": 0.9},
    },
    "stop token": {
        **SEEDED,
        "stopping": {
            "maxTokens": 400,
            "conditions": [{"stopTokenId": token_id} for token_id in range(7, 263)],
        },
    },
    "stop text": {
        **SEEDED,
        "stopping": {
            "maxTokens": 400,
            "ignoreEos": True,
            "conditions": [{"stopText": text} for text in "aeiou"],
            "includeStopInOutput": True,
        },
    },
    "choice": {**SEEDED, "stopping": {}, "guided": {"choice": {"choices": ["fox", "a dog"]}}},
    "regex": {**GREEDY, "stopping": {"maxTokens": 9}, "guided": {"regex": "(fox|dog)+"}},
    "json": {
        **SEEDED,
        "stopping": {"maxTokens": 60},
        "guided": {"jsonSchema": '{"type": "array", "items": {"type": "boolean"}}'},
    },
}


@pytest.mark.parametrize("name", GENERATIONS)
async def test_generations_are_equal(both: Both, name: str) -> None:
    one, other = [
        await speaker.generate(speaker.request(f"equal {name}", GENERATIONS[name]))
        for speaker in both.speakers()
    ]
    assert one.outputs
    for output, twin in zip(one.outputs, other.outputs, strict=True):
        assert output.token_ids == twin.token_ids
        assert output.text == twin.text
        assert output.records == twin.records
        assert (output.finish, output.stop_match) == (twin.finish, twin.stop_match)
    assert one.prompt == other.prompt
    assert one.usage == other.usage
    if name.startswith("stop") or name in ("choice", "json"):
        assert {output.finish for output in one.outputs} == {"STOP"}


async def test_discovery_says_the_same(both: Both) -> None:
    engine = await both.contract.control.GetEngineInfo(pb.GetEngineInfoRequest())
    info = await both.split.control.GetServerInfo(split.GetServerInfoRequest())
    shared = pb.EngineInfo()
    copy_shared(info, shared)
    shared.role = pb.EngineRole.ValueType(info.engine_role)
    shared.parallelism.CopyFrom(engine.parallelism)
    shared.schema_release = engine.schema_release
    assert info.schema_release != engine.schema_release
    assert shared == engine
    name = engine.supported_models[0]
    model, twin = [
        await speaker.control.GetModelInfo(speaker.messages.GetModelInfoRequest(model=name))
        for speaker in both.speakers()
    ]
    shared_model = pb.ModelInfo()
    copy_shared(twin, shared_model)
    copy_shared(info.capacity, shared_model)
    for number in (field.name for field, _ in shared_model.ListFields()):
        assert getattr(shared_model, number) == getattr(model, number)
    assert {"kv_block_size", "generation", "max_context_length"} <= {
        field.name for field, _ in shared_model.ListFields()
    }


async def test_health_and_load_say_the_same(both: Both, operated: Peer) -> None:
    await eventually(lambda: idle(operated), "idle")
    health, twin = [
        await speaker.control.Health(speaker.messages.HealthRequest(include_inference_probe=True))
        for speaker in both.speakers()
    ]
    assert health.state == pb.HEALTH_STATE_READY
    assert health.SerializeToString() == twin.SerializeToString()
    load, load_twin = [
        await speaker.control.GetLoad(speaker.messages.GetLoadRequest(include_per_rank=True))
        for speaker in both.speakers()
    ]
    assert dict(load.attributes) == dict(load_twin.attributes)
    assert [rank.SerializeToString() for rank in load.ranks] == [
        rank.SerializeToString() for rank in load_twin.ranks
    ]
    for name in (f.name for f, _ in load.ListFields() if f.name not in ("attributes", "ranks")):
        if name != "timestamp_unix_nanos":
            assert getattr(load, name) == getattr(load_twin, name)


async def test_cancelled_and_aborted(both: Both, operated: Peer) -> None:
    endless = {**SEEDED, "stopping": {"maxTokens": ENDLESS_TOKENS, "ignoreEos": True}}
    for speaker, other in (both.speakers(), both.speakers()[::-1]):
        call = speaker.inference.Generate(speaker.request("cancelled", endless))
        await call.read()
        call.cancel()
        await eventually(lambda: idle(operated), "idle")
        # Either can abort what the other began.
        for aborting in (speaker, other):
            call = speaker.inference.Generate(speaker.request("aborted", endless))
            first = await call.read()
            assert first.request_id == "aborted"
            abort = aborting.messages.AbortRequest(request_id="aborted")
            answer = await aborting.control.Abort(abort)
            assert answer.status == pb.ABORT_STATUS_ABORTED
            last = await last_of(call)
            assert last.finished.reason == pb.FINISH_REASON_CANCELLED
            assert last.HasField("usage")
            again = await aborting.control.Abort(abort)
            assert again.status == pb.ABORT_STATUS_ALREADY_FINISHED
            with pytest.raises(aio.AioRpcError) as caught:
                await aborting.control.Abort(
                    aborting.messages.AbortRequest(request_id="never seen")
                )
            assert caught.value.code() is StatusCode.NOT_FOUND
        await eventually(lambda: idle(operated), "idle again")


async def test_kv_events_are_of_the_same_blocks(both: Both) -> None:
    info = await both.split.control.GetServerInfo(split.GetServerInfoRequest())
    block = info.capacity.kv_block_size
    calls = []
    for speaker in both.speakers():
        calls.append(
            speaker.control.SubscribeKvEvents(
                speaker.messages.SubscribeKvEventsRequest(), timeout=PATIENCE_SECONDS
            )
        )
        await calls[-1].initial_metadata()
    ids = [900 - index for index in range(2 * block + 1)]
    request = both.split.request("kv", {**GREEDY, "tokenIds": {"ids": ids}})
    await both.split.generate(request)
    stored: list[Any] = []
    while sum(len(told[0].block_hashes) for told in stored) < 2:
        one, other = [(await call.read()).batch for call in calls]
        assert (one.sequence_number, one.timestamp_unix_nanos, one.data_parallel_rank) == (
            other.sequence_number,
            other.timestamp_unix_nanos,
            other.data_parallel_rank,
        )
        for event, twin in zip(one.events, other.events, strict=True):
            if event.HasField("block_stored"):
                stored.append((event.block_stored, twin.block_stored))
    assert [token for told, _ in stored for token in told.token_ids] == ids[: 2 * block]
    for told, twin in stored:
        assert list(told.token_ids) == list(twin.token_ids)
        assert [
            int.from_bytes(each.value[-8:], "big", signed=True) for each in told.block_hashes
        ] == [int(each.value) for each in twin.block_hashes]
    for call in calls:
        call.cancel()

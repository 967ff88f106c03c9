"""The client that forgives nothing takes offence at each thing that it is there to find."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from grpc import StatusCode, aio

from openengine_vllm.protocol import split
from tests.support.field_client import (
    DeviationError,
    FieldClient,
    KvReader,
    is_callers_fault,
    read_stream,
)

BLOCK = 4
REQUEST = split.GenerateRequest(request_id="r", sampling=split.SamplingParams(num_sequences=2))


def token(index: int | None = 0, **fields: Any) -> split.GenerateResponse:
    part = split.TokenOutput(tokens=[split.TokenInfo(token_id=5)], text="a")
    if index is not None:
        part.output_index = index
    return split.GenerateResponse(**{"request_id": "r", "token": part, **fields})


def finished(index: int | None = 0, *, reason: Any = 1, **fields: Any) -> split.GenerateResponse:
    part = split.GenerationFinished(reason=reason)
    if index is not None:
        part.output_index = index
    return split.GenerateResponse(**{"request_id": "r", "finished": part, **fields})


USAGE = split.Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
GOOD = (token(), finished(), token(1), finished(1, usage=USAGE))


async def read(events: Sequence[split.GenerateResponse]) -> Any:
    async def stream() -> AsyncIterator[split.GenerateResponse]:
        for event in events:
            yield event

    return await read_stream(stream(), REQUEST)


async def test_a_good_stream() -> None:
    answer = await read(GOOD)
    assert [output.token_ids for output in answer.outputs.values()] == [[5], [5]]


@pytest.mark.parametrize(
    "events",
    [
        (),
        GOOD[:-1],
        (*GOOD, token(1)),
        (*GOOD[:3], finished(1)),
        (token(usage=USAGE), *GOOD[1:]),
        (token(request_id="other"), *GOOD[1:]),
        (token(request_id=""), *GOOD[1:]),
        (token(None), *GOOD[1:]),
        (token(2), *GOOD[1:]),
        (token(), finished(None), *GOOD[2:]),
        (token(), finished(), token(), *GOOD[2:]),
        (token(), finished(), finished(), *GOOD[2:]),
        (token(), finished(reason=0), *GOOD[2:]),
        (*GOOD[:3], finished(1, usage=split.Usage(prompt_tokens=1, total_tokens=3))),
        (split.GenerateResponse(request_id="r"), *GOOD),
        (split.GenerateResponse(request_id="r", prefill_ready=split.PrefillReady()), *GOOD),
        (split.GenerateResponse(request_id="r", error=split.EngineError()),),
    ],
    ids=lambda events: str(len(events)),
)
async def test_a_stream_that_breaks_a_rule(events: Sequence[split.GenerateResponse]) -> None:
    with pytest.raises(DeviationError):
        await read(events)


def hashed(text: str, encoding: str = "decimal_int64") -> split.KvBlockHash:
    return split.KvBlockHash(value=text.encode(), encoding=encoding)


def stored(*texts: str, **fields: Any) -> split.KvEvent:
    return split.KvEvent(
        block_stored=split.BlockStored(
            **{
                "block_hashes": [hashed(text) for text in texts],
                "token_ids": range(BLOCK * len(texts)),
                "block_size": BLOCK,
                "medium": split.STORAGE_MEDIUM_GPU,
                **fields,
            }
        )
    )


def removed(*texts: str, **fields: Any) -> split.KvEvent:
    return split.KvEvent(
        block_removed=split.BlockRemoved(
            **{
                "block_hashes": [hashed(text) for text in texts],
                "medium": split.STORAGE_MEDIUM_GPU,
                **fields,
            }
        )
    )


def follow(*batches: Sequence[split.KvEvent], first: int = 0, rank: int = 0) -> KvReader:
    reader = KvReader("nowhere", 0, BLOCK)
    for number, events in enumerate(batches, first):
        reader.take(
            split.KvEventBatch(sequence_number=number, data_parallel_rank=rank, events=events)
        )
    return reader


def test_good_batches() -> None:
    reader = follow(
        [stored("1", "-2")],
        [],
        [stored("9", parent_block_hash=hashed("-2"), token_ids=[7, 7, 7, 7])],
        [removed("1")],
        first=3,
    )
    assert (set(reader.blocks), reader.last) == ({-2, 9}, 6)
    assert reader.cached(range(BLOCK)) == 0
    reader.take(
        split.KvEventBatch(
            sequence_number=7,
            events=[split.KvEvent(all_blocks_cleared=split.AllBlocksCleared()), stored("5")],
        )
    )
    assert reader.chains() == {(0, 1, 2, 3)}
    assert reader.cached([0, 1, 2, 3, 4]) == BLOCK


@pytest.mark.parametrize(
    "event",
    [
        split.KvEvent(),
        stored(),
        stored("1", block_hashes=[hashed("1", "int64")]),
        stored("01"),
        stored("+1"),
        stored("-0"),
        stored("x"),
        stored(str(2**63)),
        stored("1", "1"),
        stored("1", block_size=BLOCK + 1, token_ids=range(BLOCK + 1)),
        stored("1", token_ids=range(BLOCK - 1)),
        stored("1", parent_block_hash=hashed("2")),
        stored("1", kv_cache_spec_kind="full_attention"),
        stored("1", kv_cache_spec_sliding_window=5),
        stored("1", extra_keys=[split.OpaqueKeyTuple()]),
        stored("1", lora_name="adapter"),
        stored("1", medium=split.STORAGE_MEDIUM_CPU_PINNED),
        stored("1", group_idx=1),
        removed(),
        removed("1"),
    ],
)
def test_an_event_that_it_cannot_read(event: split.KvEvent) -> None:
    with pytest.raises(DeviationError):
        follow([event])


def test_numbers_and_ranks() -> None:
    reader = follow([], [])
    for number in (0, 1, 3):
        with pytest.raises(DeviationError):
            reader.take(split.KvEventBatch(sequence_number=number))
    with pytest.raises(DeviationError):
        follow([], rank=1)


def test_parts_of_a_snapshot_have_one_number() -> None:
    reader = KvReader("nowhere", 0, BLOCK)
    part = split.KvEventBatch(sequence_number=5)
    following = split.KvEventBatch(sequence_number=6)
    assert reader.take(part, snapshot=True)
    assert reader.take(part, snapshot=True)
    assert not reader.take(following, snapshot=True)
    with pytest.raises(DeviationError):
        reader.take(following)


def test_statuses_that_it_knows() -> None:
    def error(status: StatusCode) -> aio.AioRpcError:
        return aio.AioRpcError(status, aio.Metadata(), aio.Metadata())

    assert is_callers_fault(error(StatusCode.FAILED_PRECONDITION))
    assert not is_callers_fault(error(StatusCode.UNAVAILABLE))
    with pytest.raises(DeviationError):
        is_callers_fault(error(StatusCode.INTERNAL))


GOOD_INFO = split.ServerInfo(
    schema_release="4" * 40,
    engine_role=split.ENGINE_ROLE_AGGREGATED,
    instance_id="i",
    schema_revision=1,
    minimum_client_revision=1,
    supported_models=["m"],
    capacity=split.DeploymentCapacity(
        kv_block_size=BLOCK, total_kv_blocks=9, max_running_requests=3
    ),
)
GOOD_MODEL = split.ModelInfo(
    served_model_name="m", supports_token_ids_input=True, max_context_length=9
)
GOOD_LOAD = split.LoadInfo(
    running_requests=0,
    used_kv_blocks=1,
    total_kv_blocks=9,
    ranks=[split.RankLoadInfo(data_parallel_rank=0, used_kv_blocks=1, total_kv_blocks=9)],
)


class Control:
    """Answers as it is told to."""

    def __init__(self) -> None:
        self.info = split.ServerInfo.FromString(GOOD_INFO.SerializeToString())
        self.model = split.ModelInfo.FromString(GOOD_MODEL.SerializeToString())
        self.load = split.LoadInfo.FromString(GOOD_LOAD.SerializeToString())
        self.health = split.HealthResponse(state=split.HEALTH_STATE_READY)
        self.sources = split.GetKvEventSourcesResponse()
        self.adapters: StatusCode | None = StatusCode.FAILED_PRECONDITION

    def __getattr__(self, name: str) -> Any:
        answers = {
            "GetServerInfo": lambda: self.info,
            "GetModelInfo": lambda: self.model,
            "GetLoad": lambda: self.load,
            "Health": lambda: self.health,
            "GetKvEventSources": lambda: self.sources,
            "ListLoras": self._adapters,
        }

        async def call(request: object, **_: object) -> Any:
            return answers[name]()

        return call

    def _adapters(self) -> split.ListLorasResponse:
        if self.adapters is not None:
            raise aio.AioRpcError(self.adapters, aio.Metadata(), aio.Metadata())
        return split.ListLorasResponse()


@pytest.fixture
async def channel() -> AsyncIterator[aio.Channel]:
    async with aio.insecure_channel("127.0.0.1:1") as channel:
        yield channel


async def test_a_good_server(channel: aio.Channel) -> None:
    await FieldClient(channel, Control()).register()


Spoil = Callable[[Control], object]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: setattr(c.info, "schema_release", "main"),
        lambda c: setattr(c.info, "schema_release", "4" * 39),
        lambda c: setattr(c.info, "engine_role", 0),
        lambda c: setattr(c.info, "minimum_client_revision", 2),
        lambda c: c.info.ClearField("capacity"),
        lambda c: c.info.ClearField("supported_models"),
        lambda c: c.model.ClearField("supports_token_ids_input"),
        lambda c: setattr(c.model, "supports_token_ids_input", False),
        lambda c: c.model.ClearField("max_context_length"),
        lambda c: setattr(c.model, "served_model_name", "other"),
        lambda c: setattr(c.health, "state", split.HEALTH_STATE_DEGRADED),
        lambda c: c.load.ClearField("running_requests"),
        lambda c: setattr(c.load, "used_kv_blocks", 10),
        lambda c: setattr(c.load.ranks[0], "used_kv_blocks", 10),
        lambda c: c.load.ranks[0].ClearField("used_kv_blocks"),
        lambda c: c.load.ClearField("ranks"),
        lambda c: setattr(c, "adapters", None),
        lambda c: setattr(c, "adapters", StatusCode.UNIMPLEMENTED),
    ],
)
async def test_a_server_that_it_does_not_register(channel: aio.Channel, spoil: Spoil) -> None:
    control = Control()
    spoil(control)
    with pytest.raises(DeviationError):
        await FieldClient(channel, control).register()


def source(rank: int = 0, host: str = "127.0.0.1", **fields: Any) -> split.KvEventSource:
    return split.KvEventSource(
        **{
            "transport": "grpc",
            "encoding": "protobuf",
            "data_parallel_rank": rank,
            "endpoint_addr": split.KvEndpoint(host=host, port=7, protocol="grpc"),
            **fields,
        }
    )


@pytest.mark.parametrize(
    "sources",
    [
        [],
        [source(1)],
        [source(), source()],
        [source(transport="zmq", encoding="protobuf")],
        [source(transport="zmq", encoding="msgpack")],
        [source(host="0.0.0.0")],
        [source(host="")],
        [source(endpoint_addr=None)],
    ],
)
async def test_sources_that_it_does_not_follow(
    channel: aio.Channel, sources: list[split.KvEventSource]
) -> None:
    control = Control()
    client = FieldClient(channel, control)
    await client.register()
    control.sources.sources.extend(sources)
    with pytest.raises(DeviationError):
        await client.follow(snapshot=False)

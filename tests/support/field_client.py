"""A client of Inference and Control as they are in the field, which forgives nothing.

It takes offence, with :class:`DeviationError`, at everything that such clients are known to
turn away from. It knows nothing of this project but the messages of its revision.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio

from openengine_vllm.protocol import split
from openengine_vllm.protocol.split.service_pb2_grpc import ControlStub, InferenceStub
from tests.support.calls import eventually

INT64 = range(-(2**63), 2**63)
SECONDS = 120
"""Patience with any one call."""
_RELEASE = re.compile(r"[0-9a-f]{32}|[0-9a-f]{40}")
_DECIMAL = re.compile(r"0|-?[1-9][0-9]*", re.ASCII)
_WILDCARDS = {"", "*", "0.0.0.0", "::", "[::]"}


class DeviationError(AssertionError):
    """The server did what a client in the field can't live with."""


def require(condition: object, what: str) -> None:
    """Raises DeviationError unless the condition holds."""
    if not condition:
        raise DeviationError(what)


def is_callers_fault(error: aio.AioRpcError) -> bool:
    """Whether a refusal ends the request, rather than sending it to another worker."""
    match error.code():
        case (
            grpc.StatusCode.INVALID_ARGUMENT
            | grpc.StatusCode.NOT_FOUND
            | grpc.StatusCode.FAILED_PRECONDITION
            | grpc.StatusCode.UNIMPLEMENTED
            | grpc.StatusCode.ALREADY_EXISTS
        ):
            return True
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.RESOURCE_EXHAUSTED:
            return False
        case other:
            raise DeviationError(f"a refusal with {other}: {error.details()}")


@dataclass
class Output:
    """One output of a request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    reason: split.FinishReason.ValueType | None = None


@dataclass
class Answer:
    """A request's whole stream."""

    outputs: dict[int, Output]
    usage: split.Usage

    @property
    def only(self) -> Output:
        """The output of a request with one."""
        [output] = self.outputs.values()
        return output


class FieldClient:
    """One worker's engine, as it sees it.

    Args:
        control: stands in for Control's stub.
    """

    def __init__(self, channel: aio.Channel, control: Any = None) -> None:
        self._inference = InferenceStub(channel)
        self._control: ControlStub = control or ControlStub(channel)
        self.ranks: range
        self.block_size = 0
        self.context = 0
        self.model = ""

    async def register(self) -> None:
        """All that is asked before a worker says that it is there."""
        info = await self._control.GetServerInfo(split.GetServerInfoRequest(), timeout=SECONDS)
        require(_RELEASE.fullmatch(info.schema_release), f"release {info.schema_release!r}")
        require(info.engine_role != split.ENGINE_ROLE_UNSPECIFIED, "no role")
        require(info.engine_role == split.ENGINE_ROLE_AGGREGATED, f"role {info.engine_role}")
        require(info.instance_id, "no instance id")
        require(info.minimum_client_revision <= 1 <= info.schema_revision, "the revision")
        require(info.HasField("capacity"), "no capacity")
        for name in ("kv_block_size", "total_kv_blocks", "max_running_requests"):
            require(getattr(info.capacity, name) > 0, f"capacity.{name}")
        require(info.supported_models, "no model")
        first = info.parallelism.data_parallel_start_rank
        self.ranks = range(first, first + (info.parallelism.data_parallel_size or 1))
        self.block_size = info.capacity.kv_block_size
        self.model = info.supported_models[0]
        for name in info.supported_models:
            await self._check_model(name)
        await self.check_health()
        await self.check_load()
        await self.check_adapters()

    async def _check_model(self, name: str) -> None:
        model = await self._control.GetModelInfo(
            split.GetModelInfoRequest(model=name), timeout=SECONDS
        )
        require(name in (model.served_model_name, *model.served_model_aliases), "another model")
        require(model.HasField("supports_token_ids_input"), "supports_token_ids_input is absent")
        require(model.supports_token_ids_input, "supports_token_ids_input is false")
        require(model.HasField("max_context_length"), "max_context_length is absent")
        require(model.max_context_length > 0, "max_context_length")
        self.context = model.max_context_length

    async def check_health(self) -> None:
        """Anything but READY takes a worker out."""
        health = await self._control.Health(split.HealthRequest(), timeout=SECONDS)
        state = split.HealthState.Name(health.state)
        require(health.state == split.HEALTH_STATE_READY, f"{state}: {health.checks}")

    async def check_load(self) -> split.LoadInfo:
        """The load, with one part for every rank."""
        load = await self._control.GetLoad(
            split.GetLoadRequest(include_per_rank=True), timeout=SECONDS
        )
        require(load.HasField("running_requests"), "running_requests is absent")
        require(load.used_kv_blocks <= load.total_kv_blocks, "more blocks used than there are")
        told = [rank.data_parallel_rank for rank in load.ranks]
        require(told == list(self.ranks), f"load of the ranks {told}")
        for rank in load.ranks:
            for name in ("data_parallel_rank", "used_kv_blocks", "total_kv_blocks"):
                require(rank.HasField(name), f"{name} of a rank is absent")
            require(rank.used_kv_blocks <= rank.total_kv_blocks, "more used than there are")
        return load

    async def check_adapters(self) -> None:
        """An engine without adapters says so in a way that isn't tried again."""
        try:
            await self._control.ListLoras(split.ListLorasRequest(), timeout=SECONDS)
        except aio.AioRpcError as error:
            require(error.code() is grpc.StatusCode.FAILED_PRECONDITION, f"{error.code()}")
        else:
            raise DeviationError("adapters are off, and listed")

    async def generate(self, request: split.GenerateRequest) -> Answer:
        """One request to its end.

        Raises:
            DeviationError: the stream breaks a rule, or says that the request failed.
            AioRpcError: it was refused.
        """
        return await read_stream(self._inference.Generate(request, timeout=SECONDS), request)

    async def refused(self, request: split.GenerateRequest) -> aio.AioRpcError:
        """The refusal of a request that has to be refused before any event."""
        try:
            async for event in self._inference.Generate(request, timeout=SECONDS):
                raise DeviationError(f"not refused: {event}")
        except aio.AioRpcError as error:
            return error
        raise DeviationError("neither refused nor answered")

    async def drop(self, request: split.GenerateRequest, events: int) -> None:
        """Lose interest in a request after so many events, and abort it for certain."""
        call = self._inference.Generate(request, timeout=SECONDS)
        for _ in range(events):
            event = await call.read()
            require(isinstance(event, split.GenerateResponse), "ended before it was dropped")
        call.cancel()
        await self.abort(request.request_id)

    async def abort(self, request_id: str) -> None:
        """What follows every dropped stream; the engine may have forgotten the id already."""
        try:
            answer = await self._control.Abort(
                split.AbortRequest(request_id=request_id), timeout=SECONDS
            )
        except aio.AioRpcError as error:
            require(error.code() is grpc.StatusCode.NOT_FOUND, f"{error.code()}")
        else:
            require(answer.status != split.ABORT_STATUS_UNSPECIFIED, "no status")

    async def follow(self, *, snapshot: bool) -> list[KvReader]:
        """A reader of every rank's KV events, each at its own source.

        Args:
            snapshot: begin with what is cached; otherwise nothing is taken to be.
        """
        answer = await self._control.GetKvEventSources(
            split.GetKvEventSourcesRequest(), timeout=SECONDS
        )
        told = [source.data_parallel_rank for source in answer.sources]
        require(told == list(self.ranks), f"sources of the ranks {told}")
        readers = []
        for source in answer.sources:
            way = (source.transport, source.encoding)
            require(way in {("grpc", "protobuf"), ("zmq", "msgpack")}, f"a source of {way}")
            require(way[0] == "grpc", f"Control offers {way}")
            address = source.endpoint_addr
            require(address.host not in _WILDCARDS, f"the host {address.host!r}")
            require(0 < address.port < 2**16, f"the port {address.port}")
            reader = KvReader(
                f"{address.host}:{address.port}", source.data_parallel_rank, self.block_size
            )
            await reader.begin(snapshot=snapshot)
            readers.append(reader)
        return readers


async def read_stream(
    events: AsyncIterable[split.GenerateResponse], request: split.GenerateRequest
) -> Answer:
    """Read a stream to its end.

    Raises:
        DeviationError: it breaks a rule, or says that the request failed.
    """
    outputs: dict[int, Output] = {}
    expected = request.sampling.num_sequences or 1
    usage: split.Usage | None = None
    async for event in events:
        require(usage is None, f"an event after the last one: {event}")
        require(event.request_id == request.request_id, f"the id {event.request_id!r}")
        kind = event.WhichOneof("event")
        if kind == "error":
            raise DeviationError(f"failed: {event.error}")
        if kind == "prompt":
            continue
        require(kind in ("token", "finished"), f"the event {kind}")
        part = event.token if kind == "token" else event.finished
        require(part.HasField("output_index"), "output_index is absent")
        require(part.output_index < expected, f"output {part.output_index}")
        output = outputs.setdefault(part.output_index, Output())
        require(output.reason is None, f"output {part.output_index} goes on after its end")
        if kind == "token":
            for token in event.token.tokens:
                output.token_ids.append(token.token_id)
                if token.HasField("logprob"):
                    output.logprobs.append(token.logprob)
            output.text += event.token.text
        else:
            require(event.finished.reason != split.FINISH_REASON_UNSPECIFIED, "no reason")
            output.reason = event.finished.reason
        ended = sum(output.reason is not None for output in outputs.values()) == expected
        require(event.HasField("usage") == ended, "usage is on the last event alone")
        if ended:
            usage = event.usage
    if usage is None:
        raise DeviationError("the stream ended without its last event")
    counted = usage.prompt_tokens + usage.completion_tokens
    require(usage.total_tokens == counted, f"{usage.total_tokens} tokens in all, not {counted}")
    return Answer(outputs, usage)


class KvReader:
    """One rank's KV events, followed for as long as the worker lives.

    Args:
        target: where its source is.
        rank: whose events.
        block_size: tokens in a block, as the capacity says.
        adapters: those that are loaded.
    """

    def __init__(
        self, target: str, rank: int, block_size: int, adapters: Collection[str] = ()
    ) -> None:
        self._target = target
        self._rank = rank
        self._block_size = block_size
        self._adapters = adapters
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """The cached blocks by hash: parent and tokens."""
        self.last: int | None = None
        """Number of the last batch."""
        self.stored = 0
        self.removed = 0
        self._reading: asyncio.Future[None] | None = None

    async def begin(self, *, snapshot: bool) -> None:
        """Subscribe; the server answers before there is anything to tell."""
        channel = aio.insecure_channel(self._target)
        call = ControlStub(channel).SubscribeKvEvents(
            split.SubscribeKvEventsRequest(
                data_parallel_ranks=[self._rank], include_snapshot=snapshot
            )
        )
        try:
            await asyncio.wait_for(call.initial_metadata(), SECONDS)
        except BaseException:
            await channel.close()
            raise
        self._reading = asyncio.ensure_future(self._read(channel, call, snapshot))

    async def _read(
        self,
        channel: aio.Channel,
        call: aio.UnaryStreamCall[split.SubscribeKvEventsRequest, split.SubscribeKvEventsResponse],
        snapshot: bool,
    ) -> None:
        async with channel:
            async for response in call:
                require(response.WhichOneof("event") == "batch", f"told: {response}")
                snapshot = self.take(response.batch, snapshot=snapshot)
        raise DeviationError("the stream of KV events ended")

    def check(self) -> None:
        """Raise what the reader has taken offence at."""
        if self._reading is not None and self._reading.done():
            self._reading.result()

    async def reach(self, number: int) -> None:
        """Wait until a batch has come; raises as :meth:`check`."""

        def is_there() -> bool:
            self.check()
            return self.last is not None and self.last >= number

        await eventually(is_there, f"batch {number}")

    async def leave(self) -> None:
        """Stop reading.

        Raises:
            DeviationError: something was wrong until now.
        """
        self.check()
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading

    def take(self, batch: split.KvEventBatch, *, snapshot: bool = False) -> bool:
        """Follow a batch; returns whether the next one may be of the same snapshot.

        Raises:
            DeviationError: it does not follow what was there, or can't be read.
        """
        number = batch.sequence_number
        first = self.last is None
        part = snapshot and number == self.last
        require(
            self.last is None or part or number == self.last + 1,
            f"the batch {number} after {self.last}",
        )
        require(batch.data_parallel_rank == self._rank, f"rank {batch.data_parallel_rank}")
        self.last = number
        for event in batch.events:
            match event.WhichOneof("event"):
                case "block_stored":
                    self._store(event.block_stored)
                case "block_removed":
                    removed = event.block_removed
                    require(removed.block_hashes, "nothing is removed")
                    _check_place(removed.medium, removed.group_idx)
                    for value in map(_number, removed.block_hashes):
                        require(value in self.blocks, f"{value} is removed, and was not there")
                        del self.blocks[value]
                        self.removed += 1
                case "all_blocks_cleared":
                    self.blocks.clear()
                case other:
                    raise DeviationError(f"the KV event {other}")
        return snapshot and (first or part)

    def _store(self, stored: split.BlockStored) -> None:
        size = stored.block_size
        require(size == self._block_size, f"blocks of {size} tokens")
        require(stored.block_hashes, "nothing is stored")
        require(len(stored.token_ids) == size * len(stored.block_hashes), "tokens are missing")
        require(not stored.kv_cache_spec_kind, f"the kind {stored.kv_cache_spec_kind}")
        require(not stored.kv_cache_spec_sliding_window, "a window")
        require(not stored.extra_keys, "extra keys")
        adapter = stored.lora_name
        require(adapter in ("", *self._adapters), f"the adapter {adapter!r}")
        require((stored.lora_id > 0) == bool(adapter), f"the adapter {stored.lora_id}")
        _check_place(stored.medium, stored.group_idx)
        parent = None
        if stored.HasField("parent_block_hash"):
            parent = _number(stored.parent_block_hash)
            require(parent in self.blocks, f"the parent {parent} is not there")
        for index, value in enumerate(map(_number, stored.block_hashes)):
            require(value not in self.blocks, f"{value} is stored, and was there")
            self.blocks[value] = parent, tuple(stored.token_ids[index * size : (index + 1) * size])
            self.stored += 1
            parent = value

    def chains(self) -> set[tuple[int, ...]]:
        """All cached prefixes, each by its tokens."""
        prefixes: dict[int | None, tuple[int, ...] | None] = {None: ()}

        def prefix(value: int | None) -> tuple[int, ...] | None:
            if value not in prefixes:
                prefixes[value] = None
                if value in self.blocks:
                    parent, tokens = self.blocks[value]
                    before = prefix(parent)
                    prefixes[value] = None if before is None else before + tokens
            return prefixes[value]

        return {whole for value in self.blocks if (whole := prefix(value)) is not None}

    def cached(self, token_ids: Sequence[int]) -> int:
        """How many of a prompt's first tokens are cached."""
        chains, length = self.chains(), 0
        while (
            length + self._block_size <= len(token_ids)
            and tuple(token_ids[: length + self._block_size]) in chains
        ):
            length += self._block_size
        return length


def _check_place(medium: split.StorageMedium.ValueType, group: int) -> None:
    require(medium == split.STORAGE_MEDIUM_GPU, f"the medium {medium}")
    require(group == 0, f"the group {group}")


def _number(block_hash: split.KvBlockHash) -> int:
    require(block_hash.encoding == "decimal_int64", f"a hash in {block_hash.encoding!r}")
    text = block_hash.value.decode("ascii")
    require(_DECIMAL.fullmatch(text), f"the hash {text!r}")
    value = int(text)
    require(value in INT64, f"the hash {text}")
    return value

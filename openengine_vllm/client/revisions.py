"""How a server is spoken to in each revision of the schema, with the contract's messages.

The client knows one set of RPCs, those of the contract. Over the split revision's services they
are translated here, and what the server speaks is found out here where nobody says it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Final, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2
from grpc import aio

from openengine_vllm.protocol import split, split_messages
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import STATUS_DETAILS_KEY, OpenEngineError, from_rpc_error
from openengine_vllm.protocol.revision import (
    CONTROL_NAME,
    INFERENCE_NAME,
    OPENENGINE,
    REVISIONS,
    SERVICE_NAME,
    SPLIT,
)
from openengine_vllm.protocol.split.service_pb2_grpc import ControlStub
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub

AUTO: Final = "auto"
"""Stands for the revision that the server turns out to speak."""

CHOICES: Final = (AUTO, *REVISIONS)
"""What a client can be told to speak."""

Metadata = tuple[tuple[str, str], ...]

_AWAY: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

_Request_contra = TypeVar("_Request_contra", bound=Message, contravariant=True)
_Response_co = TypeVar("_Response_co", bound=Message, covariant=True)
_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class NotInRevisionError(OpenEngineError):
    """An RPC of the contract that the revision which is spoken has not. No call was made."""

    def __init__(self, rpc: str, revision: str) -> None:
        super().__init__(
            pb.ERROR_CODE_UNSUPPORTED_FEATURE,
            f"the {revision} revision has no {rpc}",
            details={"rpc": rpc},
            status=grpc.StatusCode.UNIMPLEMENTED,
        )


class Unary(Protocol[_Request_contra, _Response_co]):
    """An RPC that answers once."""

    def __call__(
        self,
        request: _Request_contra,
        *,
        timeout: float | None,
        metadata: Metadata,
        wait_for_ready: bool | None,
    ) -> Awaitable[_Response_co]: ...


class Call(Protocol[_Response_co]):
    """A stream that runs."""

    def __aiter__(self) -> AsyncIterator[_Response_co]: ...

    def cancel(self) -> bool:
        """Ends it, unless it has ended."""


class Streaming(Protocol[_Request_contra, _Response_co]):
    """An RPC that streams its responses."""

    def __call__(
        self,
        request: _Request_contra,
        *,
        timeout: float | None,
        metadata: Metadata,
        wait_for_ready: bool | None,
    ) -> Call[_Response_co]: ...


class SplitRpcs:
    """The contract's RPCs, as far as the split revision has them, over its services.

    Responses that differ from the contract's in their EngineError alone, which has but a part of
    the fields, are read as they are.
    """

    def __init__(self, channel: aio.Channel) -> None:
        self._channel = channel
        self._control = ControlStub(channel)
        self._generate: aio.UnaryStreamMultiCallable[split.GenerateRequest, pb.GenerateResponse] = (
            channel.unary_stream(
                f"/{INFERENCE_NAME}/Generate",
                split.GenerateRequest.SerializeToString,
                pb.GenerateResponse.FromString,
            )
        )
        self.Generate = self._run_generate
        self.GetEngineInfo = self._get_engine_info
        self.GetModelInfo = self._get_model_info
        self.GetLoad = self._get_load
        self.Health = self._alike("Health", pb.HealthRequest, pb.HealthResponse)
        self.Abort = self._alike("Abort", pb.AbortRequest, pb.AbortResponse)
        self.LoadLora = self._alike("LoadLora", pb.LoadLoraRequest, pb.LoadLoraResponse)
        self.UnloadLora = self._alike("UnloadLora", pb.UnloadLoraRequest, pb.UnloadLoraResponse)
        self.ListLoras = self._alike("ListLoras", pb.ListLorasRequest, pb.ListLorasResponse)
        self.GetKvEventSources = self._alike(
            "GetKvEventSources", pb.GetKvEventSourcesRequest, pb.GetKvEventSourcesResponse
        )
        self.SubscribeKvEvents: aio.UnaryStreamMultiCallable[
            pb.SubscribeKvEventsRequest, pb.SubscribeKvEventsResponse
        ] = channel.unary_stream(
            f"/{CONTROL_NAME}/SubscribeKvEvents",
            pb.SubscribeKvEventsRequest.SerializeToString,
            pb.SubscribeKvEventsResponse.FromString,
        )

    def __getattr__(self, rpc: str) -> NoReturn:
        if rpc in pb.SERVICE.methods_by_name:
            raise NotInRevisionError(rpc, SPLIT.name)
        raise AttributeError(rpc)

    def _alike(
        self, rpc: str, request: type[_Request], response: type[_Response]
    ) -> aio.UnaryUnaryMultiCallable[_Request, _Response]:
        return self._channel.unary_unary(
            f"/{CONTROL_NAME}/{rpc}", request.SerializeToString, response.FromString
        )

    def _run_generate(
        self, request: pb.GenerateRequest, *, metadata: Metadata, **call: Any
    ) -> Call[pb.GenerateResponse]:
        asked = split_messages.split_generate_request(request)
        keys = split_messages.call_keys(request)
        return self._generate(asked, metadata=(*metadata, *keys), **call)

    async def _get_engine_info(
        self, request: pb.GetEngineInfoRequest, **call: Any
    ) -> pb.EngineInfo:
        server = await self._control.GetServerInfo(split.GetServerInfoRequest(), **call)
        return split_messages.contract_engine_info(server)

    async def _get_model_info(self, request: pb.GetModelInfoRequest, **call: Any) -> pb.ModelInfo:
        asked = split.GetModelInfoRequest(model=request.model)
        model = await self._control.GetModelInfo(asked, **call)
        server = await self._control.GetServerInfo(split.GetServerInfoRequest(), **call)
        return split_messages.contract_model_info(model, server)

    async def _get_load(self, request: pb.GetLoadRequest, **call: Any) -> pb.LoadInfo:
        asked = split.GetLoadRequest(include_per_rank=request.include_per_rank)
        return split_messages.contract_load_info(await self._control.GetLoad(asked, **call))


Rpcs = OpenEngineStub | SplitRpcs
"""The contract's RPCs by name; those that the revision has not raise NotInRevisionError."""


class Speaker:
    """Knows in which revision the server behind a channel is spoken to.

    Where it is not told, it asks once, before the first call that gets an answer: GetEngineInfo,
    which every server of the contract has. Only an UNIMPLEMENTED that no EngineError comes with
    means that there is no such service. A server that is away is asked again by the next call,
    and so is one with another error that could be a proxy's; that one is spoken to in the
    contract's revision until then.

    Args:
        channel: the connection.
        revision: one of CHOICES.
        metadata: goes with the question.
        wait_for_ready: whether the question waits for the connection.
    """

    def __init__(
        self, channel: aio.Channel, revision: str, metadata: Metadata, wait_for_ready: bool
    ) -> None:
        self._contract = OpenEngineStub(channel)
        self._split = SplitRpcs(channel)
        self._metadata = metadata
        self._wait_for_ready = wait_for_ready
        self._asking = asyncio.Lock()
        self._chosen: Rpcs | None = None
        if revision != AUTO:
            self._chosen = self._split if revision == SPLIT.name else self._contract
        self._proven = revision != AUTO

    @property
    def revision(self) -> str | None:
        """The name of the one that is spoken; None before the server has told."""
        if self._chosen is None:
            return None
        return SPLIT.name if self._chosen is self._split else OPENENGINE.name

    async def rpcs(self, deadline: float | None) -> Rpcs:
        """What to call. ``deadline`` is in seconds on the event loop's clock.

        Raises:
            AioRpcError: the server is away, or did not answer the question in time.
            TimeoutError: the time was over before it could be asked.
        """
        if self._chosen is not None:
            return self._chosen
        async with asyncio.timeout_at(deadline), self._asking:
            return self._chosen or await self._ask(deadline)

    def answered(self, rpcs: Rpcs) -> None:
        """One of these was answered: the service is there."""
        self._chosen, self._proven = rpcs, True

    def failure(self, rpcs: Rpcs, error: aio.AioRpcError) -> OpenEngineError:
        """The error behind one of these that failed."""
        if self._proven or rpcs is self._contract or not _unknown_method(error):
            return from_rpc_error(error)
        # It has neither, or nothing yet, like a proxy before its server is there.
        self._chosen = None
        return OpenEngineError(
            pb.ERROR_CODE_UNSUPPORTED_FEATURE,
            f"the server has neither {SERVICE_NAME} nor this RPC of {INFERENCE_NAME} or "
            f"{CONTROL_NAME} ({error.details()})",
            status=grpc.StatusCode.UNIMPLEMENTED,
        )

    async def _ask(self, deadline: float | None) -> Rpcs:
        try:
            await self._contract.GetEngineInfo(
                pb.GetEngineInfoRequest(),
                timeout=seconds_left(deadline),
                metadata=self._metadata,
                wait_for_ready=self._wait_for_ready,
            )
        except aio.AioRpcError as error:
            if _unknown_method(error):
                self._chosen = self._split
                return self._chosen
            if not _has_engine_error(error):
                if error.code() in _AWAY:
                    raise
                return self._contract
        self._chosen = self._contract
        self._proven = True
        return self._chosen


def seconds_left(deadline: float | None) -> float | None:
    """Until a time on the event loop's clock; 0 when it has passed."""
    if deadline is None:
        return None
    return max(0.0, deadline - asyncio.get_running_loop().time())


def _unknown_method(error: aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.UNIMPLEMENTED and not _has_engine_error(error)


def _has_engine_error(error: aio.AioRpcError) -> bool:
    for key, value in error.trailing_metadata() or ():
        if key != STATUS_DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            details = status_pb2.Status.FromString(value).details
        except DecodeError:
            continue
        if any(detail.Is(pb.EngineError.DESCRIPTOR) for detail in details):
            return True
    return False

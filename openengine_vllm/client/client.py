"""An asyncio client of an engine's services, for programs and for the commands beside it.

Thin on purpose: a method for each RPC, the contract's messages in and out, whichever revision of
the schema the server speaks. What it adds is what every caller would otherwise write again: one
exception for both transports of an error, an RPC that is cancelled when its reader goes away,
deadlines, and credentials.
"""

# ruff: noqa: ASYNC109 -- a timeout here is the RPC's deadline, which the server hears of too.

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message
from grpc import aio

from openengine_vllm.client.compatibility import incompatibility
from openengine_vllm.client.requests import GenerateOptions, Prompt, generate_request
from openengine_vllm.client.results import (
    Collector,
    Completion,
    OutputFinished,
    RequestFailed,
    TextDelta,
    text_items,
)
from openengine_vllm.client.revisions import (
    AUTO,
    CHOICES,
    Call,
    Rpcs,
    Speaker,
    Streaming,
    Unary,
    seconds_left,
)
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.channel import client_options
from openengine_vllm.protocol.errors import OpenEngineError, feature_off, from_proto, from_rpc_error

DEFAULT_TARGET: Final = "127.0.0.1:50051"
"""Where a server listens unless it is told otherwise."""

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)
_Event = TypeVar(
    "_Event",
    pb.GenerateResponse,
    pb.DrainResponse,
    pb.SubscribeKvEventsResponse,
    pb.SubscribeRuntimeEventsResponse,
)


class Client:
    """A connection to one engine.

    Make it where an event loop runs, as `async with Client(target) as client`, or call `close`.

    Methods raise `OpenEngineError` for whatever goes wrong, whether the server says so with a
    status or with the last event of a stream; the latter is a `RequestFailed`, raised after
    everything that came before it was yielded.

    Streams are async generators: the RPC begins with the first item and is cancelled when the
    generator is closed, so leave one early inside `contextlib.aclosing`.

    Over the split revision the RPCs are those of `openengine.v1.Inference` and
    `openengine.v1.Control`, translated: priority and rank of a Generate travel as the call's
    metadata, a ModelInfo costs a second call for its capacity, and attributes of a LoadInfo that
    are no texts become JSON. Its EngineError has no `retry_after_ms` and no `details`, so an
    `OpenEngineError` has neither. What it has not is an error before any such call is made: a
    `NotInRevisionError` for the RPCs that are missing, UNSUPPORTED_FEATURE for a GenerateRequest
    with `metadata`.

    Args:
        target: `host:port` or `unix:/path`.
        credentials: For TLS, from `grpc.ssl_channel_credentials`; plaintext without.
        api_key: Sent as `authorization: Bearer KEY` with every call.
        timeout: Seconds for a call that isn't given its own `timeout`; none when absent. It
            holds for Generate and for the RPCs that answer once. Subscriptions and drains last
            as long as they last. Where a default is set, `math.inf` lifts it for one call.
        wait_for_ready: Wait for the connection, up to the timeout, where a call would
            otherwise fail at once because nobody listens yet.
        revision: The revision of the schema to speak: `openengine` (the contract), `split`, or
            `auto`, which asks the server with one more RPC before the first call and takes the
            contract where both are there. The answer holds for the client's life.
        options: More channel arguments, which win over this package's own.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
        wait_for_ready: bool = False,
        revision: str = AUTO,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the API key has to be printable ASCII")
        if revision not in CHOICES:
            raise ValueError(f"the revision is one of {', '.join(CHOICES)}, not {revision!r}")
        self._timeout = timeout
        self._wait_for_ready = wait_for_ready
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        arguments = list({**dict(client_options()), **dict(options)}.items())
        if credentials is None:
            self._channel = aio.insecure_channel(target, options=arguments)
        else:
            self._channel = aio.secure_channel(target, credentials, options=arguments)
        self._speaker = Speaker(self._channel, revision, self._metadata, wait_for_ready)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def revision(self) -> str | None:
        """The name of the revision that is spoken; None before the server has told."""
        return self._speaker.revision

    async def close(self) -> None:
        """Closes the connection; calls that are open are cancelled."""
        await self._channel.close()

    # Inference

    def generate(
        self,
        request: pb.GenerateRequest | Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Streams the responses to a request, or to a prompt with options.

        Raises ValueError for options that no message can hold.
        """
        message = _generate_request(request, options)
        return self._stream(lambda rpcs: rpcs.Generate, message, self._or_default(timeout))

    async def iter_text(
        self,
        request: pb.GenerateRequest | Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[TextDelta | OutputFinished, None]:
        """Streams the text of each output as it comes, and how each one ends."""
        async with aclosing(self.generate(request, timeout=timeout, **options)) as responses:
            async for response in responses:
                for item in text_items(response):
                    yield item

    async def complete(
        self,
        request: pb.GenerateRequest | Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Generates to the end and returns all of it."""
        message = _generate_request(request, options)
        collector = Collector.for_request(message)
        async with aclosing(self.generate(message, timeout=timeout)) as responses:
            async for response in responses:
                collector.add(response)
        return collector.result()

    async def embed(
        self, request: pb.EmbedRequest, *, timeout: float | None = None
    ) -> pb.EmbedResponse:
        """Embeds a batch of inputs."""
        return await self._unary(lambda rpcs: rpcs.Embed, request, timeout)

    async def classify(
        self, request: pb.ClassifyRequest, *, timeout: float | None = None
    ) -> pb.ClassifyResponse:
        """Classifies a batch of inputs."""
        return await self._unary(lambda rpcs: rpcs.Classify, request, timeout)

    async def score(
        self, request: pb.ScoreRequest, *, timeout: float | None = None
    ) -> pb.ScoreResponse:
        """Scores candidates against queries."""
        return await self._unary(lambda rpcs: rpcs.Score, request, timeout)

    # Discovery and load

    async def engine_info(self, *, timeout: float | None = None) -> pb.EngineInfo:
        """Who answers, with which models and in which role."""
        return await self._unary(
            lambda rpcs: rpcs.GetEngineInfo, pb.GetEngineInfoRequest(), timeout
        )

    async def require_compatible(self, *, timeout: float | None = None) -> pb.EngineInfo:
        """Who answers, if its revision of the schema and this client's fit.

        Raises OpenEngineError (UNSUPPORTED_FEATURE) if they don't.
        """
        info = await self.engine_info(timeout=timeout)
        if (problem := incompatibility(info)) is not None:
            raise feature_off(problem)
        return info

    async def model_info(self, model: str, *, timeout: float | None = None) -> pb.ModelInfo:
        """What one of the served models can do."""
        request = pb.GetModelInfoRequest(model=model)
        return await self._unary(lambda rpcs: rpcs.GetModelInfo, request, timeout)

    async def load(
        self, *, include_per_rank: bool = False, timeout: float | None = None
    ) -> pb.LoadInfo:
        """How busy the engine is at this moment."""
        request = pb.GetLoadRequest(include_per_rank=include_per_rank)
        return await self._unary(lambda rpcs: rpcs.GetLoad, request, timeout)

    # Health and the end of work

    async def health(
        self,
        *,
        include_inference_probe: bool = False,
        model: str = "",
        role: pb.EngineRole.ValueType = pb.ENGINE_ROLE_UNSPECIFIED,
        timeout: float | None = None,
    ) -> pb.HealthResponse:
        """The server's state, on request after a small inference on `model`."""
        request = pb.HealthRequest(
            include_inference_probe=include_inference_probe, model=model, role=role
        )
        return await self._unary(lambda rpcs: rpcs.Health, request, timeout)

    async def abort(
        self, target: str | pb.KvSessionRef, *, timeout: float | None = None
    ) -> pb.AbortResponse:
        """Ends the request with an id, or what holds a KV session."""
        if isinstance(target, str):
            request = pb.AbortRequest(request_id=target)
        else:
            request = pb.AbortRequest(kv_session=target)
        return await self._unary(lambda rpcs: rpcs.Abort, request, timeout)

    async def abort_all(self, *, timeout: float | None = None) -> pb.AbortResponse:
        """Ends every request on the engine, those of other clients too."""
        request = pb.AbortRequest(all_requests=pb.AllRequests())
        return await self._unary(lambda rpcs: rpcs.Abort, request, timeout)

    def drain(
        self,
        *,
        stop_accepting_new_requests: bool = True,
        deadline_ms: int | None = None,
        abort_after_deadline: bool = False,
        timeout: float | None = None,
    ) -> AsyncGenerator[pb.DrainResponse, None]:
        """Lets running work finish, and streams how far that is. 0 ms is a deadline already."""
        request = pb.DrainRequest(
            stop_accepting_new_requests=stop_accepting_new_requests,
            deadline_ms=deadline_ms,
            abort_after_deadline=abort_after_deadline,
        )
        return self._stream(lambda rpcs: rpcs.Drain, request, timeout)

    # Adapters

    async def load_lora(
        self, lora_id: int, lora_name: str, source_path: str, *, timeout: float | None = None
    ) -> pb.LoadLoraResponse:
        """Loads an adapter from an absolute folder that the engine can see."""
        adapter = pb.LoraAdapter(lora_id=lora_id, lora_name=lora_name, source_path=source_path)
        request = pb.LoadLoraRequest(adapter=adapter)
        return await self._unary(lambda rpcs: rpcs.LoadLora, request, timeout)

    async def unload_lora(
        self, lora_name: str, *, timeout: float | None = None
    ) -> pb.UnloadLoraResponse:
        """Unloads an adapter once nothing uses it."""
        request = pb.UnloadLoraRequest(lora_name=lora_name)
        return await self._unary(lambda rpcs: rpcs.UnloadLora, request, timeout)

    async def list_loras(self, *, timeout: float | None = None) -> pb.ListLorasResponse:
        """The adapters that are loaded."""
        return await self._unary(lambda rpcs: rpcs.ListLoras, pb.ListLorasRequest(), timeout)

    # KV cache transfer and events

    async def kv_connector_info(self, *, timeout: float | None = None) -> pb.KvConnectorInfo:
        """How KV blocks can be moved to or from this engine."""
        request = pb.GetKvConnectorInfoRequest()
        return await self._unary(lambda rpcs: rpcs.GetKvConnectorInfo, request, timeout)

    async def kv_event_sources(
        self, data_parallel_ranks: Iterable[int] = (), *, timeout: float | None = None
    ) -> pb.GetKvEventSourcesResponse:
        """Where KV events can be had, for the given ranks or for all."""
        request = pb.GetKvEventSourcesRequest(data_parallel_ranks=data_parallel_ranks)
        return await self._unary(lambda rpcs: rpcs.GetKvEventSources, request, timeout)

    def subscribe_kv_events(
        self,
        data_parallel_ranks: Iterable[int] = (),
        *,
        include_snapshot: bool = False,
        start_sequence_number: int = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[pb.SubscribeKvEventsResponse, None]:
        """Streams what enters and leaves the KV cache; from now on, if the start is 0."""
        request = pb.SubscribeKvEventsRequest(
            data_parallel_ranks=data_parallel_ranks,
            include_snapshot=include_snapshot,
            start_sequence_number=start_sequence_number,
        )
        return self._stream(lambda rpcs: rpcs.SubscribeKvEvents, request, timeout)

    def subscribe_runtime_events(
        self,
        types: Iterable[pb.RuntimeEventType.ValueType] = (),
        *,
        timeout: float | None = None,
    ) -> AsyncGenerator[pb.SubscribeRuntimeEventsResponse, None]:
        """Streams what the scheduler does, of the given kinds or of all."""
        request = pb.SubscribeRuntimeEventsRequest(types=types)
        return self._stream(lambda rpcs: rpcs.SubscribeRuntimeEvents, request, timeout)

    def _or_default(self, timeout: float | None) -> float | None:
        return self._timeout if timeout is None else timeout

    async def _unary(
        self,
        rpc: Callable[[Rpcs], Unary[_Request, _Response]],
        request: _Request,
        timeout: float | None,
    ) -> _Response:
        deadline = _deadline(self._or_default(timeout))
        rpcs = await self._rpcs(deadline)
        call = rpc(rpcs)
        try:
            response = await call(
                request,
                timeout=seconds_left(deadline),
                metadata=self._metadata,
                wait_for_ready=self._wait_for_ready,
            )
        except aio.AioRpcError as error:
            raise self._speaker.failure(rpcs, error) from error
        self._speaker.answered(rpcs)
        return response

    async def _stream(
        self,
        rpc: Callable[[Rpcs], Streaming[_Request, _Event]],
        request: _Request,
        timeout: float | None,
    ) -> AsyncGenerator[_Event, None]:
        deadline = _deadline(timeout)
        rpcs = await self._rpcs(deadline)
        call: Call[_Event] = rpc(rpcs)(
            request,
            timeout=seconds_left(deadline),
            metadata=self._metadata,
            wait_for_ready=self._wait_for_ready,
        )
        try:
            async for event in call:
                self._speaker.answered(rpcs)
                if event.HasField("error"):
                    raise _failure(event)
                yield event
        except aio.AioRpcError as error:
            raise self._speaker.failure(rpcs, error) from error
        finally:
            call.cancel()

    async def _rpcs(self, deadline: float | None) -> Rpcs:
        try:
            return await self._speaker.rpcs(deadline)
        except aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except TimeoutError as error:
            status = grpc.StatusCode.DEADLINE_EXCEEDED
            raise OpenEngineError(
                pb.ERROR_CODE_UNSPECIFIED, "the server did not answer in time", status=status
            ) from error


def _deadline(seconds: float | None) -> float | None:
    """When the call has to be over, on the event loop's clock."""
    if seconds is None or seconds == math.inf:
        return None
    return asyncio.get_running_loop().time() + seconds


def _generate_request(
    request: pb.GenerateRequest | Prompt, options: GenerateOptions
) -> pb.GenerateRequest:
    if not isinstance(request, pb.GenerateRequest):
        return generate_request(request, options)
    if options:
        raise TypeError("options go with a prompt; a GenerateRequest has its own")
    return request


def _failure(
    event: pb.GenerateResponse
    | pb.DrainResponse
    | pb.SubscribeKvEventsResponse
    | pb.SubscribeRuntimeEventsResponse,
) -> RequestFailed:
    plain = from_proto(event.error)
    failure = RequestFailed(
        plain.code,
        plain.message,
        retryable=plain.retryable,
        retry_after_ms=plain.retry_after_ms,
        details=plain.details,
    )
    if isinstance(event, pb.GenerateResponse) and event.HasField("usage"):
        failure.usage = event.usage
    return failure

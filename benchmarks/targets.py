"""The ways to reach an engine, each as a thing that streams one request.

A target is used from one event loop. It checks what it gets: a stream with another number of
tokens than were asked for fails the benchmark.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from benchmarks.timing import Recorder, StreamClock
from benchmarks.workload import TEMPERATURE, Shape

if TYPE_CHECKING:
    import grpc
    from vllm.v1.engine.async_llm import AsyncLLM

MODEL_NAME = "bench"
"""What the HTTP server is told to call the model."""


class CountError(Exception):
    """A stream did not hold the tokens that were asked for."""


class Target(ABC):
    """Where the requests go; enter it before the first stream."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._resources.aclose()

    async def run(self, request_id: str, prompt: list[int], recorder: Recorder) -> None:
        """Stream one request to its end.

        Raises:
            CountError: its tokens are not as many as were asked for.
        """
        tokens = await self._stream(request_id, prompt, recorder.stream())
        if tokens != self._shape.output_tokens:
            raise CountError(
                f"{request_id} gave {tokens} tokens instead of {self._shape.output_tokens}"
            )
        recorder.ended(tokens)

    @abstractmethod
    async def _open(self) -> None: ...

    @abstractmethod
    async def _stream(self, request_id: str, prompt: list[int], clock: StreamClock) -> int:
        """Read the whole stream; returns how many tokens it held."""


class InProcessTarget(Target):
    """``AsyncLLM.generate`` in this very process: what vLLM's frontend costs by itself."""

    def __init__(self, shape: Shape, engine_flags: list[str]) -> None:
        super().__init__(shape)
        self._engine_flags = engine_flags
        self._llm: AsyncLLM

    async def _open(self) -> None:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        parser = FlexibleArgumentParser()
        AsyncEngineArgs.add_cli_args(parser)
        args = AsyncEngineArgs.from_cli_args(parser.parse_args(self._engine_flags))
        self._llm = AsyncLLM.from_engine_args(args)
        self._resources.callback(self._llm.shutdown)
        self._params = SamplingParams(
            temperature=TEMPERATURE,
            max_tokens=self._shape.output_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )

    async def _stream(self, request_id: str, prompt: list[int], clock: StreamClock) -> int:
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        llm = self._llm
        (rendered,) = await llm.renderer.render_cmpl_async(
            [parse_model_prompt(llm.model_config, {"prompt_token_ids": prompt})]
        )
        tokens = 0
        async for output in llm.generate(rendered, self._params, request_id):
            clock.message()
            tokens += len(output.outputs[0].token_ids)
        return tokens


class HttpTarget(Target):
    """vLLM's OpenAI server, ``/v1/completions`` as server-sent events."""

    def __init__(self, shape: Shape, address: str) -> None:
        super().__init__(shape)
        self._url = f"http://{address}/v1/completions"
        self._common = {
            "model": MODEL_NAME,
            "max_tokens": shape.output_tokens,
            "temperature": TEMPERATURE,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _open(self) -> None:
        import aiohttp

        self._session = await self._resources.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        )

    async def _stream(self, request_id: str, prompt: list[int], clock: StreamClock) -> int:
        tokens = 0
        rest = b""
        async with self._session.post(self._url, json={**self._common, "prompt": prompt}) as answer:
            if answer.status != 200:
                raise CountError(f"HTTP {answer.status}: {await answer.text()}")
            async for chunk in answer.content.iter_any():
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    tokens = _take_event(event, clock) or tokens
        if rest:
            raise CountError(f"{request_id} ended inside an event")
        return tokens


def _take_event(event: bytes, clock: StreamClock) -> int:
    """Note one server-sent event; returns the token count where it tells the usage, else 0."""
    data = event.removeprefix(b"data: ")
    if data == b"[DONE]":
        return 0
    payload: dict[str, Any] = json.loads(data)
    if "error" in payload:
        raise CountError(str(payload["error"]))
    if payload["choices"]:
        clock.message()
    usage = payload.get("usage")
    return int(usage["completion_tokens"]) if usage else 0


class OpenEngineTarget(Target):
    """This project's server, the contract's ``Generate`` over gRPC."""

    path = "/openengine.v1.OpenEngine/Generate"

    @staticmethod
    def messages() -> Any:
        """The module with the revision's messages."""
        from openengine_vllm.protocol import v1

        return v1

    def __init__(self, shape: Shape, address: str, channels: int) -> None:
        super().__init__(shape)
        self._address = address
        self._channels = channels
        self._next = 0
        self._methods: list[grpc.aio.UnaryStreamMultiCallable[Any, Any]] = []

    async def _open(self) -> None:
        import grpc

        pb = self.messages()
        for _ in range(self._channels):
            channel = await self._resources.enter_async_context(
                grpc.aio.insecure_channel(
                    self._address, options=[("grpc.use_local_subchannel_pool", 1)]
                )
            )
            await channel.channel_ready()
            self._methods.append(
                channel.unary_stream(
                    self.path,
                    request_serializer=pb.GenerateRequest.SerializeToString,
                    response_deserializer=pb.GenerateResponse.FromString,
                )
            )

    async def _stream(self, request_id: str, prompt: list[int], clock: StreamClock) -> int:
        pb = self.messages()
        request = pb.GenerateRequest(
            request_id=request_id,
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(temperature=TEMPERATURE),
            stopping=pb.StoppingOptions(max_tokens=self._shape.output_tokens, ignore_eos=True),
        )
        method = self._methods[self._next % self._channels]
        self._next += 1
        tokens = counted = 0
        async for response in method(request):
            event = response.WhichOneof("event")
            if event == "token":
                clock.message()
                tokens += len(response.token.tokens)
            elif event == "error":
                raise CountError(response.error.message)
            if response.HasField("usage"):
                counted = response.usage.completion_tokens
        if counted != tokens:
            raise CountError(f"{request_id} gave {tokens} tokens, and counted {counted} as usage")
        return tokens


class SplitTarget(OpenEngineTarget):
    """The same server, the split revision's ``Generate``."""

    path = "/openengine.v1.Inference/Generate"

    @staticmethod
    def messages() -> Any:
        """The module with the revision's messages."""
        from openengine_vllm.protocol import split

        return split

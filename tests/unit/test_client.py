"""The client against a scripted server: streams, both transports of an error, and endings."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode

from openengine_vllm import client as client_package
from openengine_vllm.client import (
    Client,
    OpenEngineError,
    OutputFinished,
    RequestFailed,
    TextDelta,
)
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from tests.support.certificates import self_signed
from tests.support.scripted import Context, ScriptedServer, scripted_server

BOUND = 30
"""Seconds after which something that should happen has not."""


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as scripted:
        yield scripted


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[Client]:
    async with Client(server.target) as connected:
        yield connected


def token(text: str, *ids: int, index: int = 0) -> pb.GenerateResponse:
    infos = [pb.TokenInfo(token_id=token_id) for token_id in ids]
    output = pb.TokenOutput(output_index=index, tokens=infos, text=text)
    return pb.GenerateResponse(request_id="r", token=output)


def finished(index: int = 0, *, last: bool = True) -> pb.GenerateResponse:
    end = pb.GenerationFinished(
        output_index=index,
        reason=pb.FINISH_REASON_STOP,
        stop_match=pb.StopMatch(eos_token_id=2),
    )
    usage = pb.Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5) if last else None
    return pb.GenerateResponse(request_id="r", finished=end, usage=usage)


def failed(error: OpenEngineError) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id="r", error=errors.to_proto(error), usage=pb.Usage(prompt_tokens=3)
    )


def rejecting(error: OpenEngineError) -> Any:
    async def script(request: object, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        await context.abort(error.status, error.message, error.trailing_metadata())
        yield pb.GenerateResponse()

    return script


async def collect(stream: AsyncIterator[Any], seen: list[Any]) -> None:
    async for item in stream:
        seen.append(item)


async def happens(event: asyncio.Event) -> None:
    async with asyncio.timeout(BOUND):
        await event.wait()


async def test_generate_yields_every_response_as_it_is(
    server: ScriptedServer, client: Client
) -> None:
    responses = [token("a", 1), token("b", 2), finished()]
    server.stream("Generate", *responses)
    request = pb.GenerateRequest(request_id="r", prompt="p")
    assert [response async for response in client.generate(request)] == responses
    assert server.requests == [("Generate", request)]


async def test_generate_makes_a_request_of_a_prompt_and_options(
    server: ScriptedServer, client: Client
) -> None:
    server.stream("Generate", finished())
    stream = client.generate("p", max_tokens=5, temperature=0.0, request_id="r")
    assert [response async for response in stream] == [finished()]
    assert server.requests == [
        (
            "Generate",
            pb.GenerateRequest(
                request_id="r",
                prompt="p",
                sampling=pb.SamplingParams(temperature=0.0),
                stopping=pb.StoppingOptions(max_tokens=5),
            ),
        )
    ]


def test_options_beside_a_whole_request_are_refused() -> None:
    async def refused() -> None:
        async with Client("127.0.0.1:1") as client:
            with pytest.raises(TypeError, match="options"):
                client.generate(pb.GenerateRequest(), max_tokens=5)

    asyncio.run(refused())


async def test_iter_text(server: ScriptedServer, client: Client) -> None:
    prompt = pb.GenerateResponse(prompt=pb.PromptOutput())
    server.stream("Generate", prompt, token("a", 1, 2), finished())
    items = [item async for item in client.iter_text("p")]
    assert items == [
        TextDelta(0, "a", (1, 2)),
        OutputFinished(
            0,
            pb.FINISH_REASON_STOP,
            pb.StopMatch(eos_token_id=2),
            pb.Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5),
        ),
    ]
    assert isinstance(items[1], OutputFinished)
    assert items[1].reason_name == "stop"


async def test_complete_sorts_the_outputs_of_a_request(
    server: ScriptedServer, client: Client
) -> None:
    server.stream(
        "Generate",
        token("x", 7, index=1),
        token("a", 1),
        finished(last=False),
        token("y", 8, 9, index=1),
        finished(1),
    )
    completion = await client.complete("p", num_sequences=2, request_id="r")
    assert [output.text for output in completion.outputs] == ["a", "xy"]
    assert [output.token_ids for output in completion.outputs] == [[1], [7, 8, 9]]
    assert [output.reason_name for output in completion.outputs] == ["stop", "stop"]
    assert completion.request_id == "r"
    assert completion.usage == pb.Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5)
    with pytest.raises(ValueError, match="too many"):
        completion.text  # noqa: B018


async def test_complete_on_a_prefill_engine(server: ScriptedServer, client: Client) -> None:
    session = pb.KvSessionRef(session_id="s")
    ready = pb.GenerateResponse(prefill_ready=pb.PrefillReady(kv_session=session))
    server.stream("Generate", ready)
    completion = await client.complete([1, 2, 3])
    assert completion.kv_session == session
    assert completion.outputs == []


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ([token("a", 1)], "ended before output 0"),
        ([token("a", 1, index=1)], "output 1, which was not asked for"),
        ([finished(), token("a", 1)], "went on with output 0"),
        ([finished(), finished()], "went on with output 0"),
    ],
    ids=["no end", "unknown output", "token after end", "two ends"],
)
async def test_complete_refuses_a_stream_that_breaks_the_contract(
    server: ScriptedServer, client: Client, responses: list[pb.GenerateResponse], message: str
) -> None:
    server.stream("Generate", *responses)
    with pytest.raises(OpenEngineError, match=message):
        await client.complete("p")


async def test_a_terminal_error_is_raised_after_what_came_before(
    server: ScriptedServer, client: Client
) -> None:
    error = errors.overloaded("the queue is full", retry_after_ms=250)
    server.stream("Generate", token("a", 1), failed(error))
    seen: list[pb.GenerateResponse] = []
    with pytest.raises(RequestFailed) as caught:
        await collect(client.generate("p"), seen)
    assert seen == [token("a", 1)]
    assert caught.value.code == pb.ERROR_CODE_OVERLOADED
    assert caught.value.message == "the queue is full"
    assert caught.value.retryable
    assert caught.value.retry_after_ms == 250
    assert caught.value.usage == pb.Usage(prompt_tokens=3)


async def test_a_rejection_has_the_same_code_and_details(
    server: ScriptedServer, client: Client
) -> None:
    server.scripts["Generate"] = rejecting(errors.invalid_argument("sampling.top_p", "too large"))
    with pytest.raises(OpenEngineError) as caught:
        await client.complete("p")
    assert not isinstance(caught.value, RequestFailed)
    assert caught.value.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert caught.value.status is StatusCode.INVALID_ARGUMENT
    assert caught.value.field == "sampling.top_p"


@pytest.mark.parametrize("rpc", ["Drain", "SubscribeKvEvents", "SubscribeRuntimeEvents"])
async def test_every_stream_raises_its_terminal_error(
    server: ScriptedServer, client: Client, rpc: str
) -> None:
    detail = errors.to_proto(errors.draining())
    response = {
        "Drain": pb.DrainResponse(error=detail),
        "SubscribeKvEvents": pb.SubscribeKvEventsResponse(error=detail),
        "SubscribeRuntimeEvents": pb.SubscribeRuntimeEventsResponse(error=detail),
    }[rpc]
    server.stream(rpc, response)
    streams: dict[str, AsyncIterator[Any]] = {
        "Drain": client.drain(),
        "SubscribeKvEvents": client.subscribe_kv_events(),
        "SubscribeRuntimeEvents": client.subscribe_runtime_events(),
    }
    with pytest.raises(RequestFailed) as caught:
        await anext(streams[rpc])
    assert caught.value.code == pb.ERROR_CODE_DRAINING


async def test_closing_the_stream_cancels_the_rpc(server: ScriptedServer, client: Client) -> None:
    server.stream("Generate", token("a", 1), hold=True)
    async with aclosing(client.generate("p")) as responses:
        assert await anext(responses) == token("a", 1)
        assert not server.cancelled.is_set()
    await happens(server.cancelled)


async def test_closing_the_text_cancels_the_rpc(server: ScriptedServer, client: Client) -> None:
    server.stream("Generate", token("a", 1), hold=True)
    async with aclosing(client.iter_text("p")) as items:
        await anext(items)
    await happens(server.cancelled)


async def test_cancelling_the_task_cancels_the_rpc(server: ScriptedServer, client: Client) -> None:
    began = asyncio.Event()

    async def script(request: object, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        began.set()
        await asyncio.Event().wait()
        yield pb.GenerateResponse()

    server.scripts["Generate"] = script
    task = asyncio.create_task(client.complete("p"))
    await happens(began)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await happens(server.cancelled)


async def test_a_deadline_ends_both_sides(server: ScriptedServer, client: Client) -> None:
    server.stream("Generate", token("a", 1), hold=True)
    seen: list[pb.GenerateResponse] = []
    with pytest.raises(OpenEngineError) as caught:
        await collect(client.generate("p", timeout=2), seen)
    assert seen == [token("a", 1)]
    assert caught.value.status is StatusCode.DEADLINE_EXCEEDED
    assert caught.value.code_name == "DEADLINE_EXCEEDED"
    await happens(server.cancelled)


async def test_which_calls_the_default_timeout_holds_for(server: ScriptedServer) -> None:
    remaining: dict[str, float | None] = {}

    async def health(request: object, context: Context) -> pb.HealthResponse:
        remaining["Health"] = context.time_remaining()
        return pb.HealthResponse()

    async def generate(request: object, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        remaining["Generate"] = context.time_remaining()
        yield finished()

    async def drain(request: object, context: Context) -> AsyncIterator[pb.DrainResponse]:
        remaining["Drain"] = context.time_remaining()
        yield pb.DrainResponse(state=pb.DRAIN_STATE_COMPLETE)

    server.scripts |= {"Health": health, "Generate": generate, "Drain": drain}

    async def call_all(
        client: Client,
        timeout: float | None,  # noqa: ASYNC109
    ) -> dict[str, float | None]:
        await client.health(timeout=timeout)
        await client.complete("p", timeout=timeout)
        async for _ in client.drain(timeout=timeout):
            pass
        return dict(remaining)

    async with Client(server.target, timeout=1000) as client:
        seen = await call_all(client, None)
        assert seen["Health"] is not None
        assert seen["Generate"] is not None
        # Deadlines travel rounded.
        assert 900 < seen["Health"] < 1100
        assert 900 < seen["Generate"] < 1100
        assert seen["Drain"] is None
        assert await call_all(client, math.inf) == {"Health": None, "Generate": None, "Drain": None}
        seen = await call_all(client, 5000)
        assert all(value is not None and value > 2000 for value in seen.values())


async def test_a_server_that_is_not_there() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(OpenEngineError) as caught:
            await client.health()
    assert caught.value.status is StatusCode.UNAVAILABLE
    assert caught.value.retryable


async def test_waiting_for_a_server_to_come_up(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/socket"
    async with Client(target, wait_for_ready=True) as client:
        early = asyncio.create_task(client.health(timeout=BOUND))
        with pytest.raises(OpenEngineError):
            # Some real time in which nobody listens, measured by another call's deadline.
            await client.health(timeout=0.05)
        assert not early.done()
        async with scripted_server(target) as server:
            server.answer("Health", pb.HealthResponse(state=pb.HEALTH_STATE_READY))
            assert (await early).state == pb.HEALTH_STATE_READY


async def test_an_api_key_goes_with_every_call(server: ScriptedServer) -> None:
    server.answer("Health", pb.HealthResponse())
    server.stream("Generate", finished())
    async with Client(server.target, api_key="secret") as client:
        await client.health()
        assert server.metadata["authorization"] == "Bearer secret"
        await client.complete("p")
        assert server.metadata["authorization"] == "Bearer secret"
    async with Client(server.target) as client:
        await client.health()
        assert "authorization" not in server.metadata


@pytest.mark.parametrize("key", ["a\nb", "ü"])
def test_an_api_key_that_no_header_can_hold(key: str) -> None:
    with pytest.raises(ValueError, match="API key"):
        Client("127.0.0.1:1", api_key=key)


async def test_tls(tmp_path: Path) -> None:
    key, certificate = (file.read_bytes() for file in self_signed(tmp_path))
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    async with scripted_server(credentials=credentials) as server:
        server.answer("Health", pb.HealthResponse(state=pb.HEALTH_STATE_READY))
        trusted = grpc.ssl_channel_credentials(certificate)
        async with Client(server.target, credentials=trusted) as client:
            assert (await client.health()).state == pb.HEALTH_STATE_READY
        async with Client(server.target) as plaintext:
            with pytest.raises(OpenEngineError):
                await plaintext.health()


def snake(name: str) -> str:
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    return name.removeprefix("get_")


def test_every_rpc_has_its_method() -> None:
    for method in pb.SERVICE.methods:
        function = getattr(Client, snake(method.name))
        returned = str(inspect.signature(function).return_annotation)
        # `complete` and `iter_text` stand on `generate`.
        assert f"pb.{method.output_type.name}" in returned
        assert returned.startswith("AsyncGenerator[") is method.server_streaming


async def test_every_rpc_reaches_its_own_handler(server: ScriptedServer, client: Client) -> None:
    session = pb.KvSessionRef(session_id="s")
    adapter = pb.LoraAdapter(lora_id=1, lora_name="a", source_path="/a")
    embed = pb.EmbedRequest(context=pb.TaskRequestContext(request_id="e"))
    classify = pb.ClassifyRequest(context=pb.TaskRequestContext(request_id="c"))
    score = pb.ScoreRequest(context=pb.TaskRequestContext(request_id="s"))
    calls = [
        (client.embed(embed), "Embed", embed),
        (client.classify(classify), "Classify", classify),
        (client.score(score), "Score", score),
        (client.engine_info(), "GetEngineInfo", pb.GetEngineInfoRequest()),
        (client.model_info("m"), "GetModelInfo", pb.GetModelInfoRequest(model="m")),
        (client.load(include_per_rank=True), "GetLoad", pb.GetLoadRequest(include_per_rank=True)),
        (
            client.health(include_inference_probe=True, model="m", role=pb.ENGINE_ROLE_DECODE),
            "Health",
            pb.HealthRequest(include_inference_probe=True, model="m", role=pb.ENGINE_ROLE_DECODE),
        ),
        (client.abort("r"), "Abort", pb.AbortRequest(request_id="r")),
        (client.abort(session), "Abort", pb.AbortRequest(kv_session=session)),
        (client.abort_all(), "Abort", pb.AbortRequest(all_requests=pb.AllRequests())),
        (client.load_lora(1, "a", "/a"), "LoadLora", pb.LoadLoraRequest(adapter=adapter)),
        (client.unload_lora("a"), "UnloadLora", pb.UnloadLoraRequest(lora_name="a")),
        (client.list_loras(), "ListLoras", pb.ListLorasRequest()),
        (client.kv_connector_info(), "GetKvConnectorInfo", pb.GetKvConnectorInfoRequest()),
        (
            client.kv_event_sources([1]),
            "GetKvEventSources",
            pb.GetKvEventSourcesRequest(data_parallel_ranks=[1]),
        ),
    ]
    for call, rpc, request in calls:
        response = getattr(pb, pb.SERVICE.methods_by_name[rpc].output_type.name)()
        server.answer(rpc, response)
        assert await call == response
        assert server.requests[-1] == (rpc, request)

    streams = [
        (
            client.drain(deadline_ms=0, abort_after_deadline=True),
            "Drain",
            pb.DrainRequest(
                stop_accepting_new_requests=True, deadline_ms=0, abort_after_deadline=True
            ),
        ),
        (client.drain(), "Drain", pb.DrainRequest(stop_accepting_new_requests=True)),
        (
            client.subscribe_kv_events([0], include_snapshot=True, start_sequence_number=7),
            "SubscribeKvEvents",
            pb.SubscribeKvEventsRequest(
                data_parallel_ranks=[0], include_snapshot=True, start_sequence_number=7
            ),
        ),
        (
            client.subscribe_runtime_events([pb.RUNTIME_EVENT_TYPE_QUEUE]),
            "SubscribeRuntimeEvents",
            pb.SubscribeRuntimeEventsRequest(types=[pb.RUNTIME_EVENT_TYPE_QUEUE]),
        ),
    ]
    for stream, rpc, request in streams:
        response = getattr(pb, pb.SERVICE.methods_by_name[rpc].output_type.name)()
        server.stream(rpc, response)
        assert [item async for item in stream] == [response]
        assert server.requests[-1] == (rpc, request)


@pytest.mark.parametrize(
    ("schema_revision", "minimum_client_revision", "problem"),
    [
        (1, 1, None),
        (7, 1, None),
        (1, 0, None),
        (2, 2, "clients of schema revision 2"),
        (0, 1, "schema revision 0"),
    ],
)
async def test_compatible_revisions(
    server: ScriptedServer,
    client: Client,
    schema_revision: int,
    minimum_client_revision: int,
    problem: str | None,
) -> None:
    info = pb.EngineInfo(
        schema_revision=schema_revision, minimum_client_revision=minimum_client_revision
    )
    server.answer("GetEngineInfo", info)
    if problem is None:
        assert await client.require_compatible() == info
    else:
        with pytest.raises(OpenEngineError, match=problem) as caught:
            await client.require_compatible()
        assert caught.value.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE


async def test_an_rpc_that_is_not_there(client: Client) -> None:
    with pytest.raises(OpenEngineError) as caught:
        await client.load()
    assert caught.value.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE
    assert caught.value.status is StatusCode.UNIMPLEMENTED


def test_every_public_name_is_there() -> None:
    for name in client_package.__all__:
        assert getattr(client_package, name) is not None
    assert not hasattr(client_package, "nothing")


def test_the_client_needs_neither_vllm_nor_torch() -> None:
    program = (
        "import sys, openengine_vllm.client, openengine_vllm.client.commands.generate;"
        "print(sorted({'vllm', 'torch', 'transformers', 'tokenizers', 'jinja2', 'numpy'}"
        " & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"

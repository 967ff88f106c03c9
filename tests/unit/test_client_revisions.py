"""Which revision of the schema the client speaks, and how it finds out."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio

from openengine_vllm.client import (
    Client,
    NotInRevisionError,
    OpenEngineError,
    RequestFailed,
)
from openengine_vllm.client.commands import COMMANDS
from openengine_vllm.client.revisions import CHOICES
from openengine_vllm.protocol import errors, split
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError as Failure
from openengine_vllm.protocol.revision import CONTROL_NAME, INFERENCE_NAME, SERVICE_NAME
from tests.support.calls import PATIENCE_SECONDS
from tests.support.scripted import CONTRACT, SPLIT, Context, ScriptedServer, scripted_server
from tests.unit.scripted_engine import serve
from tests.unit.test_client_commands import run
from tests.unit.top_screen import Time, shown

QUESTION = f"/{SERVICE_NAME}/GetEngineInfo"


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    """A server of the split revision alone."""
    async with scripted_server(services=SPLIT) as scripted:
        scripted.answer("Health", split.HealthResponse(state=split.HEALTH_STATE_READY))
        yield scripted


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[Client]:
    async with Client(server.target, revision="split") as connected:
        yield connected


@asynccontextmanager
async def plain_server(
    answer: Callable[[str], tuple[StatusCode, str]], address: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[str, list[str]]]:
    """A server that refuses every call with a bare status; its address, and the calls' paths."""
    calls: list[str] = []

    class Refusing(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
            calls.append(details.method)

            async def refuse(requests: object, context: Context) -> None:
                await context.abort(*answer(details.method))

            return grpc.stream_stream_rpc_method_handler(refuse)

    server = aio.server()
    server.add_generic_rpc_handlers((Refusing(),))
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}", calls
    finally:
        await server.stop(None)


def rejecting(error: Failure) -> Any:
    async def script(request: object, context: Context) -> None:
        metadata = error.trailing_metadata(detailed=False)
        await context.abort(error.status, error.message, metadata)

    return script


def finished(**fields: Any) -> split.GenerateResponse:
    end = split.GenerationFinished(reason=split.FINISH_REASON_STOP)
    return split.GenerateResponse(request_id="r", finished=end, **fields)


# What is spoken in the split revision.


async def test_generate_with_its_keys(server: ScriptedServer, client: Client) -> None:
    token = split.TokenOutput(text="a", tokens=[split.TokenInfo(token_id=7)])
    server.stream(
        "Generate",
        split.GenerateResponse(request_id="r", token=token),
        finished(usage=split.Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)),
    )
    request = pb.GenerateRequest(
        request_id="r",
        prompt="p",
        priority=-3,
        kv=pb.KvOptions(data_parallel_rank=2, bypass_prefix_cache=True, cache_salt="s"),
        sampling=pb.SamplingParams(temperature=0),
    )
    completion = await client.complete(request)
    assert completion.text == "a"
    assert completion.usage == pb.Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)
    assert server.requests == [
        (
            "Generate",
            split.GenerateRequest(
                request_id="r",
                prompt="p",
                kv=split.KvOptions(bypass_prefix_cache=True, cache_salt="s"),
                sampling=split.SamplingParams(temperature=0),
            ),
        )
    ]
    assert server.metadata["openengine-priority"] == "-3"
    assert server.metadata["openengine-target-dp-rank"] == "2"
    assert server.calls == [f"/{INFERENCE_NAME}/Generate"]


async def test_the_key_of_the_api_goes_with_the_others(server: ScriptedServer) -> None:
    server.stream("Generate", finished())
    async with Client(server.target, api_key="secret", revision="auto") as client:
        await client.complete("p", priority=1)
    assert server.metadata["authorization"] == "Bearer secret"
    assert server.metadata["openengine-priority"] == "1"


async def test_discovery_and_load(server: ScriptedServer, client: Client) -> None:
    server.answer(
        "GetServerInfo",
        split.ServerInfo(
            engine_name="other",
            engine_role=split.ENGINE_ROLE_PREFILL,
            supported_models=["m"],
            parallelism=split.ParallelismInfo(
                tensor_parallel_size=2, decode_context_parallel_size=4
            ),
            kv_connector=split.KvConnectorInfo(enabled=True),
            schema_revision=1,
            capacity=split.DeploymentCapacity(kv_block_size=16, total_kv_blocks=0, max_loras=1),
        ),
    )
    server.answer("GetModelInfo", split.ModelInfo(model_id="org/m", supports_token_ids_input=True))
    load = split.LoadInfo(running_requests=0, ranks=[split.RankLoadInfo(data_parallel_rank=3)])
    load.attributes["preemptions"] = 2
    server.answer("GetLoad", load)
    assert await client.engine_info() == pb.EngineInfo(
        engine_name="other",
        role=pb.ENGINE_ROLE_PREFILL,
        supported_models=["m"],
        parallelism=pb.ParallelismInfo(tensor_parallel_size=2),
        kv_connector=pb.KvConnectorInfo(enabled=True),
        schema_revision=1,
    )
    assert await client.model_info("m") == pb.ModelInfo(
        model_id="org/m", supports_token_ids_input=True, kv_block_size=16, total_kv_blocks=0
    )
    assert await client.load(include_per_rank=True) == pb.LoadInfo(
        running_requests=0,
        ranks=[pb.RankLoadInfo(data_parallel_rank=3)],
        attributes={"preemptions": "2"},
    )
    assert dict(server.requests)["GetModelInfo"] == split.GetModelInfoRequest(model="m")
    assert dict(server.requests)["GetLoad"] == split.GetLoadRequest(include_per_rank=True)


async def test_what_both_revisions_have_alike(server: ScriptedServer, client: Client) -> None:
    block = split.KvBlockHash(value=b"-12", encoding="decimal_int64")
    batch = split.KvEventBatch(
        sequence_number=4,
        events=[split.KvEvent(block_removed=split.BlockRemoved(block_hashes=[block]))],
    )
    server.stream("SubscribeKvEvents", split.SubscribeKvEventsResponse(batch=batch))
    [event] = [e async for e in client.subscribe_kv_events([1], start_sequence_number=4)]
    [removed] = event.batch.events[0].block_removed.block_hashes
    assert removed == pb.KvBlockHash(value=b"-12", encoding="decimal_int64")
    assert server.requests[-1][1] == split.SubscribeKvEventsRequest(
        data_parallel_ranks=[1], start_sequence_number=4
    )

    adapter = pb.LoraAdapter(lora_id=1, lora_name="a", source_path="/a")
    calls: list[tuple[Callable[[], Awaitable[Any]], str, Any]] = [
        (client.health, "Health", split.HealthRequest()),
        (lambda: client.abort("r"), "Abort", split.AbortRequest(request_id="r")),
        (lambda: client.load_lora(1, "a", "/a"), "LoadLora", None),
        (lambda: client.unload_lora("a"), "UnloadLora", split.UnloadLoraRequest(lora_name="a")),
        (client.list_loras, "ListLoras", split.ListLorasRequest()),
        (client.kv_event_sources, "GetKvEventSources", split.GetKvEventSourcesRequest()),
    ]
    for call, rpc, request in calls:
        kind = split.CONTROL_SERVICE.methods_by_name[rpc].output_type.name
        server.answer(rpc, getattr(split, kind)())
        assert await call() == getattr(pb, kind)()
        assert server.calls[-1] == f"/{CONTROL_NAME}/{rpc}"
        if request is not None:
            assert server.requests[-1] == (rpc, request)
    [sent] = [request for rpc, request in server.requests if rpc == "LoadLora"]
    assert sent.SerializeToString() == pb.LoadLoraRequest(adapter=adapter).SerializeToString()


async def read(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize("revision", ["split", "auto"])
async def test_what_the_split_revision_has_not(server: ScriptedServer, revision: str) -> None:
    async with Client(server.target, revision=revision) as client:
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "Drain": lambda: read(client.drain()),
            "SubscribeRuntimeEvents": lambda: read(client.subscribe_runtime_events()),
            "GetKvConnectorInfo": client.kv_connector_info,
            "Embed": lambda: client.embed(pb.EmbedRequest()),
            "Classify": lambda: client.classify(pb.ClassifyRequest()),
            "Score": lambda: client.score(pb.ScoreRequest()),
        }
        for rpc, call in calls.items():
            with pytest.raises(NotInRevisionError, match=f"split revision has no {rpc}") as caught:
                await call()
            assert caught.value.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE
            assert caught.value.status is StatusCode.UNIMPLEMENTED
        message = pb.GenerateRequest(request_id="r", prompt="p", metadata={"a": "b"})
        with pytest.raises(OpenEngineError, match="split revision") as refused:
            await read(client.generate(message))
        assert refused.value.field == "metadata"
    assert server.calls == ([QUESTION] if revision == "auto" else [])


async def test_both_transports_of_an_error(server: ScriptedServer, client: Client) -> None:
    server.scripts["Abort"] = rejecting(errors.request_not_found("r"))
    with pytest.raises(OpenEngineError, match="not known") as caught:
        await client.abort("r")
    assert caught.value.code == pb.ERROR_CODE_REQUEST_NOT_FOUND
    assert caught.value.status is StatusCode.NOT_FOUND
    assert (caught.value.details, caught.value.retry_after_ms) == ({}, None)
    error = split.EngineError(code=split.ERROR_CODE_DRAINING, message="away", retryable=True)
    server.stream("Generate", split.GenerateResponse(error=error))
    server.stream("SubscribeKvEvents", split.SubscribeKvEventsResponse(error=error))
    for stream in (client.generate("p"), client.subscribe_kv_events()):
        with pytest.raises(RequestFailed, match="away") as failed:
            await read(stream)
        assert failed.value.code == pb.ERROR_CODE_DRAINING
        assert failed.value.retryable


@pytest.mark.parametrize("services", [CONTRACT, SPLIT], ids=["openengine", "split"])
async def test_a_server_that_does_not_fit(services: Any) -> None:
    async with scripted_server(services=services) as server:
        engine = pb.EngineInfo(schema_revision=2, minimum_client_revision=2)
        server.answer("GetEngineInfo", engine)
        info = split.ServerInfo(schema_revision=2, minimum_client_revision=2)
        server.answer("GetServerInfo", info)
        async with Client(server.target) as client:
            with pytest.raises(OpenEngineError, match="clients of schema revision 2"):
                await client.require_compatible()


# How the client finds out.


def test_a_revision_that_is_none() -> None:
    with pytest.raises(ValueError, match="auto, openengine, split"):
        Client("127.0.0.1:1", revision="v2")
    assert CHOICES == ("auto", "openengine", "split")


async def test_a_server_of_the_split_revision_is_asked_once(server: ScriptedServer) -> None:
    async with Client(server.target) as client:
        assert client.revision is None
        await asyncio.gather(*(client.health() for _ in range(5)))
        await client.health()
        assert client.revision == "split"
    assert server.calls == [QUESTION, *[f"/{CONTROL_NAME}/Health"] * 6]


@pytest.mark.parametrize("known", [True, False], ids=["answers", "refuses with an EngineError"])
async def test_a_server_of_the_contract_is_asked_once(known: bool) -> None:
    async with scripted_server() as server:
        server.answer("Health", pb.HealthResponse())
        if known:
            server.answer("GetEngineInfo", pb.EngineInfo())
        async with Client(server.target) as client:
            await asyncio.gather(*(client.health() for _ in range(5)))
            assert client.revision == "openengine"
            with pytest.raises(OpenEngineError, match="not implemented"):
                await client.load()
        assert server.calls.count(QUESTION) == 1


async def test_the_contract_is_taken_where_both_are_there() -> None:
    async with serve() as service, Client(service.target) as client:
        await client.health()
        assert client.revision == "openengine"


@pytest.mark.parametrize("revision", ["openengine", "split"])
async def test_who_says_the_revision_is_not_asked_for_it(revision: str) -> None:
    services = CONTRACT if revision == "openengine" else SPLIT
    async with scripted_server(services=services) as server:
        health = pb.HealthResponse if revision == "openengine" else split.HealthResponse
        server.answer("Health", health())
        async with Client(server.target, revision=revision) as client:
            assert client.revision == revision
            await client.health()
        assert server.calls == [f"/{services[-1].full_name}/Health"]


async def test_a_server_that_starts_is_one_of_the_contract() -> None:
    async with serve(ready=False) as service, Client(service.target) as client:
        assert (await client.health()).state == pb.HEALTH_STATE_STARTING
        assert client.revision == "openengine"
        with pytest.raises(OpenEngineError, match="starting"):
            await client.engine_info()


@pytest.mark.parametrize(
    "status", [StatusCode.UNAVAILABLE, StatusCode.UNAUTHENTICATED, StatusCode.UNKNOWN]
)
async def test_a_bare_status_says_nothing_about_the_service(
    tmp_path: Path, status: StatusCode
) -> None:
    address = f"unix:{tmp_path}/s"
    async with Client(address) as client:
        async with plain_server(lambda path: (status, "not yet"), address) as (_, calls):
            with pytest.raises(OpenEngineError, match="not yet") as caught:
                await client.health()
            assert caught.value.status is status
            assert client.revision is None
            away = status is StatusCode.UNAVAILABLE
            assert calls == [QUESTION, *([] if away else [f"/{SERVICE_NAME}/Health"])]
        async with scripted_server(address, services=SPLIT) as server:
            server.answer("Health", split.HealthResponse(state=split.HEALTH_STATE_READY))
            await up(client)
            assert client.revision == "split"


@pytest.mark.parametrize("revision", ["openengine", "split"])
async def test_a_server_that_is_away_is_asked_when_it_is_back(
    tmp_path: Path, revision: str
) -> None:
    address = f"unix:{tmp_path}/s"
    services = CONTRACT if revision == "openengine" else SPLIT
    async with Client(address) as client:
        with pytest.raises(OpenEngineError) as caught:
            await client.health()
        assert caught.value.status is StatusCode.UNAVAILABLE
        assert client.revision is None
        async with scripted_server(address, services=services) as server:
            health = pb.HealthResponse if revision == "openengine" else split.HealthResponse
            server.answer("Health", health())
            await up(client)
            assert client.revision == revision


async def up(client: Client) -> None:
    """Call until the connection, which is tried again after a while, is there."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                await client.health()
            except OpenEngineError as error:
                if error.status is not StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)
            else:
                return


async def test_a_server_that_fails_to_say() -> None:
    """Another engine's: its Health is to be had where the rest is not."""

    async def failing(request: object, context: Context) -> None:
        await context.abort(StatusCode.FAILED_PRECONDITION, "loading")

    async with scripted_server() as server:
        server.scripts["GetEngineInfo"] = failing
        server.answer("Health", pb.HealthResponse(state=pb.HEALTH_STATE_STARTING))
        async with Client(server.target) as client:
            assert (await client.health()).state == pb.HEALTH_STATE_STARTING
            assert client.revision == "openengine", "its Health says as much"
            await client.health()
        assert server.calls.count(QUESTION) == 1


async def test_a_server_of_neither_revision(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"

    def nothing(path: str) -> tuple[StatusCode, str]:
        return StatusCode.UNIMPLEMENTED, "not here"

    async with Client(address) as client:
        async with plain_server(nothing, address) as (_, calls):
            with pytest.raises(OpenEngineError, match=f"neither {SERVICE_NAME} nor") as caught:
                await client.health()
            assert caught.value.status is StatusCode.UNIMPLEMENTED
            assert calls == [QUESTION, f"/{CONTROL_NAME}/Health"]
            with pytest.raises(OpenEngineError, match="neither"):
                await read(client.generate("p"))
            assert client.revision is None
        # A proxy that had no server yet.
        async with scripted_server(address) as server:
            server.answer("Health", pb.HealthResponse())
            await up(client)
            assert client.revision == "openengine"


async def test_a_method_that_another_engine_has_not(server: ScriptedServer) -> None:
    async def absent(request: object, context: Context) -> None:
        await context.abort(StatusCode.UNIMPLEMENTED, "Method not implemented!")

    server.scripts["ListLoras"] = absent
    async with Client(server.target) as client:
        await client.health()
        for _ in range(2):
            with pytest.raises(OpenEngineError, match=r"^Method not implemented!$"):
                await client.list_loras()
        assert client.revision == "split"
    assert server.calls.count(QUESTION) == 1


async def test_a_deadline_holds_for_the_question_too(server: ScriptedServer) -> None:
    asked = asyncio.Event()

    async def silent(request: object, context: Context) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with scripted_server() as contract:
        contract.scripts["GetEngineInfo"] = silent
        contract.answer("Health", pb.HealthResponse())
        async with Client(contract.target) as client:
            endless = asyncio.create_task(client.health())
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asked.wait()
                # Behind the other's question, and with one of its own.
                for first in (True, False):
                    if not first:
                        endless.cancel()
                        await asyncio.wait([endless])
                        await contract.cancelled.wait()
                    with pytest.raises(OpenEngineError) as caught:
                        await client.health(timeout=0.5)
                    assert caught.value.status is StatusCode.DEADLINE_EXCEEDED
            assert client.revision is None
            contract.answer("GetEngineInfo", pb.EngineInfo())
            await client.health()
            assert client.revision == "openengine"


# The commands.


async def test_info_shows_what_was_spoken(server: ScriptedServer) -> None:
    server.answer("GetServerInfo", split.ServerInfo(engine_name="other", schema_revision=1))
    for arguments in ((), ("--revision", "split")):
        result = await run("info", *arguments, "--target", server.target)
        assert result.out.splitlines() == [
            "revision: split",
            "engine",
            "  engine_name: other",
            "  schema_revision: 1",
        ]
    result = await run("info", "--json", "--target", server.target)
    assert json.loads(result.out)["revision"] == "split"
    result = await run("info", "--revision", "openengine", "--target", server.target)
    assert (result.code, result.out) == (1, "")


@pytest.mark.parametrize("revision", ["split", "auto"])
@pytest.mark.parametrize(
    ("command", "rpc"), [("drain", "Drain"), ("events", "SubscribeRuntimeEvents")]
)
async def test_commands_that_the_split_revision_has_not(
    server: ScriptedServer, command: str, rpc: str, revision: str
) -> None:
    result = await run(command, "--revision", revision, "--target", server.target)
    assert (result.code, result.out) == (2, "")
    assert f"the split revision has no {rpc}" in result.err
    assert len(result.err.splitlines()) == 1
    assert server.calls == ([QUESTION] if revision == "auto" else [])


async def test_top_does_without_events(server: ScriptedServer) -> None:
    server.answer("GetLoad", split.LoadInfo(running_requests=3))
    server.answer("GetServerInfo", split.ServerInfo(engine_name="other"))
    async with shown(server.target, Time()) as screen:
        text = await screen.text()
    assert " READY " in text
    assert "requests   3 running" in text
    assert "the split revision has no SubscribeRuntimeEvents" in text


async def test_hashes_of_the_split_revision_are_readable(server: ScriptedServer) -> None:
    block = split.KvBlockHash(value=b"-12", encoding="decimal_int64")
    removed = split.BlockRemoved(block_hashes=[block], medium=split.STORAGE_MEDIUM_GPU)
    batch = split.KvEventBatch(events=[split.KvEvent(block_removed=removed)])
    server.stream("SubscribeKvEvents", split.SubscribeKvEventsResponse(batch=batch))
    result = await run("kv-events", "--target", server.target)
    assert result.out.endswith("removed medium=gpu blocks=-12\n")


TALKING = sorted(COMMANDS.keys() - {"demo-model", "kv-bridge"})
"""The commands that talk to a server."""


@pytest.mark.parametrize("name", TALKING)
def test_every_command_takes_the_revision(name: str) -> None:
    parser = argparse.ArgumentParser()
    COMMANDS[name].add_arguments(parser)
    needed = ["p"] if name == "generate" else []
    assert parser.parse_args(needed).revision == "auto"
    assert parser.parse_args([*needed, "--revision", "split"]).revision == "split"

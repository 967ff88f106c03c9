"""gRPC and vLLM's own HTTP server on one engine: in our process, and as a plugin in `vllm serve`.

Our process serves both with mutual TLS. Two engines are started, and two more that are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2

from openengine_vllm.client import OpenEngineError, generate_request
from openengine_vllm.protocol import v1 as pb
from tests.engine.peers import EngineSlot, Peer, connected
from tests.engine.streams import Output
from tests.support.calls import (
    ENDLESS_FLAGS,
    ENDLESS_TOKENS,
    RunningCall,
    eventually,
    standard_status,
)
from tests.support.certificates import Authority
from tests.support.kv_messages import BlockSet
from tests.support.models import model_dir
from tests.support.processes import Footprint, engine_core, footprint
from tests.support.server import ENGINE_FLAGS, STOP_SECONDS, ServerProcess, start_server
from tests.support.vllm_server import start_vllm

pytestmark = pytest.mark.timeout(600)

PAIRS = 32
TOKENS = 24
DRAIN_SECONDS = 2
FLAGS = (
    *("--served-model-name", "tiny"),
    *("--dtype", "float32"),
    *("--max-num-seqs", str(2 * PAIRS)),
    # Ports of vLLM's own choice, on the address that it has for itself.
    *(
        "--kv-events-config",
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}',
    ),
    *ENGINE_FLAGS,
    *ENDLESS_FLAGS,
)


@functools.cache
def authority() -> Authority:
    """Who vouches for our process and its clients."""
    return Authority(Path(tempfile.mkdtemp(prefix="oe-ca-")) / "ca")


def own() -> contextlib.AbstractContextManager[ServerProcess]:
    """A process of ours, which takes no client without a certificate."""
    key, certificate = authority().issue("server")
    tls = ("--tls-cert", str(certificate), "--tls-key", str(key))
    mutual = ("--tls-client-ca", str(authority().certificate))
    model = ("--model", str(model_dir("tiny_llama")))
    ports = ("--port", "0", "--http-port", "0", "--drain-timeout", str(DRAIN_SECONDS))
    environment: Any = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    return start_server(*model, *ports, *tls, *mutual, *FLAGS, **environment)


def stock() -> contextlib.AbstractContextManager[ServerProcess]:
    """A `vllm serve` with the plugin."""
    return start_vllm(
        model_dir("tiny_llama"),
        *FLAGS,
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_PLUGINS="openengine",
        OPENENGINE_PORT="0",
        OPENENGINE_DRAIN_TIMEOUT=str(DRAIN_SECONDS),
        VLLM_SERVER_DEV_MODE="1",
        VLLM_HOST_IP="127.0.0.1",
    )


Start = Callable[[], contextlib.AbstractContextManager[ServerProcess]]


@pytest.fixture(scope="module", params=[own, stock], ids=["own", "stock"])
def server(request: pytest.FixtureRequest, engines: EngineSlot) -> Iterator[ServerProcess]:
    """Either process; the last test of each stops it."""
    start: Start = request.param
    engines.clear()
    with start() as process:
        yield process


@dataclass
class Both:
    """Connections of both kinds to one server."""

    peer: Peer
    http: aiohttp.ClientSession
    url: str

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """An answer of HTTP's, which has to be one."""
        status, answer = await self.try_post(path, **body)
        assert status == 200, answer
        return answer

    async def try_post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """A status of HTTP's and what comes with it."""
        async with self.http.post(self.url + path, json={"model": "tiny", **body}) as response:
            return response.status, await response.json()

    async def complete(self, prompt: str, **options: Any) -> dict[str, Any]:
        """One choice of /v1/completions, greedy."""
        body = {"max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, **options}
        [choice] = (await self.post("/v1/completions", prompt=prompt, **body))["choices"]
        return dict(choice)

    async def generate(self, prompt: str, response: pb.ResponseOptions | None = None) -> Output:
        """The output of Generate, greedy."""
        request = generate_request(prompt, {"max_tokens": TOKENS, "temperature": 0})
        if response is not None:
            request.response.CopyFrom(response)
        return (await self.peer.send(request)).only

    async def idle(self) -> bool:
        """Whether nothing runs or waits."""
        load = await self.peer.client.load()
        return load.running_requests == load.queued_requests == load.running_tokens == 0


@dataclass
class HttpStream:
    """An endless completion over HTTP, read as it comes."""

    task: asyncio.Task[None]
    started: asyncio.Event = field(default_factory=asyncio.Event)
    chunks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def finish(self) -> str | None:
        """How it ended."""
        choices = [chunk["choices"][0] for chunk in self.chunks if chunk.get("choices")]
        return choices[-1]["finish_reason"] if choices else None


def stream(both: Both, prompt: str, **options: Any) -> HttpStream:
    """Begin one."""

    async def read() -> None:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": ENDLESS_TOKENS,
            "ignore_eos": True,
            "stream": True,
            **options,
        }
        async with both.http.post(both.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            async for line in response.content:
                data = line.decode().removeprefix("data: ").strip()
                if data and data != "[DONE]":
                    running.chunks.append(json.loads(data))
                    running.started.set()

    running = HttpStream(asyncio.ensure_future(read()))
    return running


def call(both: Both, prompt: str) -> RunningCall:
    """An endless Generate."""
    options = {"max_tokens": ENDLESS_TOKENS, "ignore_eos": True}
    return RunningCall(both.peer.channel, generate_request(prompt, options))  # type: ignore[arg-type]


def holdings(server: ServerProcess) -> Footprint:
    """What has to go with the process. `vllm serve` leaves the sockets between its processes."""
    held = footprint(server)
    return replace(held, files=frozenset(file for file in held.files if not file.is_socket()))


async def stops_serving(both: Both) -> bool:
    """Whether grpc.health.v1 says so, or the process has ended before anybody asked."""
    try:
        status = await standard_status(both.peer.channel)
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return status == health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def connect(server: ServerProcess) -> AsyncIterator[Both]:
    if "--tls-cert" not in cast("list[str]", server.process.args):
        async with connected(server) as peer, aiohttp.ClientSession() as http:
            yield Both(peer, http, "http://" + server.ready["http"])
        return
    key, certificate = authority().issue("client")
    credentials = grpc.ssl_channel_credentials(
        authority().certificate.read_bytes(), key.read_bytes(), certificate.read_bytes()
    )
    context = ssl.create_default_context(cafile=str(authority().certificate))
    context.load_cert_chain(certificate, key)
    connector = aiohttp.TCPConnector(ssl=context)
    async with (
        connected(server, credentials) as peer,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        yield Both(peer, http, "https://" + server.ready["http"])


@pytest.fixture
async def both(server: ServerProcess) -> AsyncIterator[Both]:
    async with connect(server) as connections:
        yield connections


async def test_one_engine_gives_both_the_same_tokens(both: Both) -> None:
    prompts = [f"The {index}th time that the fox" for index in range(PAIRS)]
    choices, outputs = await asyncio.gather(
        asyncio.gather(*(both.complete(prompt) for prompt in prompts)),
        asyncio.gather(*(both.generate(prompt) for prompt in prompts)),
    )
    for choice, output in zip(choices, outputs, strict=True):
        assert output.token_ids == choice["token_ids"]
        assert output.text == choice["text"]


async def test_candidates_of_one_do_not_spoil_those_of_the_other(both: Both) -> None:
    """Each kind over each transport, all at once, as each is when it is alone."""
    ids = [300, 8, 999]
    listed = pb.ResponseOptions(
        output_candidates=pb.CandidateTokenSelection(token_ids=pb.TokenIds(ids=ids))
    )
    ranked = pb.ResponseOptions(output_candidates=pb.CandidateTokenSelection(top_n=4))
    message = [{"role": "user", "content": "Where is the fox?"}]
    chat = {"messages": message, "max_tokens": TOKENS, "temperature": 0, "logprobs": True}

    def http_scores(**options: Any) -> Callable[[], Any]:
        async def scores() -> Any:
            answer = await both.post("/v1/chat/completions", **chat, **options)
            rows = answer["choices"][0]["logprobs"]["content"]
            return [[c["logprob"] for c in row["top_logprobs"]] for row in rows]

        return scores

    def grpc_scores(response: pb.ResponseOptions) -> Callable[[], Any]:
        async def scores() -> Any:
            output = await both.generate("The fox", response)
            return [[c.logprob for c in record.candidates] for record in output.records]

        return scores

    kinds = (
        http_scores(top_logprobs=4),
        http_scores(top_logprobs=3, logprob_token_ids=ids),
        grpc_scores(ranked),
        grpc_scores(listed),
    )
    alone = [await kind() for kind in kinds]
    for rows, width in zip(alone, (4, 3, 4, 3), strict=True):
        assert len(rows) == TOKENS
        assert all(len(row) >= width and all(map(math.isfinite, row)) for row in rows)
    together = await asyncio.gather(*(kind() for _ in range(4) for kind in kinds))
    for index, rows in enumerate(together):
        wanted = alone[index % len(kinds)]
        for row, wanted_row in zip(rows, wanted, strict=True):
            assert row == pytest.approx(wanted_row, abs=1e-3)


async def test_no_client_without_a_certificate(server: ServerProcess, both: Both) -> None:
    address = server.ready["http"]
    if both.url.startswith("http://"):
        async with both.http.get(f"{both.url}/health") as response:
            assert response.status == 200
        return
    context = ssl.create_default_context(cafile=str(authority().certificate))
    for url in (f"https://{address}/health", f"http://{address}/health"):
        connector = aiohttp.TCPConnector(ssl=context)
        async with aiohttp.ClientSession(connector=connector) as http:
            with pytest.raises(aiohttp.ClientError):
                await http.get(url)
    async with both.http.get(f"{both.url}/health") as response:
        assert response.status == 200


async def test_guides_of_both(both: Both) -> None:
    """One that vLLM's own server would give to another backend does not change ours."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}}
    await both.try_post(
        "/v1/completions", prompt="x", max_tokens=4, structured_outputs={"json": schema}
    )
    for _ in range(2):
        choice = await both.complete("x", structured_outputs={"choice": ["yes", "no"]})
        assert choice["text"] in ("yes", "no")
        request = generate_request("x", {"max_tokens": 9})
        request.guided.ebnf_grammar = 'root ::= "aa" | "b"'
        assert (await both.peer.send(request)).only.text in ("aa", "b")


async def test_load_counts_both_and_abort_ends_both(both: Both) -> None:
    running = [stream(both, "Once upon"), stream(both, "A time", n=2, temperature=1)]
    mine = call(both, "The fox")
    for one in running:
        await one.started.wait()
    await mine.tokens(5)

    async def counted() -> bool:
        load = await both.peer.client.load()
        counts = (load.running_requests, load.queued_requests, load.decode_batch_size)
        return counts == (4, 0, 4)

    await eventually(counted, "four sequences run")
    load = await both.peer.client.load()
    assert load.running_tokens > 4 * 2
    assert load.used_kv_blocks >= 4
    assert float(load.attributes["generation_tokens_per_second"]) > 0
    aborted = await both.peer.client.abort_all()
    assert aborted.status == pb.ABORT_STATUS_ABORTED
    await asyncio.wait_for(asyncio.gather(*(one.task for one in running)), 60)
    assert [one.finish for one in running] == ["abort", "abort"]
    assert await mine.end() is grpc.StatusCode.OK
    await eventually(both.idle, "idle")

    gone = stream(both, "Once upon")
    await gone.started.wait()
    gone.task.cancel()
    await eventually(both.idle, "a client that goes away takes its request along")
    load = await both.peer.client.load()
    assert load.used_kv_blocks == load.waiting_tokens == 0


async def test_a_reset_over_http_is_told_at_once(both: Both) -> None:
    """To subscribers of KV events, though the engine is idle and vLLM says nothing yet."""
    sources = (await both.peer.client.kv_event_sources()).sources
    assert [(s.transport, s.encoding) for s in sources] == [
        ("grpc", "protobuf"),
        ("zmq", "protobuf"),
        ("zmq", "msgpack"),
    ]
    assert sources[2].endpoint_addr.host == "127.0.0.1"
    assert sources[2].endpoint_addr.port
    prompt = "The fox " * 300
    await both.complete(prompt, max_tokens=1)
    await eventually(both.idle, "idle")
    reader = BlockSet()
    stream = both.peer.client.subscribe_kv_events(include_snapshot=True)
    reader.apply(snapshot := (await anext(stream)).batch)
    assert reader.blocks
    for query in ("", "?reset_external=true"):
        assert (await both.post(f"/reset_prefix_cache{query}"))["success"]
        reader.apply(cleared := (await anext(stream)).batch)
        assert [event.WhichOneof("event") for event in cleared.events] == ["all_blocks_cleared"]
    assert cleared.sequence_number == snapshot.sequence_number + 2
    await both.complete(prompt, max_tokens=1)
    reader.apply(stored := (await anext(stream)).batch)
    assert stored.sequence_number == cleared.sequence_number + 1
    assert {event.WhichOneof("event") for event in stored.events} == {"block_stored"}
    assert reader.blocks

    running = call(both, "The fox")
    await running.tokens(5)
    assert not (await both.post("/reset_prefix_cache"))["success"]
    await both.peer.client.abort_all()
    await running.end()
    await eventually(both.idle, "idle")
    joined = both.peer.client.subscribe_kv_events(include_snapshot=True)
    last = (await anext(joined)).batch.sequence_number
    while stored.sequence_number < last:
        reader.apply(stored := (await anext(stream)).batch)
        assert not any(event.HasField("all_blocks_cleared") for event in stored.events)
    await joined.aclose()
    await stream.aclose()


async def test_drain_ends_both_and_the_process(server: ServerProcess, both: Both) -> None:
    held = holdings(server)
    running, mine = stream(both, "Once upon"), call(both, "The fox")
    await running.started.wait()
    await mine.tokens(5)
    drain = both.peer.stub.Drain(pb.DrainRequest(stop_accepting_new_requests=True))
    first = await anext(aiter(drain))
    assert (first.state, first.in_flight_requests) == (pb.DRAIN_STATE_STARTED, 2)
    for streams in (False, True):
        status, answer = await both.try_post(
            "/v1/completions", prompt="late", max_tokens=1, stream=streams
        )
        assert status == 503, answer
    with pytest.raises(OpenEngineError) as refused:
        await both.peer.client.complete("late", max_tokens=1)
    assert refused.value.code == pb.ERROR_CODE_DRAINING
    async with both.http.get(both.url + "/health") as response:
        assert response.status == 200
    seen = len(running.chunks)
    await eventually(lambda: len(running.chunks) > seen, "what runs goes on")

    # It takes longer than the drain's time: both are aborted.
    assert await asyncio.to_thread(server.stop) == 0
    await running.task
    assert running.finish == "abort"
    assert await mine.end() is grpc.StatusCode.OK
    [error] = mine.errors
    assert error.code == pb.ERROR_CODE_DRAINING
    held.wait_gone()


@pytest.mark.parametrize("start", [own, stock])
async def test_killed_engine_ends_both_and_the_process(start: Start, engines: EngineSlot) -> None:
    engines.clear()
    with start() as server:
        held = holdings(server)
        async with connect(server) as both:
            running, mine = stream(both, "Once upon"), call(both, "The fox")
            await running.started.wait()
            await mine.tokens(5)
            assert await standard_status(both.peer.channel) == (
                health_pb2.HealthCheckResponse.SERVING
            )
            engine_core(server).kill()
            assert await mine.end() is grpc.StatusCode.OK
            [error] = mine.errors
            assert (error.code, error.retryable) == (pb.ERROR_CODE_INTERNAL, True)
            await eventually(lambda: stops_serving(both), "it says that it does not serve")
            with contextlib.suppress(aiohttp.ClientError):
                await running.task
            assert running.finish is None
        status = await asyncio.to_thread(server.process.wait, STOP_SECONDS)
        assert start is stock or status == 1
        held.wait_gone()

"""The servers that the tests share, and a test's connection to one of them.

An engine takes its time to start and a core to run, so no more than one runs at a time and the
tests are ordered by the one they want (see conftest.py).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import grpc
from grpc import aio

from openengine_vllm.client import Client, GenerateOptions, generate_request
from openengine_vllm.client.requests import Prompt
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.channel import client_options
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub
from tests.engine.streams import Generation, gather
from tests.support.calls import ENDLESS_FLAGS
from tests.support.models import model_dir
from tests.support.server import ENGINE_FLAGS, ServerProcess, start_server

TINY_FLAGS = (
    "--served-model-name",
    "tiny",
    "tiny-alias",
    "--max-num-seqs",
    "8",
    "--enable-prefix-caching",
    *ENGINE_FLAGS,
)
"""The engine of the tiny model, the same for our server and for those it is compared with."""

SCORED_SLOTS = 4
"""Sequences that the engine of the scored model runs at once."""
SCORED_FLAGS = (
    *("--served-model-name", "scored"),
    *("--dtype", "float32"),
    *("--max-logprobs", "-1"),
    *("--scheduling-policy", "priority"),
    *("--max-num-seqs", str(SCORED_SLOTS)),
    *("--kv-events-config", '{"enable_kv_cache_events": false}'),
    "--enable-prefix-caching",
    *ENGINE_FLAGS,
)
"""An engine that can do more than the first, and whose scores are exact."""

MULTI_EOS_SLOTS = 2
"""Sequences that the engine of the multi-EOS model runs at once."""
MULTI_EOS_CAPACITY = 4
"""Sequences that its server admits."""
MULTI_EOS_QUEUED_TOKENS = 500
"""vLLM's own limit on prompt tokens in its queue."""
MULTI_EOS_MAX_TOKENS = 23
"""What its generation config says about max_new_tokens."""
MULTI_EOS_REQUEST_BYTES = 1024 * 1024
"""The largest request message."""
MULTI_EOS_RESPONSE_BYTES = 256 * 1024
"""The largest response message."""

OPERATED_SLOTS = 2
"""Sequences that the engine of the operated server runs at once."""

_SERVERS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "demo": ("demo", (), {"warm": False, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
    "tiny": ("tiny_llama", TINY_FLAGS, {}),
    "operated": (
        "tiny_llama",
        (
            *("--max-num-seqs", str(OPERATED_SLOTS)),
            *("--metrics-port", "0"),
            "--enable-prefix-caching",
            *ENGINE_FLAGS,
            *ENDLESS_FLAGS,
        ),
        {},
    ),
    "scored": ("tiny_llama", SCORED_FLAGS, {}),
    "multi_eos": (
        "tiny_llama_multi_eos",
        (
            *("--dtype", "float32"),
            *("--max-num-seqs", str(MULTI_EOS_SLOTS)),
            *("--max-concurrent-requests", str(MULTI_EOS_CAPACITY)),
            *("--max-num-queued-tokens", str(MULTI_EOS_QUEUED_TOKENS)),
            *("--max-request-bytes", str(MULTI_EOS_REQUEST_BYTES)),
            *("--max-response-bytes", str(MULTI_EOS_RESPONSE_BYTES)),
            *("--override-generation-config", f'{{"max_new_tokens": {MULTI_EOS_MAX_TOKENS}}}'),
            "--no-enable-prefix-caching",
            "--enable-log-requests",
            *ENGINE_FLAGS,
        ),
        {"VLLM_LOGGING_LEVEL": "INFO"},
    ),
}


class EngineSlot:
    """Room for one engine: taking it for another ends the one that is there."""

    def __init__(self) -> None:
        self._name = ""
        self._server: ServerProcess | None = None
        self._stack = contextlib.ExitStack()

    def server(self, name: str) -> ServerProcess:
        """The shared server of this name, started unless it runs."""
        if self._server is None or self._name != name or self._server.process.poll() is not None:
            self.clear()
            model, flags, environment = _SERVERS[name]
            path = model if model == "demo" else str(model_dir(model))
            arguments = ("--model", path, "--port", "0", *flags)
            self._server = self._stack.enter_context(start_server(*arguments, **environment))
            self._name = name
        return self._server

    def clear(self) -> None:
        """End what runs."""
        self._server = None
        self._stack.close()


@dataclass
class Peer:
    """A server, and connections to it that last for one test."""

    server: ServerProcess
    channel: aio.Channel
    stub: OpenEngineStub
    client: Client

    async def send(self, request: pb.GenerateRequest) -> Generation:
        """A request's whole stream, checked."""
        return await gather(self.stub.Generate(request), request)

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """As :meth:`send`, for a prompt with options."""
        return await self.send(generate_request(prompt, options))

    async def is_ready(self) -> bool:
        """Whether Health says READY."""
        health = await self.stub.Health(pb.HealthRequest())
        return bool(health.state == pb.HEALTH_STATE_READY)


@contextlib.asynccontextmanager
async def connected(
    server: ServerProcess, credentials: grpc.ChannelCredentials | None = None
) -> AsyncIterator[Peer]:
    """A peer for the running event loop; with credentials over TLS."""
    opened = (
        aio.insecure_channel(server.target, options=client_options())
        if credentials is None
        else aio.secure_channel(server.target, credentials, options=client_options())
    )
    async with opened as channel, Client(server.target, credentials=credentials) as client:
        yield Peer(server, channel, OpenEngineStub(channel), client)


@dataclass
class CompletionsServer:
    """A running `vllm serve`."""

    url: str

    def complete(self, **body: object) -> dict[str, Any]:
        """The answer of /v1/completions."""
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps({"model": "tiny", **body}).encode(),
            {"content-type": "application/json"},
        )
        with _opener().open(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def alive(self) -> bool:
        """Whether it serves."""
        with contextlib.suppress(OSError), _opener().open(f"{self.url}/health", timeout=5):
            return True
        return False


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any], log: Path) -> Iterator[None]:
    """Have a process gone when the context ends, and its log in the report when that fails."""
    try:
        yield
    except BaseException as error:
        error.add_note(log.read_text(errors="replace")[-4000:])
        raise
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

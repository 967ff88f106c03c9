"""Dynamo's own client of Inference and Control, from the PyPI package ``ai-dynamo-runtime``.

Two processes, as in a deployment: the sidecar of one engine, which registers in Dynamo's
discovery (here a folder), and a caller that finds it there. Dynamo's only sidecar for these
services was written for TensorRT-LLM's server, and says so in what it refuses by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.calls import PATIENCE_SECONDS, eventually
from tests.support.environment import server_environment

ENDPOINT = "dynamo.backend.generate"
_SIDECAR = "import sys; from dynamo._core import backend; backend._run_trtllm_sidecar(sys.argv[1:])"
_LOG_CHARACTERS = 4000


class Caller:
    """Sends requests through Dynamo's runtime (see dynamo_caller.py), one at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def read(self) -> dict[str, Any]:
        """The next thing that it says.

        Raises:
            AssertionError: it has ended, or says nothing.
        """
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            line = await self.process.stdout.readline()
        assert line, "the caller has ended"
        said: dict[str, Any] = json.loads(line)
        return said

    def send(self, request_id: str, request: Mapping[str, Any], items: int | None = None) -> None:
        """Begin a request, to be dropped after so many items."""
        assert self.process.stdin is not None
        asked = {"id": request_id, "request": request, "items": items}
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")

    async def run(
        self, request_id: str, request: Mapping[str, Any], items: int | None = None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """A request's items and, where it failed, its error."""
        self.send(request_id, request, items)
        given: list[dict[str, Any]] = []
        while True:
            said = await self.read()
            assert said["id"] == request_id
            if "item" not in said:
                return given, said.get("error")
            given.append(said["item"])


@dataclass
class Dynamo:
    """What runs."""

    sidecar: asyncio.subprocess.Process
    caller: Caller

    def addresses(self) -> list[tuple[str, int]]:
        """Where the two listen."""
        return [
            (connection.laddr.ip, connection.laddr.port)
            for process in (self.sidecar, self.caller.process)
            for connection in psutil.Process(process.pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]


@contextlib.asynccontextmanager
async def dynamo(target: str, model: Path, folder: Path, *flags: str) -> AsyncIterator[Dynamo]:
    """Both processes on the server at ``target``; dead, with their ports free, afterwards.

    Args:
        model: what the sidecar calls the model, and where it finds the tokenizer.
        folder: for discovery and logs.
        flags: more of the sidecar's.
    """
    local = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
    environment = server_environment(
        DYN_FILE_KV=str(folder / "discovery"), **dict.fromkeys(local, "127.0.0.1")
    )
    arguments = ("--grpc-endpoint", target, "--model-path", str(model))
    planes = ("--discovery-backend=file", "--request-plane=tcp", "--event-plane=zmq")
    sidecar = (sys.executable, "-c", _SIDECAR, *arguments, *planes, *flags)
    caller = (sys.executable, "-m", "tests.support.dynamo_caller", ENDPOINT)
    async with (
        _process(sidecar, environment, folder / "sidecar.log") as sidecar_process,
        _process(caller, environment, folder / "caller.log") as caller_process,
    ):
        both = Dynamo(sidecar_process, Caller(caller_process))
        assert await both.caller.read() == {"instances": 1}
        addresses = both.addresses()
        try:
            yield both
        finally:
            for process in (sidecar_process, caller_process):
                await _kill(process)
            await eventually(lambda: all(map(_is_free, addresses)), f"{addresses} are free")


@contextlib.asynccontextmanager
async def _process(
    command: tuple[str, ...], environment: dict[str, str], log: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    with log.open("w") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=stderr, env=environment
        )
    try:
        yield process
    except BaseException as error:
        error.add_note(_tail(log))
        raise
    finally:
        await _kill(process)


def _tail(log: Path) -> str:
    return f"{log.name}:\n{log.read_text(errors='replace')[-_LOG_CHARACTERS:]}"


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _is_free(address: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_server(address):
        return True
    return False

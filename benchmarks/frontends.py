"""The frontends, each started on an engine of its own with the same engine flags."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.processes import BenchmarkError, Child, child
from benchmarks.targets import MODEL_NAME
from benchmarks.timing import Timings
from benchmarks.workload import Pass, Shape

IN_PROCESS = "AsyncLLM"
HTTP = "vLLM HTTP"
OPENENGINE = "openengine_vllm"
SPLIT = "openengine_vllm (split)"
FRONTENDS = {"inprocess": IN_PROCESS, "http": HTTP, "openengine": OPENENGINE, "split": SPLIT}
"""Names on the command line, and in the report."""
_OURS = {OPENENGINE: "--grpc", SPLIT: "--split"}
"""Those of this project's server, and how the driver is told of each."""

_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Setup:
    """What all frontends of a benchmark have in common; times in seconds."""

    model: Path
    engine_flags: tuple[str, ...]
    shape: Shape
    channels: int
    start_timeout: float
    pass_timeout: float
    logs: Path


@dataclass(frozen=True, slots=True)
class Running:
    """A frontend that can be used."""

    pid: int
    """Of the frontend process alone; the engine's processes are its children."""
    driver: Child
    pass_timeout: float

    async def run(self, run: Pass) -> Timings:
        """Have the driver do one pass.

        Raises:
            BenchmarkError: a stream failed or had a wrong number of tokens.
        """
        await self.driver.send_line(run.to_line())
        return Timings(**await _reply(self.driver, self.pass_timeout))


async def _reply(driver: Child, timeout_seconds: float) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(await driver.read_line(timeout_seconds))
    if "error" in reply:
        raise BenchmarkError(f"{driver.name}: {reply['error']}")
    return reply


def by_server(names: Sequence[str]) -> list[list[str]]:
    """The frontends grouped by the process that they need: the two revisions share theirs."""
    groups: list[list[str]] = []
    for name in names:
        shared = next((group for group in groups if name in _OURS and group[0] in _OURS), None)
        if shared is None:
            groups.append([name])
        else:
            shared.append(name)
    return groups


@asynccontextmanager
async def frontends(names: Sequence[str], setup: Setup) -> AsyncIterator[dict[str, Running]]:
    """Start frontends of one process, each with its driver; all are gone after the context."""
    async with AsyncExitStack() as stack:
        name = names[0]
        where: dict[str, list[str]] = {name: []}
        server = None
        if name == HTTP:
            server = await stack.enter_async_context(
                child(
                    "http-server",
                    _http_command(setup, port := _free_port()),
                    setup.logs,
                    speaks=False,
                )
            )
            address = f"127.0.0.1:{port}"
            await _until_healthy(server, address, setup.start_timeout)
            where[name] = ["--http", address]
        elif name in _OURS:
            server = await stack.enter_async_context(
                child("openengine-server", _openengine_command(setup), setup.logs)
            )
            address = await announced(server, setup.start_timeout)
            where = {name: [_OURS[name], address] for name in names}
        running = {}
        for number, (name, arguments) in enumerate(where.items()):
            driver = await stack.enter_async_context(
                child(f"driver-{number}", _driver_command(setup, arguments), setup.logs)
            )
            await _reply(driver, setup.start_timeout)
            running[name] = Running((server or driver).pid, driver, setup.pass_timeout)
        yield running


def _http_command(setup: Setup, port: int) -> list[str]:
    # The module behind `vllm serve`: unlike that command it starts wherever vLLM can be
    # imported, also under another distribution's name. Access logging is its own affair.
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--served-model-name={MODEL_NAME}",
        "--disable-uvicorn-access-log",
        *setup.engine_flags,
    ]


def _openengine_command(setup: Setup) -> list[str]:
    return [sys.executable, "-m", "openengine_vllm", "--port=0", *setup.engine_flags]


def _driver_command(setup: Setup, where: list[str]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "benchmarks.driver",
        f"--model={setup.model}",
        f"--prompt-tokens={setup.shape.prompt_tokens}",
        f"--output-tokens={setup.shape.output_tokens}",
        f"--channels={setup.channels}",
        *where,
        "--",
        *setup.engine_flags,
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def announced(server: Child, timeout_seconds: float) -> str:
    """The address in the server's ready line."""
    line = await server.read_line(timeout_seconds)
    found = re.search(r"\bgrpc=(\S+)", line)
    if found is None:
        raise server.error(f"said {line!r} instead of its address")
    return found.group(1)


async def _until_healthy(server: Child, address: str, timeout_seconds: float) -> None:
    try:
        async with asyncio.timeout(timeout_seconds), aiohttp.ClientSession() as session:
            while not await _is_healthy(session, address):
                server.check()
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise server.error(f"was not ready after {timeout_seconds:g} s") from None


async def _is_healthy(session: aiohttp.ClientSession, address: str) -> bool:
    try:
        async with session.get(f"http://{address}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientConnectionError:
        return False

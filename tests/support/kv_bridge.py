"""The bridge as a program of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

from tests.support.kv_publisher import ScriptedPublisher

PROGRAM = (sys.executable, "-m", "openengine_vllm")


class Bridge(NamedTuple):
    """A bridge that serves."""

    address: str
    ready: dict[str, str]
    """What else its ready line says."""
    pid: int


@contextlib.asynccontextmanager
async def kv_bridge(*arguments: str) -> AsyncIterator[Bridge]:
    """``openengine-vllm kv-bridge`` on a free port; has to end well."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        "kv-bridge",
        "--port",
        "0",
        *arguments,
        stdout=subprocess.PIPE,
        process_group=0,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("openengine ready grpc="), line
        fields = dict(word.split("=", 1) for word in line.split()[2:])
        yield Bridge(fields["grpc"], fields, process.pid)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def connections(publishers: Iterable[ScriptedPublisher]) -> list[str]:
    """The arguments that have a bridge follow these publishers."""
    arguments = []
    for publisher in publishers:
        described = publisher.described()
        assert described.replay is not None
        arguments += ["--connect", described.endpoint, "--replay", described.replay]
    return arguments

"""A stock `vllm serve` with the plugin, as a process of its own."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.support import plugin_metadata, vllm_metadata
from tests.support.environment import server_environment
from tests.support.log_lines import parse_line
from tests.support.server import READY_SECONDS, ServerProcess, end, wait_until
from tests.support.warm import WarmPopen

_LISTENING = "event=listening"


@contextlib.contextmanager
def start_vllm(model: Path, *arguments: str, **environment: str) -> Iterator[ServerProcess]:
    """One that serves HTTP and, where the environment says so, gRPC.

    It is gone, with all its processes, when the context ends. Its "ready line" has the addresses
    as that of our own process has them.
    """
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as probe:
        folder, port = Path(name), probe.getsockname()[1]
        probe.close()
        log = folder / "stderr.log"
        with log.open("w") as stderr:
            process = WarmPopen(
                [
                    *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
                    *("--host", "127.0.0.1", "--port", str(port), *arguments),
                ],
                stdout=stderr,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                text=True,
                env=plugin_metadata.environment(
                    folder / "plugin", _with_vllm_metadata(folder, environment)
                ),
                process_group=0,
            )
        server = ServerProcess(process, log)
        try:
            wait_until(
                lambda: process.poll() is not None or _healthy(port), READY_SECONDS, "vllm serve"
            )
            assert process.poll() is None, server.stderr()[-4000:]
            server.ready_line = f"openengine ready http=127.0.0.1:{port} grpc={_address(server)}"
            yield server
        finally:
            end(process)


def _with_vllm_metadata(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    found = vllm_metadata.environment(folder / "vllm")
    return {**server_environment(), "PYTHONPATH": found.get("PYTHONPATH", ""), **environment}


def _healthy(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(OSError), opener.open(f"http://127.0.0.1:{port}/health", timeout=5):
        return True
    return False


def _address(server: ServerProcess) -> str:
    lines = [line for line in server.stderr().splitlines() if _LISTENING in line]
    return parse_line(lines[-1])["address"] if lines else ""

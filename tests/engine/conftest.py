"""Fixtures for tests on a real engine, and the order in which few engines have to start.

First come the tests that start their own, then those of each shared server in turn.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.engine.cases import GREEDY
from tests.engine.peers import (
    SCORED_FLAGS,
    TINY_FLAGS,
    CompletionsServer,
    EngineSlot,
    Peer,
    connected,
    ended,
)
from tests.support import vllm_metadata
from tests.support.models import model_dir
from tests.support.server import READY_SECONDS, ServerProcess, server_environment, wait_until

_ORDER = (
    "demo",
    "completions",
    "reference",
    "tiny",
    "multi_eos",
    "random_reference",
    "scored",
    "operated",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that share an engine next to each other."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    names = getattr(item, "fixturenames", ())
    return next((rank for rank, name in enumerate(_ORDER, 1) if name in names), 0)


@pytest.fixture(scope="session")
def engines() -> Iterator[EngineSlot]:
    """The one place for an engine; tests that start their own clear it first."""
    slot = EngineSlot()
    yield slot
    slot.clear()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    """The tokenizer of the tiny models."""
    return Tokenizer.from_file(str(model_dir("tiny_llama") / "tokenizer.json"))


@pytest.fixture
def demo(engines: EngineSlot) -> ServerProcess:
    """The demo model with every default but the port."""
    return engines.server("demo")


@pytest.fixture
async def tiny(engines: EngineSlot) -> AsyncIterator[Peer]:
    """A server of the tiny model, as `tiny` and `tiny-alias`, with prefix caching."""
    async with connected(engines.server("tiny")) as peer:
        yield peer


@pytest.fixture
async def multi_eos(engines: EngineSlot) -> AsyncIterator[Peer]:
    """A server of the model with several EOS ids and defaults of its own, with small limits."""
    async with connected(engines.server("multi_eos")) as peer:
        yield peer


@pytest.fixture
async def scored(engines: EngineSlot) -> AsyncIterator[Peer]:
    """A server that scores whole vocabularies and schedules by priority, in single precision."""
    async with connected(engines.server("scored")) as peer:
        yield peer


@pytest.fixture
async def operated(engines: EngineSlot) -> AsyncIterator[Peer]:
    """A server that runs two sequences at once, each for as long as a test likes."""
    async with connected(engines.server("operated")) as peer:
        yield peer
        if peer.server.process.poll() is None:
            await peer.client.abort_all()


@pytest.fixture(scope="session")
def reference(engines: EngineSlot, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM's own `AsyncLLM` makes of the cases, by name, and its configuration."""
    return _reference("cases", TINY_FLAGS, engines, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def random_reference(
    engines: EngineSlot, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The same of the random requests."""
    return _reference("random", SCORED_FLAGS, engines, tmp_path_factory.mktemp("random"))


def _reference(
    name: str, flags: tuple[str, ...], engines: EngineSlot, folder: Path
) -> dict[str, Any]:
    engines.clear()
    log, result = folder / "stderr.log", folder / "result.json"
    arguments = (name, str(result), "--model", str(model_dir("tiny_llama")), *flags)
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.reference", *arguments],
            stdout=stderr,
            stderr=stderr,
            env=server_environment(),
        )
    with ended(process, log):
        assert process.wait(2 * READY_SECONDS) == 0
        loaded: dict[str, Any] = json.loads(result.read_text())
    return loaded


@pytest.fixture(scope="session")
def completions(
    engines: EngineSlot, tiny_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What a stock `vllm serve` answers to the greedy cases on /v1/completions, by name."""
    engines.clear()
    folder = tmp_path_factory.mktemp("completions")
    log = folder / "stderr.log"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ("serve", str(model_dir("tiny_llama")), "--host", "127.0.0.1", "--port", str(port))
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", *command, *TINY_FLAGS],
            stdout=stderr,
            stderr=stderr,
            env={**server_environment(), **vllm_metadata.environment(folder / "metadata")},
        )
    server = CompletionsServer(f"http://127.0.0.1:{port}")
    with ended(process, log):
        wait_until(
            lambda: server.alive() or process.poll() is not None, READY_SECONDS, "vllm serve"
        )
        assert process.poll() is None, "vllm serve exited"
        return {
            case.name: server.complete(
                prompt=case.prompt_for(tiny_tokenizer), return_token_ids=True, **case.vllm_options()
            )
            for case in GREEDY
        }

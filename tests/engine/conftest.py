"""Fixtures for tests on a real engine, and the order in which few engines have to start.

The tests of each shared server stay together, on one of the test processes that run side by
side (pytest-xdist); the others, which start engines of their own, are spread over what is left.
"""

from __future__ import annotations

import json
import os
import socket
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
from tests.support.environment import server_environment
from tests.support.models import model_dir
from tests.support.server import READY_SECONDS, ServerProcess, wait_until
from tests.support.warm import WarmPopen

if "PYTEST_XDIST_WORKER" in os.environ:
    # vLLM binds its threads to processors as if it were alone on the machine, and two engines
    # would spin on the same one.
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
    # The model in the scheduler's process, as vLLM can have it: two would spin for each other.
    # Tests of processes, and those of what a user starts, ask for vLLM's default.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0")

_GROUPS = {
    "demo": "demo",
    "tiny": "tiny",
    "completions": "tiny",
    "reference": "tiny",
    "multi_eos": "multi_eos",
    "scored": "scored",
    "random_reference": "scored",
    "operated": "operated",
}
"""Fixtures that need an engine, and which of them have it from the same test process."""
_OF_A_MODULE = {"demo_model", "running", "server", "workers"}
"""Fixtures that a module makes for its own tests, once."""
_ORDER = (
    *("test_hostile.py", "demo", "scored", "tiny", "test_beside_http.py"),
    *("test_cancellation.py", "operated", "test_kv_router.py", "multi_eos"),
)
"""Groups of tests, those that take longest first."""
_REFERENCES = ("completions", "reference", "random_reference")
"""Fixtures that end the shared server and start another engine for a while."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that share an engine next to each other, and on one process."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=_rank)


def _fixtures(item: pytest.Item) -> tuple[str, ...]:
    return tuple(getattr(item, "fixturenames", ()))


def _group(item: pytest.Item) -> str:
    """The shared server; otherwise the module, where its tests share one, or the test."""
    names = _fixtures(item)
    shared = [_GROUPS[name] for name in names if name in _GROUPS]
    if shared:
        return shared[0]
    return item.path.name if _OF_A_MODULE.intersection(names) else item.nodeid


def _rank(item: pytest.Item) -> tuple[int, str, bool]:
    group = _group(item)
    place = _ORDER.index(group) if group in _ORDER else len(_ORDER)
    return place, group, not any(name in _REFERENCES for name in _fixtures(item))


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
def reference(
    completions: object, engines: EngineSlot, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What vLLM's own `AsyncLLM` makes of the cases, by name, and its configuration.

    After the other reference, so that the shared server starts once.
    """
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
        process = WarmPopen(
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
        process = WarmPopen(
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

"""The plugin in another's process: when it does nothing, what it refuses, and how it serves."""

from __future__ import annotations

import asyncio
import contextlib
from argparse import Namespace
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from openengine_vllm import loading
from openengine_vllm.api_keys import VLLM_API_KEY_VARIABLE
from openengine_vllm.binding import BindError
from openengine_vllm.client import Client, OpenEngineError
from openengine_vllm.lifecycle import Serving
from openengine_vllm.orphan_guard import OrphanGuard
from openengine_vllm.plugin import OpenEnginePlugin
from openengine_vllm.protocol import v1 as pb
from tests.support.calls import eventually
from tests.unit.scripted_engine import ScriptedEngine, request

ARGS = Namespace(api_key=None, api_server_count=None, served_model_name=["model"], model="m")


class Llm:
    """An engine of another's."""

    errored = False

    def __init__(self) -> None:
        self.shut_down = 0

    def shutdown(self, timeout: float | None = None) -> None:
        self.shut_down += 1


class Host:
    """What `vllm serve` does with a plugin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.engine = ScriptedEngine()
        self.released = 0
        self.engine.release = self._release  # type: ignore[attr-defined]
        self.llm = Llm()
        self.path = tmp_path / "s"
        self.plugin = OpenEnginePlugin()
        monkeypatch.setenv("OPENENGINE_UDS", str(self.path))
        monkeypatch.setenv("OPENENGINE_DRAIN_TIMEOUT", "0")
        monkeypatch.setattr(loading, "attach_engine", self._attach)
        monkeypatch.setattr(OrphanGuard, "start", lambda _: None)

    def _release(self) -> None:
        self.released += 1

    def _attach(self, *_: object) -> Serving:
        return Serving(
            cast("Any", self.engine),
            pb.EngineInfo(engine_name="scripted"),
            pb.ModelInfo(served_model_name="model"),
            has_chat_template=False,
        )

    @contextlib.asynccontextmanager
    async def app(self, args: Namespace = ARGS) -> AsyncIterator[None]:
        """The life of its HTTP server."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            yield

        app = SimpleNamespace(router=SimpleNamespace(lifespan_context=lifespan))
        self.plugin.attach_router(app)
        await self.plugin.init_state(self.llm, None, args)
        async with app.router.lifespan_context(app):
            yield

    def client(self, api_key: str | None = None) -> Client:
        """A connection to it."""
        return Client(f"unix:{self.path}", api_key=api_key)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    return Host(monkeypatch, tmp_path)


def test_vllm_finds_it_by_its_entry_point() -> None:
    import tomllib

    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    name, value = project["entry-points"]["vllm.endpoint_plugins"].popitem()
    module, _, attribute = value.partition(":")
    assert getattr(import_module(module), attribute) is OpenEnginePlugin
    assert name == OpenEnginePlugin.name


async def test_without_a_port_it_does_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENENGINE_UDS")
    async with host.app():
        assert not host.path.exists()
    assert "shutdown" not in vars(host.llm)


async def test_a_server_without_an_engine(host: Host) -> None:
    host.llm = cast("Any", None)
    async with host.app():
        assert not host.path.exists()


async def test_our_own_process_is_left_alone(host: Host) -> None:
    host.llm.add_request = None  # type: ignore[attr-defined]
    async with host.app():
        assert not host.path.exists()


async def test_it_serves_until_the_http_server_ends(host: Host) -> None:
    async with host.app(), host.client() as client:
        assert (await client.health()).state == pb.HEALTH_STATE_READY
        assert (await client.engine_info()).engine_name == "scripted"
        assert host.engine.probes == 1
    assert host.released == 1
    assert host.llm.shut_down == 0
    async with host.client() as client:
        with pytest.raises(OpenEngineError):
            await client.health(timeout=5)


async def test_shutting_down_the_engine_drains_first(host: Host) -> None:
    async with host.app(), host.client() as client:
        call = asyncio.ensure_future(client.complete(request()))
        await host.engine.accepted("r")
        await asyncio.to_thread(cast("Any", host.llm.shutdown), timeout=3)
        assert host.llm.shut_down == 1
        with pytest.raises(OpenEngineError) as failure:
            await call
        assert failure.value.code == pb.ERROR_CODE_DRAINING
        assert (await client.health()).state == pb.HEALTH_STATE_DRAINING
        # As vLLM does once more where it leaves its engine's context, on the event loop.
        host.llm.shutdown()
        assert host.llm.shut_down == 2


async def test_a_dead_engine_is_not_drained(host: Host) -> None:
    async with host.app(), host.client() as client:
        host.engine.dead = host.llm.errored = True

        async def says_so() -> bool:
            return (await client.health()).state == pb.HEALTH_STATE_NOT_READY

        await eventually(says_so, "it says that the engine is dead")
        await asyncio.to_thread(host.llm.shutdown)
        assert host.llm.shut_down == 1


@pytest.mark.parametrize("by_flag", [True, False])
async def test_vllms_keys_guard_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, by_flag: bool
) -> None:
    if not by_flag:
        monkeypatch.setenv(VLLM_API_KEY_VARIABLE, "secret")
    args = Namespace(**{**vars(ARGS), "api_key": ["secret"] if by_flag else None})
    async with host.app(args), host.client() as stranger, host.client("secret") as known:
        assert (await known.health()).state == pb.HEALTH_STATE_READY
        with pytest.raises(OpenEngineError):
            await stranger.health()


async def test_one_of_several_api_servers(host: Host) -> None:
    with pytest.raises(ValueError, match="--api-server-count 1"):
        async with host.app(Namespace(**{**vars(ARGS), "api_server_count": 2})):
            pass
    assert not host.path.exists()


async def test_an_address_that_is_taken(host: Host) -> None:
    host.path.write_text("a file")
    with pytest.raises(BindError, match="is not a socket"):
        async with host.app():
            pass


async def test_an_engine_that_does_not_answer(host: Host) -> None:
    host.engine.probe_error = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"):
        async with host.app():
            pass
    assert host.released == 1
    assert not host.path.exists()


async def test_a_variable_that_is_wrong(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENGINE_PROT", "1")
    with pytest.raises(ValueError, match="OPENENGINE_PROT"):
        async with host.app():
            pass

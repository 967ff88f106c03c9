"""How the engine's processes are started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from openengine_vllm.engine.launch import build_engine

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class Started(Exception):
    """The engine would be started now."""


@pytest.mark.parametrize(("given", "used"), [(None, "spawn"), ("fork", "fork")])
def test_processes_are_spawned_unless_the_operator_says_otherwise(
    given: str | None, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at before vLLM does, which has a default for each platform."""

    def start(*_: object, **__: object) -> None:
        raise Started(os.environ[METHOD])

    monkeypatch.setattr(AsyncLLM, "from_engine_args", start)
    monkeypatch.setenv(METHOD, "")  # so that what is set below ends with the test
    monkeypatch.delenv(METHOD)
    if given is not None:
        monkeypatch.setenv(METHOD, given)
    with pytest.raises(Started, match=used):
        build_engine(AsyncEngineArgs(model=str(tmp_path)))

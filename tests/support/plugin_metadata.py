"""Lets `vllm serve` find the plugin where the package is imported from its sources.

vLLM looks for plugins in the metadata of installed distributions. A folder on PYTHONPATH with
that metadata, made of pyproject.toml, is enough.
"""

from __future__ import annotations

import importlib.metadata
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
_NAME = "openengine-vllm"


def environment(directory: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The environment with what vLLM needs in front of its PYTHONPATH.

    The metadata goes to `directory`; where the distribution is installed, nothing is written
    and the environment is a plain copy.
    """
    result = dict(base)
    try:
        importlib.metadata.distribution(_NAME)
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads(_PROJECT.read_text())["project"]
        info = directory / f"openengine_vllm-{project['version']}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {project['version']}\n"
        )
        lines = []
        for group, points in project["entry-points"].items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        rest = result.get("PYTHONPATH")
        result["PYTHONPATH"] = f"{directory}{os.pathsep}{rest}" if rest else str(directory)
    return result

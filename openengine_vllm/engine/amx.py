"""Lets vLLM's processes use a processor's AMX tiles.

Linux kills a process that touches them without having asked. vLLM's CPU build chooses its AMX
attention by what the processor has and leaves the asking to oneDNN, which asks at its first large
product of matrices: with a small model there is none, and the worker dies at its first request.
Permission ends with exec, so each of vLLM's processes has to ask; it loads a general plugin in all.
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform


def allow_amx() -> None:
    """Ask once more; without effect where the processor has no AMX."""
    if current_platform.is_cpu():
        torch.cpu._init_amx()

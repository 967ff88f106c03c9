"""The asyncio client and the operator's commands. Nothing here imports vLLM or torch.

The names below are imported when they are first used: a program that only lists the commands,
or that has yet to say how gRPC should behave, does not load gRPC.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openengine_vllm.client.client import DEFAULT_TARGET, Client
    from openengine_vllm.client.requests import GenerateOptions, generate_request, new_request_id
    from openengine_vllm.client.results import (
        Completion,
        Output,
        OutputFinished,
        RequestFailed,
        TextDelta,
    )
    from openengine_vllm.client.revisions import NotInRevisionError
    from openengine_vllm.protocol.errors import OpenEngineError

__all__ = [
    "DEFAULT_TARGET",
    "Client",
    "Completion",
    "GenerateOptions",
    "NotInRevisionError",
    "OpenEngineError",
    "Output",
    "OutputFinished",
    "RequestFailed",
    "TextDelta",
    "generate_request",
    "new_request_id",
]

_MODULES = {
    "openengine_vllm.client.client": ("DEFAULT_TARGET", "Client"),
    "openengine_vllm.client.requests": ("GenerateOptions", "generate_request", "new_request_id"),
    "openengine_vllm.client.results": (
        "Completion",
        "Output",
        "OutputFinished",
        "RequestFailed",
        "TextDelta",
    ),
    "openengine_vllm.client.revisions": ("NotInRevisionError",),
    "openengine_vllm.protocol.errors": ("OpenEngineError",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:
    # Unseen by type checkers, which would take any name for one of this module's.
    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)

"""LoadLora, UnloadLora and ListLoras of a server that runs without adapters."""

from __future__ import annotations

from typing import Any, NoReturn

from openengine_vllm.protocol import errors
from openengine_vllm.services.handlers import Context, Handler


async def _off(request: Any, context: Context) -> NoReturn:
    raise errors.feature_off("the server runs without LoRA adapters")


LORA_HANDLERS: dict[str, Handler] = dict.fromkeys(("LoadLora", "UnloadLora", "ListLoras"), _off)
"""By method name."""

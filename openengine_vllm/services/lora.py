"""LoadLora, UnloadLora and ListLoras of a server that runs without adapters."""

from __future__ import annotations

from typing import Any, NoReturn

from openengine_vllm.lifecycle import Lifecycle
from openengine_vllm.protocol import errors
from openengine_vllm.services.handlers import Context, Handler


def lora_handlers(lifecycle: Lifecycle) -> dict[str, Handler]:
    """By method name."""

    async def off(request: Any, context: Context) -> NoReturn:
        _ = lifecycle.serving
        raise errors.feature_off("the server runs without LoRA adapters")

    return dict.fromkeys(("LoadLora", "UnloadLora", "ListLoras"), off)

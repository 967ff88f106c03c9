"""GetEngineInfo and GetModelInfo."""

from __future__ import annotations

from openengine_vllm.lifecycle import Lifecycle
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.services.handlers import Context


class DiscoveryService:
    """Answers what the engine and its model are; nothing changes after the start."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    async def engine_info(
        self, request: pb.GetEngineInfoRequest, context: Context
    ) -> pb.EngineInfo:
        """GetEngineInfo."""
        return self._lifecycle.serving.engine_info

    async def model_info(self, request: pb.GetModelInfoRequest, context: Context) -> pb.ModelInfo:
        """GetModelInfo; the model's name is required, an alias will do."""
        serving = self._lifecycle.serving
        if not request.model:
            raise errors.invalid_argument("model", "model is required")
        if request.model not in serving.engine.facts.served_names:
            raise errors.model_not_found(request.model)
        return serving.model_info

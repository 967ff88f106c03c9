"""What the engine and its model are, in both revisions' words."""

from __future__ import annotations

from openengine_vllm.lifecycle import Lifecycle, Serving
from openengine_vllm.protocol import errors, split
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
        return self._of(request.model).model_info

    async def server_info(
        self, request: split.GetServerInfoRequest, context: Context
    ) -> split.ServerInfo:
        """Control's GetServerInfo."""
        return self._lifecycle.serving.server_info

    async def split_model_info(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> split.ModelInfo:
        """Control's GetModelInfo."""
        return self._of(request.model).split_model_info

    def _of(self, model: str) -> Serving:
        serving = self._lifecycle.serving
        if not model:
            raise errors.invalid_argument("model", "model is required")
        if model not in serving.engine.facts.served_names:
            raise errors.model_not_found(model)
        return serving

"""What the engine and its model are, in both revisions' words."""

from __future__ import annotations

from openengine_vllm.engine.extra import extra_keys
from openengine_vllm.lifecycle import Lifecycle, Serving
from openengine_vllm.protocol import errors, split, split_messages
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
        serving = self._lifecycle.serving
        info = split_messages.server_info(serving.engine_info, serving.model_info)
        size = serving.engine.facts.decode_context_parallel_size
        info.parallelism.decode_context_parallel_size = size
        info.capacity.max_loras = 0
        return info

    async def split_model_info(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> split.ModelInfo:
        """Control's GetModelInfo, which also tells what ``extra`` of a request may hold."""
        serving = self._of(request.model)
        info = split_messages.model_info(serving.model_info)
        if serving.engine.facts.generates:
            keys = info.extra.get_or_create_list("generate_extra")
            keys.extend(extra_keys(serving.engine.facts))
        return info

    def _of(self, model: str) -> Serving:
        serving = self._lifecycle.serving
        if not model:
            raise errors.invalid_argument("model", "model is required")
        if model not in serving.engine.facts.served_names:
            raise errors.model_not_found(model)
        return serving

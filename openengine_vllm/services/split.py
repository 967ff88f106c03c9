"""The split revision's services: a thin edge over what serves the contract.

Messages that both revisions define alike pass as they are; the others are translated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from google.protobuf.descriptor import ServiceDescriptor

from openengine_vllm.protocol import split, split_messages
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.revision import SPLIT
from openengine_vllm.services.generate import GenerateService
from openengine_vllm.services.handlers import Context, Handler

INFERENCE: Final[ServiceDescriptor] = split.INFERENCE_SERVICE
CONTROL: Final[ServiceDescriptor] = split.CONTROL_SERVICE

_ALIKE: Final = ("Health", "Abort", "LoadLora", "UnloadLora", "ListLoras")


def inference_handlers(generate: GenerateService) -> dict[str, Handler]:
    """Handlers of Inference's methods, by name."""

    async def run(request: split.GenerateRequest, context: Context) -> None:
        asked = split_messages.generate_request(request)
        await generate.serve(asked, context, SPLIT, request.extra)

    return {"Generate": run}


def control_handlers(
    contract: Mapping[str, Handler], own: Mapping[str, Handler]
) -> dict[str, Handler]:
    """Handlers of Control's methods, by name.

    Args:
        contract: the contract's handlers.
        own: those of methods that the contract has not, or means in another way.
    """
    handlers = {name: contract[name] for name in _ALIKE if name in contract}
    if (load := contract.get("GetLoad")) is not None:
        handlers["GetLoad"] = _translated(load)
    return {**handlers, **own}


def _translated(load: Handler) -> Handler:
    async def run(request: pb.GetLoadRequest, context: Context) -> split.LoadInfo:
        return split_messages.load_info(await load(request, context))

    return run

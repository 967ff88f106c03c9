"""A guide in vLLM's terms: names of fields, parameters of a request, the backend that compiles."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from openengine_vllm.engine.guide_checker import CheckedGuide

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CheckedSamplingParams(SamplingParams):
    """Parameters whose guide, if any, is known to compile.

    vLLM would compile it once more on the event loop; all else it still verifies.
    """

    def _validate_structured_outputs(self, *args: Any, **options: Any) -> None:
        return


def guide_params(guide: CheckedGuide) -> StructuredOutputsParams:
    """The guide as vLLM's own validation would have left it."""
    params = StructuredOutputsParams(**guide.constraint)
    params._backend = guide.backend
    params._backend_was_auto = guide.backend_was_auto
    return params


def worker_config(config: VllmConfig) -> bytes:
    """The engine's configuration for the process that compiles guides."""
    return bytes(ForkingPickler.dumps(config))

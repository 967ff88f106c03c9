"""What requests are checked against, and what discovery tells: the same facts for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openengine_vllm.engine.pieces import Pieces


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What of the live model and engine a request is checked against."""

    served_names: tuple[str, ...]
    """The default served name first, then its aliases."""
    max_model_len: int
    """Tokens of prompt and output together."""
    vocab_size: int
    has_tokenizer: bool
    generates: bool
    """False for an engine that runs a pooling model."""
    prefix_caching: bool
    priority_scheduling: bool
    data_parallel_ranks: tuple[int, ...]
    """The absolute ranks that this process serves."""
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    """The model's own sampling defaults (generation_config), by vLLM's parameter names."""
    max_logprobs: int = 20
    """Ranked candidates that the engine scores at one position, at the most."""
    pieces: Pieces = field(default_factory=Pieces)
    """The text of every token."""
    decode_context_parallel_size: int = 1
    thinking_budget: bool = False
    """Whether the engine can end the reasoning of an output."""
    guide_backend: str = ""
    """vLLM's structured-outputs backend, as configured; empty where no output can be guided."""

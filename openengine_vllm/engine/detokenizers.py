"""Chooses how the live engine's tokens become text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from transformers import TokenizersBackend

from openengine_vllm.engine.decode import Detokenizer, FastDetokenizer
from openengine_vllm.engine.pieces import Pieces
from openengine_vllm.engine.slow_decode import SlowDetokenizer

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class _NoText:
    """Stands in where the engine runs without a tokenizer: tokens have ids and no text."""

    special_tokens: Mapping[int, str] = MappingProxyType({})

    def decoder(self, prompt_ids: Sequence[int], *, special: bool = False) -> _NoText:
        return self

    def step(self, token_id: int) -> str:
        return ""

    def pieces(self, vocab_size: int) -> Pieces:
        return Pieces()


def detokenizer_of(llm: AsyncLLM) -> Detokenizer:
    """The quickest that fits the engine's tokenizer."""
    tokenizer = llm.renderer.tokenizer
    if tokenizer is None:
        return _NoText()
    if isinstance(tokenizer, TokenizersBackend):
        return FastDetokenizer(tokenizer._tokenizer)
    return SlowDetokenizer(tokenizer)

"""Decoding for tokenizers that have no Hugging Face ``tokenizers`` backend (such as tekken).

vLLM's own incremental routine does the work; it re-reads a few tokens a step and is slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.tokenizers.detokenizer_utils import (
    convert_prompt_ids_to_tokens,
    detokenize_incrementally,
)

from openengine_vllm.engine.pieces import Pieces, pieces_of

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike

    from openengine_vllm.engine.decode import TokenDecoder

_PRIMING_WINDOW = 64


class SlowDetokenizer:
    """See :class:`openengine_vllm.engine.decode.Detokenizer`."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self.special_tokens = dict(
            zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        )

    def decoder(self, prompt_ids: Sequence[int], *, special: bool = False) -> TokenDecoder:
        """See :class:`openengine_vllm.engine.decode.Detokenizer`."""
        return _SlowDecoder(self._tokenizer, prompt_ids, special)

    def pieces(self, vocab_size: int) -> Pieces:
        """See :class:`openengine_vllm.engine.decode.Detokenizer`."""
        known = min(vocab_size, len(self._tokenizer))
        return pieces_of(self._decode, known, self.special_tokens)

    def _decode(self, lists: list[list[int]]) -> list[str]:
        return [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in lists]


class _SlowDecoder:
    def __init__(self, tokenizer: TokenizerLike, prompt_ids: Sequence[int], special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = not special
        self._tokens, self._prefix, self._read = convert_prompt_ids_to_tokens(
            tokenizer=tokenizer,
            prompt_ids=list(prompt_ids[-_PRIMING_WINDOW:]),
            skip_special_tokens=self._skip_special,
        )

    def step(self, token_id: int) -> str:
        """See :class:`openengine_vllm.engine.decode.TokenDecoder`."""
        tokens, text, self._prefix, self._read = detokenize_incrementally(
            tokenizer=self._tokenizer,
            all_input_ids=[token_id],
            prev_tokens=self._tokens,
            prefix_offset=self._prefix,
            read_offset=self._read,
            skip_special_tokens=self._skip_special,
            spaces_between_special_tokens=True,
        )
        self._tokens.extend(tokens)
        return str(text)

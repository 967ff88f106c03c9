"""Token ids to text, one token at a time, for one output sequence.

The adapter asks vLLM not to detokenize and does it here: each token's own piece of text is
needed for ``TokenInfo.token`` anyway, and a decoder primed with the end of the prompt costs
the same for a prompt of ten tokens and of a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from openengine_vllm.engine.pieces import Pieces, pieces_of

_INVALID_PREFIX = "Invalid prefix encountered"
_REPLACEMENT = "\ufffd"
_PRIMING_TOKENS = 64
_LONGEST_CHARACTER = 4


class TokenDecoder(Protocol):
    """Turns one sequence's token ids into text; a character is emitted once, when whole."""

    def step(self, token_id: int) -> str:
        """The text that this token adds (empty while a character is incomplete)."""
        ...


class Detokenizer(Protocol):
    """Makes a decoder for each sequence; holds what all sequences of a model share."""

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """Special tokens by id; the text leaves them out, their records carry these strings."""
        ...

    def decoder(self, prompt_ids: Sequence[int], *, special: bool = False) -> TokenDecoder:
        """A decoder for a sequence that follows this prompt.

        Args:
            special: whether its text has special tokens in it.
        """
        ...

    def pieces(self, vocab_size: int) -> Pieces:
        """Every token of the vocabulary by itself."""
        ...


class FastDetokenizer:
    """Decoding by a Hugging Face ``tokenizers.Tokenizer``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_tokens = {
            token_id: token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }

    def decoder(self, prompt_ids: Sequence[int], *, special: bool = False) -> TokenDecoder:
        """See :class:`Detokenizer`."""
        return _FastDecoder(self._tokenizer, *self._end_of(prompt_ids), special)

    def pieces(self, vocab_size: int) -> Pieces:
        """See :class:`Detokenizer`."""
        return pieces_of(self._tokenizer.decode_batch, vocab_size, self.special_tokens)

    def _end_of(self, prompt_ids: Sequence[int]) -> tuple[list[int], bool]:
        """The prompt's last ids that have text, and whether they are all of them."""
        special = self.special_tokens
        end = list(
            islice(
                (token_id for token_id in reversed(prompt_ids) if token_id not in special),
                _PRIMING_TOKENS,
            )
        )
        end.reverse()
        return end, len(end) < _PRIMING_TOKENS


class _FastDecoder:
    __slots__ = ("_prompt_rest", "_skip_special", "_stream", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, prompt_end: list[int], complete: bool, special: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = not special
        clean, rest, self._prompt_rest = _split_prompt(tokenizer, prompt_end, complete)
        self._stream = DecodeStream(ids=clean, skip_special_tokens=self._skip_special)
        for token_id in rest:
            self._advance(token_id)

    def step(self, token_id: int) -> str:
        """See :class:`TokenDecoder`."""
        text = self._advance(token_id)
        if not text:
            return ""
        if self._prompt_rest:
            text = text[_common_length(text, self._prompt_rest) :]
            self._prompt_rest = ""
        return text

    def _advance(self, token_id: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            # The library raises a bare Exception when bytes that looked complete turn out
            # not to be; its state is lost then, and decoding starts afresh at this token.
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            return self._stream.step(self._tokenizer, token_id)


def _split_prompt(
    tokenizer: Tokenizer, prompt_end: list[int], complete: bool
) -> tuple[list[int], list[int], str]:
    """Cut the end of a prompt into ids that decode cleanly, ids of an unfinished character
    behind them, and the text that these show until it is finished.

    It costs a bounded time whatever the ids are; ``complete`` tells that nothing precedes them.
    """
    text = tokenizer.decode(prompt_end)
    if not text.endswith(_REPLACEMENT):
        return prompt_end, [], ""
    for length in range(len(prompt_end) - 1, 0, -1):
        clean = tokenizer.decode(prompt_end[:length])
        if _is_clean(clean) and text.startswith(clean):
            return prompt_end[:length], prompt_end[length:], text[len(clean) :]
    if not complete:
        # Tokenizers that fall back to bytes decode a run of them as a whole or not at all, and
        # this one began earlier: skip the rest of the character that it was cut in.
        for length in range(len(prompt_end), len(prompt_end) - _LONGEST_CHARACTER, -1):
            for start in range(1, _LONGEST_CHARACTER):
                if _is_clean(tokenizer.decode(prompt_end[start:length])):
                    return prompt_end[start:length], prompt_end[length:], ""
    return [], prompt_end, text


def _is_clean(text: str) -> bool:
    return bool(text) and not text.endswith(_REPLACEMENT)


def _common_length(text: str, other: str) -> int:
    pairs = zip(text, other, strict=False)
    return next(
        (index for index, (one, two) in enumerate(pairs) if one != two), min(len(text), len(other))
    )

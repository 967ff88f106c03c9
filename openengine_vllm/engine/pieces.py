"""Every token of the vocabulary by itself: its text, and how long texts can get."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

_REPLACEMENT = "\ufffd"
_ANCHOR_SEARCH = 512
_LONGEST_CHARACTER = 4


class Pieces:
    """The texts of single tokens; one that does not end with a whole character has none.

    Args:
        texts: by token id, as the token is decoded behind another one.
    """

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self._texts = ["" if _REPLACEMENT in text else text for text in texts]
        self._sizes = array("I", (_most_bytes(text) for text in texts))

    def __getitem__(self, token_id: int) -> str:
        """The text of a token, or "" for an id that the tokenizer does not know."""
        return self._texts[token_id] if token_id < len(self._texts) else ""

    def size(self, token_id: int) -> int:
        """The most bytes of UTF-8 that a token adds to a text, incomplete characters included."""
        return self._sizes[token_id] if token_id < len(self._sizes) else 0

    def total_size(self, token_ids: Iterable[int]) -> int:
        """The sizes of many tokens together."""
        sizes, known = self._sizes, len(self._sizes)
        return sum([sizes[token_id] for token_id in token_ids if token_id < known])

    def longest(self, count: int) -> int:
        """The sizes of the ``count`` longest tokens together."""
        sums = self._sums
        return sums[min(count, len(sums)) - 1] if count and sums else 0

    @cached_property
    def _sums(self) -> array[int]:
        return array("Q", accumulate(sorted(self._sizes, reverse=True)))


def _most_bytes(text: str) -> int:
    # The last byte of a character brings all of it, and some tokenizers show no byte by itself.
    if not text:
        return _LONGEST_CHARACTER
    return len(text.encode()) + text.count(_REPLACEMENT)


def pieces_of(
    decode: Callable[[list[list[int]]], Iterable[str]],
    vocab_size: int,
    special_tokens: Mapping[int, str],
) -> Pieces:
    """The pieces of a whole vocabulary.

    Each token is decoded behind another one, because many decoders drop a space in front.

    Args:
        decode: turns each of several lists of token ids into a text, special tokens left out.
        special_tokens: by id; these stand for themselves.
    """
    anchor, before = _anchor(decode, vocab_size)
    texts = [
        text.removeprefix(before)
        for text in decode([[*anchor, token_id] for token_id in range(vocab_size)])
    ]
    for token_id, text in special_tokens.items():
        if token_id < vocab_size:
            texts[token_id] = text
    return Pieces(texts)


def _anchor(
    decode: Callable[[list[list[int]]], Iterable[str]], vocab_size: int
) -> tuple[list[int], str]:
    """A token whose text is one plain letter, if one is among the first tokens."""
    first = min(vocab_size, _ANCHOR_SEARCH)
    for token_id, text in enumerate(decode([[token_id] for token_id in range(first)])):
        if len(text) == 1 and text.isascii() and text.isalnum():
            return [token_id], text
    return [], ""

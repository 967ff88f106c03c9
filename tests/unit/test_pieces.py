"""The texts of single tokens, and that their sizes bound what the tokens add to a text."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import ByT5Tokenizer

from openengine_vllm.engine.decode import Detokenizer, FastDetokenizer
from openengine_vllm.engine.pieces import Pieces, pieces_of
from openengine_vllm.engine.slow_decode import SlowDetokenizer
from tests.unit.byte_tokenizers import TOOL, byte_fallback, byte_ids, byte_level, special_id

BYT5: Any = ByT5Tokenizer(extra_ids=2)
FAST = pytest.mark.parametrize("make", [byte_level, byte_fallback])


@cache
def detokenizers() -> list[tuple[Detokenizer, Pieces, int]]:
    """Each kind of tokenizer, with its pieces and the size of its vocabulary."""
    made: list[tuple[Detokenizer, int]] = [
        (FastDetokenizer(byte_level()), byte_level().get_vocab_size()),
        (FastDetokenizer(byte_fallback()), byte_fallback().get_vocab_size()),
        (SlowDetokenizer(BYT5), len(BYT5)),
    ]
    return [(one, one.pieces(size), size) for one, size in made]


def pieces(tokenizer: Tokenizer, more: int = 0) -> Pieces:
    return FastDetokenizer(tokenizer).pieces(tokenizer.get_vocab_size() + more)


@FAST
def test_single_characters(make: Any) -> None:
    tokenizer = make()
    found = pieces(tokenizer)

    assert [found[token_id] for token_id in byte_ids(tokenizer, b"aZ~\n")] == ["a", "Z", "~", "\n"]


def test_a_space_in_front_is_kept() -> None:
    level, fallback = byte_level(), byte_fallback()

    assert pieces(level)[special_id(level, "Ġend")] == " end"
    assert pieces(fallback)[special_id(fallback, "▁")] == " "
    assert fallback.decode([special_id(fallback, "▁")]) == ""


@FAST
def test_incomplete_characters_have_no_text_and_a_size(make: Any) -> None:
    tokenizer = make()
    found = pieces(tokenizer)

    for token_id in byte_ids(tokenizer, "€😀".encode()):
        assert found[token_id] == ""
        assert found.size(token_id) >= 4


def test_several_bytes_of_a_character() -> None:
    tokenizer = byte_level()
    found = pieces(tokenizer)
    partial = [
        token_id
        for token_id in range(tokenizer.get_vocab_size())
        if "\ufffd" in tokenizer.decode([token_id])
        and len(tokenizer.id_to_token(token_id) or "") > 1
    ]

    assert partial
    assert {found[token_id] for token_id in partial} == {""}


@FAST
def test_special_tokens_stand_for_themselves(make: Any) -> None:
    tokenizer = make()
    found = pieces(tokenizer)

    assert found[special_id(tokenizer, "<eos>")] == "<eos>"
    assert found.size(special_id(tokenizer, "<eos>")) == 5
    if tokenizer is byte_level():
        assert found[special_id(tokenizer, TOOL)] == TOOL


@FAST
def test_ids_beyond_the_tokenizer(make: Any) -> None:
    """A model's vocabulary may be padded; and an id may lie beyond the vocabulary as well."""
    tokenizer = make()
    known = tokenizer.get_vocab_size()
    found = pieces(tokenizer, 3)

    assert [found[token_id] for token_id in (known, known + 2, known + 3, 1 << 31)] == [""] * 4
    assert found.size(known + 3) == 0


def test_a_vocabulary_that_is_smaller_than_the_tokenizer() -> None:
    found = FastDetokenizer(byte_level()).pieces(2)

    assert [found[0], found[1], found[2]] == ["<bos>", "<eos>", ""]


def test_no_tokenizer() -> None:
    found = Pieces()

    assert found[0] == ""
    assert found.size(0) == 0
    assert found.total_size([0, 1]) == 0
    assert found.longest(5) == 0


def test_without_a_plain_letter_in_front_of_it() -> None:
    """Then a token is decoded alone."""
    words = ["<x>", "??", "€"]
    found = pieces_of(
        lambda lists: ["".join(words[token_id] for token_id in ids) for ids in lists], 3, {0: "<x>"}
    )

    assert [found[token_id] for token_id in range(3)] == words


@given(st.lists(st.text("a€😀\ufffd", max_size=4), max_size=8), st.integers(0, 10))
def test_longest_is_the_sum_of_the_largest_sizes(texts: list[str], count: int) -> None:
    found = Pieces(texts)
    sizes = [found.size(index) for index in range(len(texts))]
    assert found.total_size([*range(len(texts) + 2), 0]) == sum(sizes) + found.size(0)

    assert found.longest(count) == sum(sorted(sizes, reverse=True)[:count])
    for text, size in zip(texts, sizes, strict=True):
        assert size == (len(text.replace("\ufffd", "😀").encode()) if text else 4)


@given(st.data())
def test_sizes_bound_any_text(data: st.DataObject) -> None:
    """Of any tokens behind any prompt, special tokens' own strings included.

    The rest of a character that the prompt began may come as well: a few bytes once, which the
    room for an event's other fields covers.
    """
    detokenizer, found, vocab_size = data.draw(st.sampled_from(detokenizers()))
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=12)
    prompt, tokens = data.draw(ids), data.draw(ids)
    decoder = detokenizer.decoder(prompt)
    special = detokenizer.special_tokens
    texts = [decoder.step(token_id) or special.get(token_id, "") for token_id in tokens]

    rest = 3 * len("\ufffd".encode())
    assert sum(len(text.encode()) for text in texts) <= sum(map(found.size, tokens)) + rest

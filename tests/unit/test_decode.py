"""Decoding token by token, and what a prompt leaves for the first of them."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from openengine_vllm.engine.decode import FastDetokenizer, _split_prompt
from tests.unit.byte_tokenizers import (
    SPECIALS,
    TOOL,
    byte_fallback,
    byte_ids,
    byte_level,
    special_id,
)

BYTES = byte_level()
FALLBACK = byte_fallback()
REPLACEMENT = "\ufffd"


def decode(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    decoder = FastDetokenizer(tokenizer).decoder(prompt)
    return [decoder.step(token_id) for token_id in ids]


class CountingTokenizer:
    """Counts the ids that are decoded: a measure of time that does not depend on the machine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def get_added_tokens_decoder(self) -> object:
        return self._tokenizer.get_added_tokens_decoder()

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return self._tokenizer.decode(ids)


def test_special_tokens_are_those_that_decoding_leaves_out() -> None:
    special = FastDetokenizer(BYTES).special_tokens

    assert set(special.values()) == set(SPECIALS)
    for token_id, text in special.items():
        assert BYTES.decode([token_id]) == ""
        assert BYTES.decode([token_id], skip_special_tokens=False) == text


@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=4), st.sampled_from(SPECIALS)), max_size=9)
)
@example([b"\xe2\x82", SPECIALS[0], b"\xac"])
def test_special_tokens_can_be_shown(parts: list[bytes | str]) -> None:
    """In their places: what is unfinished before one is shown before it, and joins nothing."""
    prompt = [0, *byte_ids(BYTES, b"fox")]
    ids = [
        token_id
        for part in parts
        for token_id in (
            byte_ids(BYTES, part) if isinstance(part, bytes) else [special_id(BYTES, part)]
        )
    ]
    decoder = FastDetokenizer(BYTES).decoder(prompt, special=True)
    text = "".join(decoder.step(token_id) for token_id in ids)

    whole = BYTES.decode(ids, skip_special_tokens=False)
    assert text == whole or (whole.startswith(text) and set(whole[len(text) :]) == {REPLACEMENT})


def test_an_added_token_that_is_not_special_is_text() -> None:
    assert decode(BYTES, [0], [special_id(BYTES, TOOL)]) == [TOOL]


def test_a_character_comes_whole_with_its_last_token() -> None:
    ids = byte_ids(BYTES, "a😀b".encode())

    assert decode(BYTES, [0], ids) == ["a", "", "", "", "😀", "b"]


def test_a_token_outside_the_vocabulary_has_no_text() -> None:
    assert decode(BYTES, [0], [BYTES.get_vocab_size() + 9]) == [""]


@given(st.text("aé€😀 z", max_size=8), st.integers(0, 40), st.integers(0, 200))
def test_text_after_any_prompt(text: str, cut: int, padding: int) -> None:
    """Cut anywhere, also inside a character: the rest is what the prompt has not shown."""
    data = text.encode()
    cut = min(cut, len(data))
    ids = byte_ids(BYTES, data)
    shown = data[:cut].decode(errors="ignore")

    pieces = decode(BYTES, [0, *byte_ids(BYTES, b"x" * padding), *ids[:cut]], ids[cut:])

    assert "".join(pieces) == text[len(shown) :]


@given(st.binary(max_size=6), st.text("aé€😀", min_size=1, max_size=4))
@example(b"\x80\xe2", "a")
@example(b"\xf0\x9f\x98", "\ufffd")
def test_invalid_bytes_of_a_prompt_are_not_repeated(junk: bytes, text: str) -> None:
    """Text that begins a new character follows whatever the prompt ended with."""
    prompt = byte_ids(BYTES, b"x" + junk)

    assert "".join(decode(BYTES, prompt, byte_ids(BYTES, text.encode()))).endswith(
        text.rstrip(REPLACEMENT)
    )
    assert "".join(decode(BYTES, prompt, byte_ids(BYTES, text.encode() + b"!"))) == text + "!"


def test_a_character_is_completed_behind_invalid_bytes() -> None:
    assert decode(BYTES, byte_ids(BYTES, b"\x80\xe2"), byte_ids(BYTES, b"\x82\xac")) == ["", "€"]


def test_special_tokens_do_not_hide_the_start_of_a_character() -> None:
    bos = special_id(BYTES, "<bos>")
    first, *rest = byte_ids(BYTES, "€".encode())

    assert decode(BYTES, [first] + [bos] * 10_000, rest) == ["", "€"]


def test_special_tokens_alone_are_a_prompt() -> None:
    assert decode(BYTES, [special_id(BYTES, "<bos>")] * 5, byte_ids(BYTES, b"ab")) == ["a", "b"]


def test_a_prompt_of_invalid_bytes_is_not_repeated() -> None:
    prompt = byte_ids(BYTES, b"\x80") * 6000

    assert decode(BYTES, prompt, byte_ids(BYTES, b"a")) == ["a"]


def test_priming_costs_the_same_for_any_prompt() -> None:
    """A prompt may hold anything, and the event loop waits for this."""
    costs = []
    for length in (100, 50_000):
        tokenizer = CountingTokenizer(BYTES)
        detokenizer = FastDetokenizer(tokenizer)  # type: ignore[arg-type]
        end, complete = detokenizer._end_of(byte_ids(BYTES, b"\x80") * length)
        _split_prompt(tokenizer, end, complete)  # type: ignore[arg-type]
        costs.append(tokenizer.decoded)

    assert costs[0] == costs[1] < 10_000


@given(st.text("日本é€", min_size=25, max_size=60), st.integers(0, 3))
@example("日" * 40, 0)
@example("日" * 40, 2)
def test_runs_of_byte_tokens_longer_than_what_is_looked_at(text: str, cut: int) -> None:
    """With byte fallback, a run of bytes is one text; one cut at its start would be none."""
    ids = byte_ids(FALLBACK, text.encode())
    prompt, rest = ids[: len(ids) - cut], ids[len(ids) - cut :]
    shown = text.encode()[: len(prompt)].decode(errors="ignore")
    after = FALLBACK.encode("ab", add_special_tokens=False).ids

    assert "".join(decode(FALLBACK, [1, *prompt], [*rest, *after])) == text[len(shown) :] + "ab"


def test_bytes_that_turn_out_invalid_do_not_end_decoding() -> None:
    """``é`` and then a byte that makes its whole run invalid: text goes on behind it."""
    ids = [*byte_ids(FALLBACK, "é".encode() + b"\xff"), special_id(FALLBACK, "a")]

    assert decode(FALLBACK, [special_id(FALLBACK, "b")], ids)[1] == "é"
    assert decode(FALLBACK, [special_id(FALLBACK, "b")], ids)[-1] == "a"

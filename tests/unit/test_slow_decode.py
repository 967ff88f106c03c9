"""Decoding without a ``tokenizers`` backend, against vLLM's detokenizer for such tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mistral_common
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import ByT5Tokenizer
from vllm import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.mistral import MistralTokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import SlowIncrementalDetokenizer

from openengine_vllm.engine.slow_decode import SlowDetokenizer

BYT5: Any = ByT5Tokenizer(extra_ids=2)


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory) -> TokenizerLike:
    file = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    folder = tmp_path_factory.mktemp("tekken")
    (folder / "tekken.json").symlink_to(file)
    return MistralTokenizer.from_pretrained(str(folder))


def by_vllm(
    tokenizer: TokenizerLike, prompt: list[int], tokens: list[int], *, special: bool = False
) -> list[str]:
    params = SamplingParams(max_tokens=1 << 20, skip_special_tokens=not special)
    request = EngineCoreRequest("r", prompt, None, params, None, 0.0, None, None, None)
    state = SlowIncrementalDetokenizer(tokenizer, request)
    pieces = []
    for token in tokens:
        before = len(state.output_text)
        state.update([token], False)
        pieces.append(state.output_text[before:])
    return pieces


def decode(
    tokenizer: TokenizerLike, prompt: list[int], tokens: list[int], *, special: bool = False
) -> list[str]:
    decoder = SlowDetokenizer(tokenizer).decoder(prompt, special=special)
    return [decoder.step(token) for token in tokens]


byt5_ids = st.one_of(
    st.text("ab€é😀", max_size=8).map(lambda t: BYT5.encode(t, add_special_tokens=False)),
    st.lists(st.integers(0, len(BYT5) - 1), max_size=8),
)


@given(byt5_ids, byt5_ids, st.booleans())
def test_pieces_are_vllms(prompt: list[int], tokens: list[int], special: bool) -> None:
    prompt = prompt or [BYT5.eos_token_id]

    ours = decode(BYT5, prompt, tokens, special=special)
    assert ours == by_vllm(BYT5, prompt, tokens, special=special)


def test_a_long_prompt_does_not_change_the_text() -> None:
    prompt = BYT5.encode("x€" * 200, add_special_tokens=False)
    tokens = BYT5.encode("é and €", add_special_tokens=False)

    assert "".join(decode(BYT5, prompt, tokens)) == "é and €"


def test_special_tokens_have_no_text_and_a_name() -> None:
    special = SlowDetokenizer(BYT5).special_tokens

    assert special[BYT5.eos_token_id] == "</s>"
    assert decode(BYT5, [BYT5.eos_token_id], list(special)) == [""] * len(special)


def test_tekken(tekken: TokenizerLike) -> None:
    detokenizer = SlowDetokenizer(tekken)
    text = "Das ist schön: 日本語 😀."
    tokens = tekken.encode(text, add_special_tokens=False)
    prompt = tekken.encode("Hallo.", add_special_tokens=False)
    eos = tekken.eos_token_id

    assert "".join(decode(tekken, prompt, [*tokens, eos])) == text
    assert decode(tekken, prompt, tokens) == by_vllm(tekken, prompt, tokens)
    assert detokenizer.special_tokens[eos] == "</s>"

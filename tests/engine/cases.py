"""Requests whose answers have to be vLLM's own, as data: the tests send them to our server, and
the reference runs them on vLLM directly.

Options have the contract's names. A stop that has to occur in the text is derived from what the
model says without it, because a random model's words are not known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer

from tests.support.models import EOS_ID, VOCAB_SIZE

PromptMaker = Callable[[Tokenizer], list[int]]

_VLLM_NAMES = {"num_sequences": "n", "include_stop_in_output": "include_stop_str_in_output"}


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        prompt: a text, or what makes token ids of the model's tokenizer.
        options: of the request, by the contract's names.
        stop: makes stop texts from the text without them.
        stop_token_ids: makes stop ids from the tokens without them.
        bad_words: makes words to ban from the tokens without them.
        ends_at_eos: have the reference look for a seed with which an EOS comes.
        splits_character: the prompt ends inside a character.
    """

    name: str
    prompt: str | PromptMaker
    options: Mapping[str, Any] = field(default_factory=dict)
    stop: Callable[[str], list[str]] | None = None
    stop_token_ids: Callable[[list[int]], list[int]] | None = None
    bad_words: Callable[[list[int], Tokenizer], list[str]] | None = None
    ends_at_eos: bool = False
    splits_character: bool = False

    def prompt_for(self, tokenizer: Tokenizer) -> str | list[int]:
        """The prompt as text or token ids."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt(tokenizer)

    def vllm_options(self) -> dict[str, Any]:
        """The options by vLLM's names."""
        return vllm_options(self.options)


def vllm_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the contract by vLLM's names."""
    return {_VLLM_NAMES.get(name, name): value for name, value in options.items()}


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The tokens that stand for single bytes, in the byte-level alphabet."""
    ids = [tokenizer.token_to_id(_byte_symbol(byte)) for byte in data]
    return [token_id for token_id in ids if token_id is not None]


def _byte_symbol(byte: int) -> str:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in plain:
        return chr(byte)
    return chr(0x100 + [other for other in range(0x100) if other not in plain].index(byte))


def _text_then(text: str, data: bytes) -> PromptMaker:
    def make(tokenizer: Tokenizer) -> list[int]:
        return [*tokenizer.encode(text).ids, *byte_ids(tokenizer, data)]

    return make


def _ids(ids: Sequence[int]) -> PromptMaker:
    return lambda tokenizer: list(ids)


def _greedy(name: str, prompt: str | PromptMaker, *, splits_character: bool = False) -> Case:
    options = {"temperature": 0.0, "max_tokens": 48}
    return Case(f"greedy-{name}", prompt, options, splits_character=splits_character)


_SENTENCE = "The quick brown fox jumps over the lazy dog, and the dog does not mind. "

GREEDY = (
    _greedy("ascii", "Once upon a time"),
    _greedy("one-character", "x"),
    _greedy("accents", "Größe, façade, naïve, Ångström, smørrebrød, żółć"),
    _greedy("cyrillic", "Съешь ещё этих мягких французских булок, да выпей чаю."),
    _greedy("cjk", "速い茶色の狐が怠け者の犬を飛び越える。 敏捷的棕色狐狸跳过懒狗。"),
    _greedy("right-to-left", "שלום עולם، مرحبا بالعالم"),
    _greedy("emoji", "👩‍👩‍👧 🏳️‍🌈 🇪🇺 👍🏽 🦊"),
    _greedy("combining-marks", "e\u0301 a\u0308 o\u0302 Z\u0351\u036b\u0343 n\u0303"),
    _greedy("space", " "),
    _greedy("empty-looking", " \t\u00a0\u2003\u200b\ufeff "),
    _greedy("newlines", "\n\n\r\n\t\n"),
    _greedy("nul", "a\x00b\x00\x00"),
    _greedy("odd-code-points", "\x01\x1f\x7f\u0085\ufffd\uffff\U0010ffff"),
    _greedy("special-tokens", "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n"),
    _greedy("json", '{"name": "fox", "legs": 4, "quick": true, "speed": [1.5, 2e3]}\n'),
    _greedy("long", _SENTENCE * 48),
    _greedy("ids-one", _ids([300])),
    _greedy("ids-special", _ids([0, 3, 40, EOS_ID, 41, 4, 2])),
    _greedy("ids-long", _ids([7 + 31 * i % (VOCAB_SIZE - 7) for i in range(1500)])),
    _greedy("ids-end-in-euro", _text_then("A price in ", b"\xe2\x82"), splits_character=True),
    _greedy("ids-end-in-emoji", _text_then("A fox: ", b"\xf0\x9f\xa6"), splits_character=True),
    _greedy("ids-end-in-stray-byte", _text_then("Broken ", b"\xac"), splits_character=True),
    _greedy("ids-are-half-a-character", _text_then("", b"\xe2\x82"), splits_character=True),
)
"""Greedy decoding; these are sent to vLLM's HTTP server as well."""

_PROMPT = "The quick brown fox"
_SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 40}


def _sampled(name: str, **options: Any) -> Case:
    return Case(name, _PROMPT, {**_SAMPLED, **options})


_SAMPLING = (
    *(_sampled(f"seed-{seed}", seed=seed) for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1)),
    _sampled("three-outputs", num_sequences=3),
    _sampled("three-outputs-short", num_sequences=3, seed=2**62, max_tokens=1),
    _sampled("frequency-penalty", frequency_penalty=1.5),
    _sampled("presence-penalty", presence_penalty=-1.5),
    _sampled("repetition-penalty", repetition_penalty=1.7),
    _sampled("repetition-penalty-below-1", repetition_penalty=0.5),
    _sampled("all-penalties", frequency_penalty=-2, presence_penalty=2, repetition_penalty=1.1),
    _sampled("greedy-with-penalties", temperature=0, presence_penalty=1.9, frequency_penalty=0.7),
    _sampled("top-k", top_k=5),
    _sampled("top-k-1", top_k=1),
    _sampled("top-k-off", top_k=-1),
    _sampled("top-k-zero", top_k=0),
    _sampled("top-p", top_p=0.3),
    _sampled("min-p", min_p=0.2),
    _sampled("all-filters", top_k=50, top_p=0.8, min_p=0.01, temperature=1.7),
    _sampled("cold", temperature=0.001),
    _sampled("hot", temperature=2.0),
)

_LENGTH = (
    _sampled("one-token", max_tokens=1),
    _sampled("max-tokens-beyond-context", max_tokens=5000, ignore_eos=True),
    Case(
        "max-tokens-largest",
        _ids([7 + 31 * i % (VOCAB_SIZE - 7) for i in range(2000)]),
        {**_SAMPLED, "max_tokens": 2**32 - 1, "ignore_eos": True},
    ),
    Case(
        "prompt-leaves-one-token",
        _ids([7 + 31 * i % (VOCAB_SIZE - 7) for i in range(2047)]),
        {"temperature": 0.0, "max_tokens": 10},
    ),
    _sampled("min-tokens", min_tokens=40),
)

_HOT: dict[str, Any] = {"temperature": 2.0, "seed": 100, "max_tokens": 400}


def _eos(name: str, **options: Any) -> Case:
    return Case(f"eos-{name}", _PROMPT, {**_HOT, **options}, ends_at_eos=True)


_EOS = (
    _eos("plain"),
    _eos("kept-with-include", include_stop_in_output=True),
    _eos("ignored", ignore_eos=True),
    _eos("too-early", min_tokens=400),
    _eos("is-callers-stop", stop_token_ids=[EOS_ID]),
    _eos("is-callers-stop-included", stop_token_ids=[EOS_ID], include_stop_in_output=True),
    _eos("ignored-but-callers-stop", stop_token_ids=[EOS_ID], ignore_eos=True),
)


def _stop_text(name: str, stop: Callable[[str], list[str]], **options: Any) -> tuple[Case, Case]:
    plain = {**_SAMPLED, **options}
    return (
        Case(f"stop-{name}", _PROMPT, plain, stop=stop),
        Case(f"stop-{name}-included", _PROMPT, {**plain, "include_stop_in_output": True}, stop),
    )


_STOP_TEXT = (
    *_stop_text("first-character", lambda text: [text[0]]),
    *_stop_text("second-character", lambda text: [text[1]]),
    *_stop_text("inside", lambda text: [text[11:13]]),
    *_stop_text("across-tokens", lambda text: [text[20:40]]),
    *_stop_text("last-character", lambda text: [text[-4:]]),
    *_stop_text("never", lambda text: ["no such text"]),
    *_stop_text("almost", lambda text: [text[-5:] + "no such text", text[10:20] + "nor this"]),
    *_stop_text("earliest-end-wins", lambda text: [text[12:30], text[14:20], text[19:25]]),
    *_stop_text("same-end-first-wins", lambda text: [text[17:20], text[10:20], text[19]]),
    *_stop_text("after-min-tokens", lambda text: list(text[:12]), min_tokens=8),
    *_stop_text("many-outputs", lambda text: [text[11:14]], num_sequences=3),
)


def _stop_id(name: str, ids: Callable[[list[int]], list[int]], **options: Any) -> Case:
    return Case(f"stop-id-{name}", _PROMPT, {**_SAMPLED, **options}, stop_token_ids=ids)


_STOP_IDS = (
    _stop_id("first", lambda ids: [ids[0]]),
    _stop_id("later", lambda ids: [ids[12]]),
    _stop_id("included", lambda ids: [ids[12]], include_stop_in_output=True),
    _stop_id("several", lambda ids: [ids[20], ids[12], ids[20]]),
    _stop_id("at-the-last-token", lambda ids: [ids[-1]]),
    _stop_id("too-early", lambda ids: [ids[3]], min_tokens=10),
    _stop_id("never", lambda ids: [next(i for i in range(VOCAB_SIZE) if i not in ids)]),
    Case(
        "stop-id-and-text",
        _PROMPT,
        _SAMPLED,
        stop=lambda text: [text[30:35]],
        stop_token_ids=lambda ids: [ids[14]],
    ),
)

CASES = (*GREEDY, *_SAMPLING, *_LENGTH, *_EOS, *_STOP_TEXT, *_STOP_IDS)
"""All cases of the contract."""

_PLAIN_GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
_PLAIN_SEEDED: dict[str, Any] = {**_PLAIN_GREEDY, "temperature": 1.0, "seed": 9}
_SPECIAL = {str(token_id): 4.0 for token_id in range(7)}
"""Makes special tokens about as likely as all others together."""


def words_of(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Words that come out as single tokens or as pairs, and that are read as these again."""
    words = []
    for first, second in pairwise(ids):
        for tokens in ([first], [first, second]):
            word = tokenizer.decode(tokens).strip()
            if word and tokens in (
                tokenizer.encode(prefix + word, add_special_tokens=False).ids
                for prefix in ("", " ")
            ):
                words.append(word)
    return sorted(set(words))


def _extra(name: str, options: Mapping[str, Any], **more: Any) -> Case:
    return Case(f"extra-{name}", _PROMPT, {**options, **more})


EXTRA = (
    _extra("bias-forces", _PLAIN_SEEDED, logit_bias={"300": 100.0}),
    _extra("bias-bans", _PLAIN_GREEDY, logit_bias=dict.fromkeys(map(str, range(400)), -100.0)),
    _extra("bias-nudges", _PLAIN_SEEDED, logit_bias={"40": 3.5, "41": 3.5, "900": -2.0}),
    _extra("allowed", _PLAIN_SEEDED, allowed_token_ids=[40, 41, 300, 1023]),
    _extra("allowed-one", _PLAIN_GREEDY, allowed_token_ids=[77]),
    _extra(
        "allowed-several-outputs", _PLAIN_SEEDED, allowed_token_ids=[9, 99, 999], num_sequences=3
    ),
    _extra("special-skipped", _PLAIN_SEEDED, logit_bias=_SPECIAL),
    _extra("special-shown", _PLAIN_SEEDED, logit_bias=_SPECIAL, skip_special_tokens=False),
    _extra("all-special-shown", _PLAIN_GREEDY, logit_bias={"3": 100}, skip_special_tokens=False),
    Case("extra-bad-words", _PROMPT, _PLAIN_GREEDY, bad_words=words_of),
    Case("extra-bad-words-seeded", _PROMPT, _PLAIN_SEEDED, bad_words=words_of),
)
"""What requests of the split revision can have beside the contract's options."""

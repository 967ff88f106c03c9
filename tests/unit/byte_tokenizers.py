"""Small tokenizers whose tokens cut through characters, made in the test process."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<bos>", "<eos>", "<stop>", "<pad>")
TOOL = "<tool>"
"""An added token that is not special: its text belongs to the output."""
TRAINING = ("€€€€ é é é ab ab abc", "日本日本日本 😀😀😀", "the end the end\n\nthe end")


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE over every byte, with merges that hold parts of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIALS) + 20,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.add_tokens([AddedToken(TOOL, special=False)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """A SentencePiece-like model: whole characters, and bytes for all that it does not know."""
    words = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehnt"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    if tokenizer.token_to_id("<0x00>") is not None:
        names = [f"<0x{byte:02X}>" for byte in data]
    else:
        names = [_byte_level_names()[byte] for byte in data]
    return [special_id(tokenizer, name) for name in names]


def special_id(tokenizer: Tokenizer, name: str) -> int:
    """The id of a token that exists."""
    token_id = tokenizer.token_to_id(name)
    assert token_id is not None, name
    return token_id


@cache
def _byte_level_names() -> tuple[str, ...]:
    """The character that stands for each byte, as byte-level BPE defines it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    names = {byte: chr(byte) for byte in printable}
    names.update((byte, chr(256 + index)) for index, byte in enumerate(others))
    return tuple(names[byte] for byte in range(256))

"""What a client has to see of one output, said as plainly as can be.

It is slow and sees the whole sequence at once: bytes are decoded by Python, and a stop is looked
for by comparing strings at every position. It follows the contract's rules and what vLLM has
been seen to do, and shares nothing with the code that it judges but the names of the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from openengine_vllm.engine.outputs import Finish, StopKind, StopMatch

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """A generated token, the text that it adds, and its string if it is a special token."""

    token_id: int
    text: str
    special: str | None = None

    @property
    def shown(self) -> str:
        """The string of its record."""
        return self.text if self.special is None else self.special


@dataclass(frozen=True)
class Asked:
    """What the caller asked for."""

    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    include: bool = False
    min_tokens: int = 0


@dataclass(frozen=True)
class Seen:
    """All that a client has in the end."""

    text: str
    tokens: tuple[tuple[int, str], ...]
    finish: Finish | None
    match: StopMatch | None
    generated: int


def decode(
    prompt: bytes, tokens: Sequence[tuple[int, bytes]], special: Mapping[int, str]
) -> list[Piece]:
    """The pieces of tokens whose bytes follow those of a prompt.

    A character comes whole with the token that completes it; what ends in bytes that are no
    character waits for more. What the prompt has shown itself is not shown again.
    """
    pieces, data, before = [], prompt, prompt.decode(errors="replace")
    unfinished = before.endswith(REPLACEMENT)
    for token_id, token_bytes in tokens:
        if token_id in special:
            pieces.append(Piece(token_id, "", special[token_id]))
            continue
        data += token_bytes
        text = data.decode(errors="replace")
        if text.endswith(REPLACEMENT) or not token_bytes:
            pieces.append(Piece(token_id, ""))
            continue
        if unfinished and not text.startswith(before):
            before = before[:-1]  # The character that the prompt began has been completed.
        assert text.startswith(before)
        pieces.append(Piece(token_id, text[len(before) :]))
        before, unfinished = text, False
    return pieces


def first_stop(
    pieces: Sequence[Piece], stops: Sequence[str], min_tokens: int
) -> tuple[str, int, int] | None:
    """The stop, the position where it ends, and the count of tokens up to there.

    The one that ends earliest wins, then the first in the list. A stop that ends within the
    first ``min_tokens`` tokens is none.
    """
    text = ""
    for count, piece in enumerate(pieces, 1):
        for char in piece.text:
            text += char
            for stop in stops:
                if count > min_tokens and text.endswith(stop):
                    return stop, len(text), count
    return None


def may_grow(text: str, stops: Sequence[str]) -> int:
    """Length of the longest tail of ``text`` that begins a stop without being all of it."""
    return max(
        (length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length])),
        default=0,
    )


def outcome(pieces: Sequence[Piece], finish: Finish, asked: Asked) -> Seen:
    """What is seen of pieces that the engine ended for this reason.

    With STOP the last piece is the token that the engine stopped at: the caller's stop if it is
    among their ids, else one of the model's EOS tokens, whose text is never shown.
    """
    at = pieces[-1] if finish is Finish.STOP else None
    callers = at is not None and at.token_id in asked.stop_ids
    body = pieces if at is None or (callers and asked.include) else pieces[:-1]
    if (found := first_stop(body, asked.stops, asked.min_tokens)) is not None:
        return _at_text(body, *found, asked.include)
    tokens = [(piece.token_id, piece.shown) for piece in body]
    match = None
    if at is not None and callers:
        match = StopMatch(StopKind.TOKEN, at.token_id)
    elif at is not None:
        match = StopMatch(StopKind.EOS, at.token_id)
        tokens.append((at.token_id, at.special or ""))
    text = "".join(piece.text for piece in body)
    return Seen(text, tuple(tokens), finish, match, len(pieces))


def _at_text(pieces: Sequence[Piece], stop: str, end: int, count: int, include: bool) -> Seen:
    text = "".join(piece.text for piece in pieces)[: end if include else end - len(stop)]
    tokens, start = [], 0
    for piece in pieces[:count]:
        # A special token is between two characters: right before the stop is not inside it.
        inside = start > len(text) or (start == len(text) and piece.special is None)
        if inside and not include:
            break
        tokens.append((piece.token_id, piece.special or piece.text[: len(text) - start]))
        start += len(piece.text)
    return Seen(text, tuple(tokens), Finish.STOP, StopMatch(StopKind.TEXT, stop), count)

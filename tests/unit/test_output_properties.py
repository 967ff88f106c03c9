"""What every output has to be, whatever the tokens, the stops and the way the tokens come in.

Two kinds of sequences: tokens of a real tokenizer whose characters, stops and invalid bytes
cross token borders, and made-up pieces over two letters, where stops overlap all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from openengine_vllm.engine.decode import FastDetokenizer, TokenDecoder
from openengine_vllm.engine.outputs import Finish, SequenceOutput, Step, StopKind, StopRules
from openengine_vllm.engine.stops import StopAutomaton
from tests.unit.byte_tokenizers import byte_ids, byte_level, special_id
from tests.unit.output_oracle import (
    REPLACEMENT,
    Asked,
    Piece,
    Seen,
    decode,
    first_stop,
    may_grow,
    outcome,
)

TOKENIZER = byte_level()
DETOKENIZER = FastDetokenizer(TOKENIZER)
SPECIAL = DETOKENIZER.special_tokens
EOS = special_id(TOKENIZER, "<eos>")
UNKNOWN = TOKENIZER.get_vocab_size() + 5
"""An id behind the tokenizer's last, as padded vocabularies have them: it has no text."""


@dataclass(frozen=True)
class Case:
    """What an engine generated, and what the caller asked for."""

    pieces: tuple[Piece, ...]
    finish: Finish
    """With STOP the last piece is the token that the engine stopped at."""
    asked: Asked
    decoder: Callable[[], TokenDecoder] = field(repr=False)
    prompt: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def seen(self) -> Seen:
        return outcome(self.pieces, self.finish, self.asked)

    def output(self) -> SequenceOutput:
        asked = self.asked
        automaton = StopAutomaton(asked.stops) if asked.stops else None
        rules = StopRules(automaton, asked.stop_ids, asked.include, asked.min_tokens)
        return SequenceOutput(self.decoder(), SPECIAL, rules)


@dataclass(frozen=True)
class Split:
    """Sizes of the first deltas, the rest being of one token; the end may come by itself."""

    sizes: tuple[int, ...] = ()
    end_alone: bool = False


@dataclass(frozen=True)
class Run:
    """All steps up to the finish; ``fed`` counts the tokens given up to each."""

    steps: list[Step]
    fed: list[int]
    generated: int

    @property
    def tokens(self) -> list[tuple[int, str]]:
        return [(token.token_id, token.text) for step in self.steps for token in step.tokens]

    @property
    def seen(self) -> Seen:
        last = self.steps[-1]
        text = "".join(step.text for step in self.steps)
        return Seen(text, tuple(self.tokens), last.finish, last.stop_match, self.generated)


def run(case: Case, split: Split = Split()) -> Run:
    output = case.output()
    ids = [piece.token_id for piece in case.pieces]
    steps: list[Step] = []
    fed: list[int] = []
    start = 0
    alone = not ids or case.finish is Finish.ABORT
    alone = alone or (split.end_alone and case.finish is Finish.LENGTH)
    for size in [*split.sizes, *[1] * len(ids)]:
        end = start + size
        if start >= len(ids):
            break
        steps.append(output.feed(ids[start:end], None if end < len(ids) or alone else case.finish))
        fed.append(min(end, len(ids)))
        if steps[-1].finish is not None:
            return Run(steps, fed, output.generated)
        start = end
    steps.append(output.end(case.finish))
    fed.append(len(ids))
    return Run(steps, fed, output.generated)


class Replay:
    """A decoder whose pieces are known beforehand."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._texts = iter([piece.text for piece in pieces])

    def step(self, token_id: int) -> str:
        """The next piece."""
        return next(self._texts)


@cache
def token_bytes(token_id: int) -> bytes:
    name = TOKENIZER.id_to_token(token_id)
    return b"" if name is None else bytes(byte_of()[char] for char in name)


@cache
def byte_of() -> dict[str, int]:
    """The byte that each character of a token's name stands for."""
    names = [TOKENIZER.id_to_token(byte_ids(TOKENIZER, bytes([byte]))[0]) for byte in range(256)]
    return {name: byte for byte, name in enumerate(names) if name is not None}


def all_bytes(ids: Sequence[int]) -> bytes:
    """The bytes of these tokens' text."""
    return b"".join(token_bytes(one) for one in ids if one not in SPECIAL)


WORDS = ("ab", "abc", "a", "b", "€", "é", "日本", "😀", "the end", "\n\n", " ", REPLACEMENT)
atoms = st.one_of(
    st.sampled_from(WORDS).map(lambda word: TOKENIZER.encode(word, add_special_tokens=False).ids),
    st.sampled_from(WORDS).map(lambda word: byte_ids(TOKENIZER, word.encode())),
    st.integers(0, TOKENIZER.get_vocab_size() - 1).map(lambda one: [one]),
    st.binary(min_size=1, max_size=3).map(lambda data: byte_ids(TOKENIZER, data)),
    st.sampled_from([*SPECIAL, special_id(TOKENIZER, "<tool>"), UNKNOWN]).map(lambda one: [one]),
)
id_lists = st.lists(atoms, max_size=6).map(lambda lists: [one for part in lists for one in part])
prompts = st.builds(
    # Long ones are longer than what a decoder looks at; the cut may be inside a character.
    lambda ids, cut, times: tuple((ids[: len(ids) - cut] or [EOS]) * times),
    id_lists,
    st.integers(0, 2),
    st.sampled_from([1, 1, 1, 40]),
)
made_up = st.lists(
    st.one_of(
        st.sampled_from(["a", "b", "ab", "ba", "aab", "abab", "", "€", "bb"]),
        st.sampled_from(sorted(SPECIAL)),
    ),
    max_size=12,
)


@st.composite
def made_up_cases(draw: st.DrawFn) -> Case:
    script = [*draw(made_up), draw(st.sampled_from(["a", "b", "ab"]))]
    texts = {1000 + index: one for index, one in enumerate(script) if isinstance(one, str)}
    *ids, last = [1000 + i if isinstance(one, str) else one for i, one in enumerate(script)]
    ids, finish, stop_ids = draw(endings(ids, last))
    pieces = tuple(Piece(one, texts.get(one, ""), SPECIAL.get(one)) for one in ids)
    asked = draw(askings(pieces, stop_ids, st.text("ab", min_size=1, max_size=5)))
    return Case(pieces, finish, asked, lambda: Replay(pieces))


@st.composite
def tokenized_cases(draw: st.DrawFn) -> Case:
    # Often a character that the prompt begins and the output finishes.
    across = byte_ids(TOKENIZER, draw(st.sampled_from(["", "", "€", "😀", "日本"])).encode())
    cut, padding = draw(st.integers(0, len(across))), draw(st.sampled_from([0, 0, 70]))
    prompt = (*draw(prompts), *across[:cut], *[EOS] * padding)
    plain = TOKENIZER.encode("b", add_special_tokens=False).ids[0]
    ids, finish, stop_ids = draw(endings(across[cut:] + draw(id_lists), plain))
    pieces = tuple(decode(all_bytes(prompt), [(one, token_bytes(one)) for one in ids], SPECIAL))
    stops = st.lists(st.sampled_from(WORDS), min_size=1, max_size=2).map("".join)
    asked = draw(askings(pieces, stop_ids, stops))
    return Case(pieces, finish, asked, lambda: DETOKENIZER.decoder(prompt), prompt)


@st.composite
def endings(
    draw: st.DrawFn, ids: list[int], plain: int
) -> tuple[list[int], Finish, frozenset[int]]:
    """How the engine ends: at a token of the model's, of the caller's, of both, or not at one."""
    finish = draw(st.sampled_from(Finish))
    at = draw(st.sampled_from([EOS, plain]))
    stop_ids = draw(st.sampled_from([set(), {at}, {EOS, plain}]))
    ending = {at, *stop_ids} if finish is Finish.STOP else stop_ids
    ids = [one for one in ids if one not in ending]
    return ids + [at] * (finish is Finish.STOP), finish, frozenset(stop_ids)


@st.composite
def askings(
    draw: st.DrawFn,
    pieces: Sequence[Piece],
    stop_ids: frozenset[int],
    any_stops: st.SearchStrategy[str],
) -> Asked:
    """Stops that occur in the text, that nearly do, that are all of it, and any others."""
    text = "".join(piece.text for piece in pieces)
    stops = draw(st.lists(any_stops, max_size=2))
    for _ in range(draw(st.integers(0, 3)) if text else 0):
        start = draw(st.integers(0, len(text) - 1))
        part = text[start : start + draw(st.integers(1, 5))]
        kinds = [part, part, part, part + "a", part[:-1] + "b", part + "\x00", text, text[-3:]]
        stops.append(draw(st.sampled_from(kinds)))
    stops = draw(st.permutations(stops))
    return Asked(tuple(stops), stop_ids, draw(st.booleans()), draw(st.integers(0, 6)))


cases = st.one_of(made_up_cases(), tokenized_cases())
splits = st.builds(Split, st.lists(st.integers(0, 5), max_size=6).map(tuple), st.booleans())
fewer = settings(max_examples=50)
"""For what the comparison with the oracle covers as well, said by itself."""


@settings(max_examples=300)
@given(cases, splits)
def test_outcome_is_the_oracles(case: Case, split: Split) -> None:
    """Text, tokens, finish, stop match and count: all clauses on a finished output at once."""
    assert run(case, split).seen == case.seen


@given(cases, splits, splits)
def test_outcome_does_not_depend_on_the_split(case: Case, split: Split, other: Split) -> None:
    """What a client has in the end is the engine's doing, not that of the deltas it came in."""
    assert run(case, split).seen == run(case, other).seen


@fewer
@given(cases, splits)
def test_pieces_of_every_step_are_its_text(case: Case, split: Split) -> None:
    """Special tokens aside, the pieces concatenate to the text; no text comes without a token."""
    for step in run(case, split).steps:
        plain = [t.text for t in step.tokens if SPECIAL.get(t.token_id) != t.text]
        assert "".join(plain) == step.text
        assert step.tokens or not step.text


@fewer
@given(tokenized_cases(), splits)
def test_text_is_whole_characters_of_the_bytes(case: Case, split: Split) -> None:
    """A character is emitted once, whole: all text is valid, and that of the bytes decoded."""
    ids = tuple(piece.token_id for piece in case.pieces)
    result = run(case, split)

    for step in result.steps:
        step.text.encode()
    shown = "".join(step.text for step in result.steps)
    whole = all_bytes((*case.prompt, *ids)).decode(errors="replace")
    before = all_bytes(case.prompt).decode(errors="replace")
    # The prompt may end in a character that the output finishes.
    starts = {len(before)} | ({len(before) - 1} if before.endswith(REPLACEMENT) else set())
    assert any(whole[start:].startswith(shown) for start in starts)


@fewer
@given(cases, splits)
def test_tokens_are_the_engines_once_and_in_order(case: Case, split: Split) -> None:
    """What is emitted is where the engine's sequence begins: no token lost, repeated or moved."""
    ids = [token_id for token_id, _ in run(case, split).tokens]

    assert ids == [piece.token_id for piece in case.pieces[: len(ids)]]


@fewer
@given(cases, splits)
def test_the_last_step_alone_finishes(case: Case, split: Split) -> None:
    """One finish, with a stop match exactly where the reason is STOP."""
    *earlier, last = run(case, split).steps

    assert all(step.finish is None and step.stop_match is None for step in earlier)
    assert last.finish is not None
    assert (last.stop_match is not None) == (last.finish is Finish.STOP)


@given(cases, splits)
def test_held_back_is_what_a_stop_may_still_take(case: Case, split: Split) -> None:
    """All that no stop can take any more has been shown, and nothing that one still can.

    A token leaves whole, so besides the tail that may grow into a stop the rest of the token
    in which it begins waits.
    """
    asked = case.asked
    stops = () if asked.include else asked.stops
    result = run(case, split)
    shown: list[tuple[int, str]] = []
    for step, fed in zip(result.steps[:-1], result.fed, strict=False):
        shown += [(token.token_id, token.text) for token in step.tokens]
        made = case.pieces[:fed]
        text = "".join(piece.text for piece in made)
        visible = sum(len(piece.text) for piece in made[: len(shown)])
        safe = len(text) - may_grow(text, stops)
        assert visible <= safe
        waiting = made[len(shown) :]
        if not asked.stops or asked.include:
            assert not waiting
        elif waiting:
            # The tail begins in the first of them that has text.
            lengths = [len(piece.text) for piece in waiting if piece.text]
            assert sum(lengths[1:]) <= max(0, max(map(len, stops)) - 2)
            # The first of all is that, or part of a character that the stop may begin with.
            first, end = waiting[0], visible + len(waiting[0].text)
            assert end > safe or (end == safe and not first.shown)


@fewer
@given(cases, splits)
def test_shown_text_is_no_part_of_the_stop(case: Case, split: Split) -> None:
    """Wherever a stop ends the output, nothing shown before or with it reaches into the stop.

    What was shown can't be taken back, so the whole text tells it for every step.
    """
    case = replace(case, asked=replace(case.asked, include=False))
    found = first_stop(case.pieces, case.asked.stops, case.asked.min_tokens)
    result = run(case, split)
    match = result.steps[-1].stop_match
    if match is not None and match.kind is StopKind.TEXT:
        assert found is not None
        stop, end, _ = found
        assert result.seen.text == case.text[: end - len(stop)]


@fewer
@given(cases, splits)
def test_the_end_flushes_what_was_held_back(case: Case, split: Split) -> None:
    """An output that no stop text ends shows every token and all text, an abort included."""
    result = run(replace(case, finish=Finish.ABORT), split)

    if result.steps[-1].finish is Finish.ABORT:
        assert result.seen.text == case.text
        assert len(result.tokens) == len(case.pieces) == result.generated


@fewer
@given(cases, splits)
def test_count_is_the_same_whether_the_stop_is_shown_or_not(case: Case, split: Split) -> None:
    """``completion_tokens`` counts what the engine generated, in both settings."""
    shown, hidden = (
        run(replace(case, asked=replace(case.asked, include=include)), split)
        for include in (True, False)
    )

    assert shown.generated == hidden.generated
    assert shown.seen.text.startswith(hidden.seen.text)
    # The last token that is left may be cut where the stop begins.
    whole = hidden.tokens[:-1]
    assert shown.tokens[: len(whole)] == whole


@fewer
@given(cases, splits)
def test_no_stop_text_ends_within_min_tokens(case: Case, split: Split) -> None:
    """A stop text may begin within the first ``min_tokens`` tokens, and ends behind them."""
    result = run(case, split)
    match = result.steps[-1].stop_match

    if match is not None and match.kind is StopKind.TEXT:
        assert result.generated > case.asked.min_tokens


@fewer
@given(cases, splits, st.integers(1, 4), st.integers(0, 5))
def test_a_stop_that_never_comes_changes_nothing(
    case: Case, split: Split, length: int, place: int
) -> None:
    """It may hold text back for a while; in the end all is as without it."""
    absent = next(char for char in map(chr, range(0xE000, 0xF000)) if char not in case.text)
    never = case.text[:length] + absent
    stops = list(case.asked.stops)
    stops.insert(place, never)
    with_it = replace(case, asked=replace(case.asked, stops=tuple(stops)))

    assert run(with_it, split).seen == run(case, split).seen

"""What a client sees of an output, against vLLM's own detokenizer and stop check.

vLLM decodes the same tokens with the same stops; whatever way the tokens come in, text, stop
and token count have to be its own. It re-emits prompt text when a prompt ends inside a
character, which is taken out of its side before stops are looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from openengine_vllm.engine.decode import FastDetokenizer
from openengine_vllm.engine.outputs import (
    Finish,
    SequenceOutput,
    Step,
    StopKind,
    StopMatch,
    StopRules,
    Token,
)
from openengine_vllm.engine.stops import StopAutomaton
from tests.unit.byte_tokenizers import byte_fallback, byte_ids, byte_level, special_id

TOKENIZER = byte_level()
DETOKENIZER = FastDetokenizer(TOKENIZER)
SPECIAL = DETOKENIZER.special_tokens
EOS = special_id(TOKENIZER, "<eos>")
BOS = special_id(TOKENIZER, "<bos>")
STOP = special_id(TOKENIZER, "<stop>")


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


LETTER = ids_of("z")[0]
"""An ordinary token that a caller may stop at."""


@dataclass(frozen=True)
class Scenario:
    """What an engine generated and what the caller asked for; it fits what an engine can do."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: Finish
    """With STOP the last of the tokens is the one that the engine stopped at."""
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    include: bool = False
    min_tokens: int = 0
    tokenizer: Tokenizer = field(default=TOKENIZER, repr=False)

    @property
    def rules(self) -> StopRules:
        automaton = StopAutomaton(self.stops) if self.stops else None
        return StopRules(automaton, self.stop_ids, self.include, self.min_tokens)

    def deltas(self, sizes: Sequence[int]) -> list[tuple[list[int], Finish | None]]:
        """The tokens in deltas of these sizes, the rest one by one."""
        left, result = list(self.tokens), []
        for size in [*sizes, *([1] * len(self.tokens))]:
            if not left:
                break
            head, left = left[:size], left[size:]
            result.append((head, None if left else self.finish))
        return result or [([], self.finish)]


@dataclass(frozen=True)
class Seen:
    """All that a client, or a user of vLLM, sees in the end."""

    text: str
    stop: str | int | None
    generated: int


class PromptFree(FastIncrementalDetokenizer):
    """vLLM's detokenizer, without the prompt text that the first text may begin with."""

    def __init__(self, tokenizer: Tokenizer, request: EngineCoreRequest) -> None:
        super().__init__(PreTrainedTokenizerFast(tokenizer_object=tokenizer), request)
        shown = tokenizer.decode(list(request.prompt_token_ids or ()))
        # The replacement character at the end is an unfinished one, which may get finished.
        self.starts = [shown, shown[:-1]] if shown.endswith("\ufffd") else []

    def decode_next(self, next_token_id: int) -> str:
        text: str = super().decode_next(next_token_id)
        if text and self.starts:
            text = text.removeprefix(next(filter(text.startswith, self.starts), ""))
            self.starts = []
        return text


def by_vllm(scenario: Scenario, sizes: Sequence[int] = ()) -> Seen:
    """The final result of vLLM's detokenizer."""
    params = SamplingParams(
        stop=list(scenario.stops),
        min_tokens=scenario.min_tokens,
        max_tokens=1 << 20,
        include_stop_str_in_output=scenario.include,
        detokenize=True,
    )
    request = EngineCoreRequest(
        "r", list(scenario.prompt), None, params, None, 0.0, None, None, None
    )
    state = PromptFree(scenario.tokenizer, request)
    for tokens, finish in scenario.deltas(sizes):
        stop = state.update(tokens, finish is Finish.STOP)
        if stop is not None:
            return Seen(state.output_text, stop, state.num_output_tokens())
    stop_id = scenario.tokens[-1] if scenario.finish is Finish.STOP else None
    return Seen(state.output_text, stop_id, state.num_output_tokens())


def run(scenario: Scenario, sizes: Sequence[int] = ()) -> tuple[SequenceOutput, list[Step]]:
    """All steps up to the finish."""
    detokenizer = FastDetokenizer(scenario.tokenizer)
    output = SequenceOutput(
        detokenizer.decoder(scenario.prompt), detokenizer.special_tokens, scenario.rules
    )
    steps = []
    for tokens, finish in scenario.deltas(sizes):
        steps.append(output.feed(tokens, finish))
        if steps[-1].finish is not None:
            break
    return output, steps


def seen(output: SequenceOutput, steps: Sequence[Step]) -> Seen:
    match = steps[-1].stop_match
    text = "".join(step.text for step in steps)
    return Seen(text, None if match is None else match.value, output.generated)


def sent(steps: Sequence[Step]) -> list[Token]:
    return [token for step in steps for token in step.tokens]


def is_special(scenario: Scenario, token: Token) -> bool:
    special = FastDetokenizer(scenario.tokenizer).special_tokens
    return special.get(token.token_id) == token.text


WORDS = ("ab", "abc", "€", "é", "日本", "😀", "the end", "\n\n", "a", "b", " ", "\ufffd")
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map("".join)
tool = TOKENIZER.token_to_id("<tool>")
pieces = st.one_of(
    texts.map(ids_of),
    texts.map(lambda text: byte_ids(TOKENIZER, text.encode())),
    st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=3),
    st.binary(min_size=1, max_size=3).map(lambda data: byte_ids(TOKENIZER, data)),
    st.sampled_from([BOS, STOP, tool, special_id(TOKENIZER, "<pad>")]).map(lambda one: [one]),
    st.just([TOKENIZER.get_vocab_size() + 5]),
)
id_lists = st.lists(pieces, max_size=6).map(lambda lists: [one for part in lists for one in part])
prompts = st.builds(
    lambda ids, cut: tuple(ids[: len(ids) - cut] or [BOS]), id_lists, st.integers(0, 2)
)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    stop_ids = draw(st.frozensets(st.sampled_from([STOP, LETTER, EOS, BOS]), max_size=2))
    ending = {EOS, *stop_ids}
    tokens = [one for one in draw(id_lists) if one not in ending]
    finish = draw(st.sampled_from([Finish.STOP, Finish.LENGTH, Finish.ABORT]))
    text = TOKENIZER.decode(tokens)
    stops = list(draw(st.lists(texts, max_size=2)))
    for _ in range(draw(st.integers(0, 3)) if text else 0):
        start = draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + draw(st.integers(1, 4))])
    if finish is Finish.STOP:
        tokens.append(draw(st.sampled_from(sorted(ending))))
    return Scenario(
        draw(prompts),
        tuple(tokens),
        finish,
        tuple(draw(st.permutations(stops))),
        stop_ids,
        draw(st.booleans()),
        draw(st.integers(0, 6)),
    )


cuts = st.lists(st.integers(1, 5), max_size=8)
EURO = "€".encode()


def scenario(text: str = "", **changes: object) -> Scenario:
    """A plain scenario that ends by length."""
    base = Scenario((BOS, *ids_of("go")), tuple(ids_of(text)), Finish.LENGTH)
    return replace(base, **changes)  # type: ignore[arg-type]


@settings(max_examples=600)
@given(scenarios(), cuts)
@example(
    # The text of a stop token that is kept may complete a stop text.
    scenario(tokens=(LETTER,), finish=Finish.STOP, stop_ids={LETTER}, stops=("z",), include=True),
    [],
)
@example(
    scenario(
        prompt=tuple(byte_ids(TOKENIZER, b"a" + EURO[:2])), tokens=byte_ids(TOKENIZER, EURO[2:])
    ),
    [],
)
@example(
    # One token of the prompt that holds the rest of a character and the beginning of another.
    scenario(prompt=(special_id(TOKENIZER, "¥æ"),), tokens=tuple(byte_ids(TOKENIZER, b"\x80\x80"))),
    [],
)
@example(scenario(prompt=tuple(byte_ids(TOKENIZER, b"\x80\xe2")), text="a", stops=("\ufffd",)), [])
def test_result_is_vllms(case: Scenario, sizes: list[int]) -> None:
    expected = by_vllm(case)
    output, steps = run(case, sizes)

    assert steps[-1].finish is not None
    assert seen(output, steps) == expected


@given(scenarios(), cuts)
def test_result_does_not_depend_on_deltas(case: Scenario, sizes: list[int]) -> None:
    output, steps = run(case, sizes)
    single, single_steps = run(case)

    assert seen(output, steps) == seen(single, single_steps)
    assert sent(steps) == sent(single_steps)
    assert steps[-1].stop_match == single_steps[-1].stop_match
    assert steps[-1].finish is single_steps[-1].finish


@given(scenarios(), cuts)
def test_pieces_are_the_text(case: Scenario, sizes: list[int]) -> None:
    _, steps = run(case, sizes)

    for step in steps:
        plain = (token.text for token in step.tokens if not is_special(case, token))
        assert step.text == "".join(plain)
        step.text.encode()
        assert step.tokens or not step.text


@given(scenarios(), cuts)
def test_only_the_last_step_finishes(case: Scenario, sizes: list[int]) -> None:
    _, steps = run(case, sizes)

    assert [step.finish for step in steps[:-1]] == [None] * (len(steps) - 1)
    assert all(step.stop_match is None for step in steps[:-1])
    last = steps[-1]
    assert (last.stop_match is not None) == (last.finish is Finish.STOP)


@given(scenarios(), cuts)
def test_tokens_are_the_engines_up_to_the_stop(case: Scenario, sizes: list[int]) -> None:
    output, steps = run(case, sizes)
    ids = tuple(token.token_id for token in sent(steps))
    generated = case.tokens[: output.generated]
    match = steps[-1].stop_match

    if match is None or match.kind is StopKind.EOS:
        assert ids == case.tokens
    elif match.kind is StopKind.TOKEN:
        assert ids == (case.tokens if case.include else case.tokens[:-1])
    elif case.include:
        assert ids == generated
    else:
        visible = len(seen(output, steps).text)
        assert ids == generated[: count_before(case, visible)]


def count_before(case: Scenario, visible: int) -> int:
    """Tokens up to the first that begins inside the stop text, which begins at ``visible``."""
    decoder = FastDetokenizer(case.tokenizer).decoder(case.prompt)
    start = 0
    for count, token_id in enumerate(case.tokens):
        text = decoder.step(token_id)
        # A special token has no place in the text: between two characters it is before the stop.
        special = not text and token_id in SPECIAL
        if start > visible or (start == visible and not special):
            return count
        start += len(text)
    return len(case.tokens)


@given(scenarios())
def test_no_more_is_held_back_than_may_become_a_stop(case: Scenario) -> None:
    """Whatever is not shown yet belongs to tokens that reach into a beginning of a stop."""
    case = replace(case, finish=Finish.LENGTH)
    decoder = DETOKENIZER.decoder(case.prompt)
    output, steps = run(case)
    whole, ends = "", []
    for number in range(1, len(steps)):
        whole += decoder.step(case.tokens[number - 1])
        ends.append(len(whole))
        tail = 0
        if not case.include:
            tail = max(
                (n for stop in case.stops for n in range(len(stop)) if whole.endswith(stop[:n])),
                default=0,
            )
        safe = len(whole) - tail
        shown = sum(len(earlier.text) for earlier in steps[:number])
        whole_tokens = max((end for end in ends if end <= safe), default=0)
        assert shown == whole_tokens
    assert output.generated == len(case.tokens) or steps[-1].finish is Finish.STOP


@given(scenarios(), st.sampled_from([Finish.LENGTH, Finish.ABORT]))
def test_end_flushes_what_was_held_back(case: Scenario, finish: Finish) -> None:
    case = replace(case, finish=Finish.LENGTH, min_tokens=len(case.tokens))
    output = SequenceOutput(DETOKENIZER.decoder(case.prompt), SPECIAL, case.rules)
    steps = [output.feed([token], None) for token in case.tokens]

    steps.append(output.end(finish))

    assert seen(output, steps).text == by_vllm(replace(case, stops=())).text
    assert tuple(token.token_id for token in sent(steps)) == case.tokens
    assert steps[-1].finish is finish


FALLBACK = byte_fallback()
fallback_pieces = st.one_of(
    st.text("abcde 日é€", min_size=1, max_size=4).map(
        lambda text: FALLBACK.encode(text.replace(" ", "▁"), add_special_tokens=False).ids
    ),
    st.lists(st.integers(0, FALLBACK.get_vocab_size() - 1), min_size=1, max_size=2),
)
fallback_ids = st.lists(fallback_pieces, min_size=1, max_size=5).map(
    lambda lists: tuple(one for part in lists for one in part)
)


@given(fallback_ids, fallback_ids, st.lists(st.text("abc日é ", min_size=1, max_size=2), max_size=2))
def test_result_is_vllms_with_byte_fallback(
    prompt: tuple[int, ...], tokens: tuple[int, ...], stops: list[str]
) -> None:
    # Ids of a character that bytes spell are decoded as one run; a prompt ends between two.
    prompt = (*prompt, special_id(FALLBACK, "a"))
    case = Scenario(prompt, tokens, Finish.LENGTH, tuple(stops), tokenizer=FALLBACK)

    assert seen(*run(case)) == by_vllm(case)


@pytest.mark.parametrize("include", [False, True])
def test_special_tokens_carry_their_own_string(include: bool) -> None:
    case = scenario(tokens=(*ids_of("ab"), BOS, *ids_of("c")), include=include)
    _, steps = run(case)

    assert [token.text for token in sent(steps)][-2:] == ["<bos>", "c"]
    assert "".join(step.text for step in steps) == "abc"


@pytest.mark.parametrize("include", [False, True])
def test_eos_is_in_the_tokens_and_not_in_the_text(include: bool) -> None:
    case = scenario(tokens=(*ids_of("ab"), EOS), finish=Finish.STOP, include=include)
    _, steps = run(case)

    assert sent(steps)[-1] == Token(EOS, "<eos>", special=True)
    assert "".join(step.text for step in steps) == "ab"
    assert steps[-1].stop_match == StopMatch(StopKind.EOS, EOS)


@pytest.mark.parametrize("include", [False, True])
def test_an_eos_that_is_no_special_token_has_no_text(include: bool) -> None:
    case = scenario(tokens=(*ids_of("ab"), LETTER), finish=Finish.STOP, include=include)
    _, steps = run(case)

    assert sent(steps)[-1] == Token(LETTER, "", special=True)
    assert "".join(step.text for step in steps) == "ab"
    assert steps[-1].stop_match == StopMatch(StopKind.EOS, LETTER)


def test_an_eos_that_the_caller_asked_for_is_the_callers_stop() -> None:
    case = scenario(tokens=(*ids_of("ab"), EOS), finish=Finish.STOP, stop_ids=frozenset({EOS}))
    _, steps = run(case)

    assert steps[-1].stop_match == StopMatch(StopKind.TOKEN, EOS)
    assert EOS not in [token.token_id for token in sent(steps)]


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abz")])
def test_the_callers_stop_token_is_shown_only_if_asked(include: bool, text: str) -> None:
    case = scenario(
        tokens=(*ids_of("ab"), LETTER),
        finish=Finish.STOP,
        stop_ids=frozenset({LETTER}),
        include=include,
    )
    output, steps = run(case)

    assert "".join(step.text for step in steps) == text
    assert (sent(steps)[-1].token_id == LETTER) == include
    assert output.generated == len(case.tokens)


def test_a_token_that_carries_text_before_the_stop_is_cut() -> None:
    (the_end,) = [ids for ids in [ids_of("the end")] if ids]
    case = scenario(tokens=tuple(the_end), stops=("e end",))
    output, steps = run(case)

    assert "".join(step.text for step in steps) == "th"
    assert "".join(token.text for token in sent(steps)) == "th"
    assert output.generated == len(the_end)


def test_a_stop_that_begins_inside_a_character_takes_none_of_its_tokens() -> None:
    ids = byte_ids(TOKENIZER, b"a" + EURO + b"b")
    _, steps = run(scenario(tokens=tuple(ids), stops=("€b",)))

    assert [token.token_id for token in sent(steps)] == ids[:1]


@pytest.mark.parametrize("sizes", [[], [9]])
def test_a_special_token_right_before_a_stop_is_sent(sizes: list[int]) -> None:
    case = scenario(tokens=(*ids_of("z"), BOS, *ids_of("ab")), stops=("ab",))
    _, steps = run(case, sizes)

    assert [token.text for token in sent(steps)] == ["z", "<bos>"]


def test_a_special_token_inside_a_stop_is_not_sent() -> None:
    case = scenario(tokens=(*ids_of("za"), BOS, *ids_of("b")), stops=("ab",))
    _, steps = run(case)

    assert "".join(token.text for token in sent(steps)) == "z"


@pytest.mark.parametrize("include", [False, True])
def test_held_back_tokens_come_before_the_eos(include: bool) -> None:
    case = scenario(
        tokens=(*ids_of("za"), EOS), stops=("abc",), finish=Finish.STOP, include=include
    )
    _, steps = run(case)

    assert tuple(token.token_id for token in sent(steps)) == case.tokens
    assert "".join(step.text for step in steps) == "za"


def test_an_empty_delta_shows_nothing() -> None:
    output = SequenceOutput(DETOKENIZER.decoder([BOS]), SPECIAL, StopRules())

    assert output.feed((), None) == Step()

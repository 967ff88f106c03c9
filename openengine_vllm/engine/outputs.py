"""One output sequence as a pure state machine: engine deltas in, records to send out.

It decides what a client sees of the tokens that the engine made: where the text ends, which
tokens a stop takes with it, what is held back while a stop may still be forming, and why the
sequence finished. It knows neither vLLM nor gRPC.

The unit of release is the token: a record leaves together with its whole text, so the text of
a delta is always the concatenation of its tokens' pieces (special tokens aside).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING

from openengine_vllm.engine.decode import TokenDecoder
from openengine_vllm.engine.stops import StopAutomaton

if TYPE_CHECKING:
    from openengine_vllm.engine.scores import ScoreRow


class Finish(enum.Enum):
    """Why an output ended; ``STOP`` comes with a :class:`StopMatch`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class StopKind(enum.Enum):
    """What a stop matched."""

    TEXT = "stop_text"
    TOKEN = "stop_token_id"
    EOS = "eos_token_id"


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop that ended an output: its kind and its text or token id."""

    kind: StopKind
    value: str | int


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends the outputs of one request, shared by all of them."""

    automaton: StopAutomaton | None = None
    token_ids: frozenset[int] = frozenset()
    include_in_output: bool = False
    min_tokens: int = 0

    @property
    def most_held_back(self) -> int:
        """Characters that can be held back at the most."""
        if self.automaton is None or self.include_in_output:
            return 0
        return max(self.automaton.depth)


@dataclass(slots=True)
class Token:
    """A token to send; ``text`` is the piece that it adds, or a special token's own string.

    ``special`` tells that the output's text leaves it out; ``score`` is what was asked of it.
    """

    token_id: int
    text: str
    special: bool = False
    score: ScoreRow | None = None


@dataclass(slots=True)
class Step:
    """What one engine delta lets the client see."""

    tokens: list[Token] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    stop_match: StopMatch | None = None


@dataclass(slots=True)
class _Held:
    token: Token
    start: int
    length: int

    def is_before(self, end: int) -> bool:
        """Whether it belongs wholly or in part to the text in front of ``end``."""
        return self.start <= end if self.token.special else self.start < end

    def is_settled(self, end: int) -> bool:
        """Whether nothing of it can change any more when text from ``end`` on may."""
        return self.is_before(end) and self.start + self.length <= end


class SequenceOutput:
    """The state of one output; feed it each delta in order until a step has a ``finish``.

    Args:
        decoder: primed with the prompt.
        special_tokens: by id, tokens whose text is left out.
        rules: the request's stops.
    """

    __slots__ = ("_decoder", "_held", "_length", "_rules", "_special", "_state", "generated")

    def __init__(
        self, decoder: TokenDecoder, special_tokens: Mapping[int, str], rules: StopRules
    ) -> None:
        self._decoder = decoder
        self._special = special_tokens
        self._rules = rules
        self._state = 0
        self._length = 0
        self._held: deque[_Held] = deque()
        self.generated = 0
        """Tokens that the engine generated up to the end of this output."""

    def feed(
        self,
        token_ids: Sequence[int],
        finish: Finish | None,
        scores: Sequence[ScoreRow] | None = None,
    ) -> Step:
        """Take the next delta.

        Args:
            token_ids: new tokens; with ``Finish.STOP`` the last one is what the engine
                stopped at.
            finish: set on the engine's last delta of this output.
            scores: one for each of the tokens, when they were asked for.
        """
        step = Step()
        if finish is None and scores is None and len(token_ids) == 1:
            self._add(token_ids[0], None, step)
            return step
        rows = repeat(None, len(token_ids)) if scores is None else scores
        tokens = list(zip(token_ids, rows, strict=True))
        stopped_at = tokens.pop() if finish is Finish.STOP and tokens else None
        for token_id, score in tokens:
            if self._add(token_id, score, step):
                return step
        if stopped_at is not None:
            self._add_stop_token(*stopped_at, step)
        if finish is not None:
            step.finish = finish
            self._flush(step)
        return step

    def end(self, finish: Finish) -> Step:
        """End the output from outside; what was held back is shown."""
        return self.feed((), finish)

    def _add(self, token_id: int, score: ScoreRow | None, step: Step) -> bool:
        """Add a token; true when it completes a stop text."""
        self.generated += 1
        text = self._decoder.step(token_id)
        special = None if text else self._special.get(token_id)
        token = Token(token_id, text, False, score)
        if special is not None:
            token.text, token.special = special, True
        automaton = self._rules.automaton
        if automaton is None:
            step.tokens.append(token)
            step.text += text
            return False
        return self._add_watched(automaton, token, text, step)

    def _add_watched(self, automaton: StopAutomaton, token: Token, text: str, step: Step) -> bool:
        start = self._length
        self._length += len(text)
        self._held.append(_Held(token, start, len(text)))
        if not automaton.can_skip(self._state, text):
            may_stop = self.generated > self._rules.min_tokens
            for position, char in enumerate(text, start + 1):
                self._state = automaton.advance(self._state, char)
                match = automaton.match[self._state]
                if match is not None and may_stop:
                    self._stop_at_text(automaton.stop_text(match), position, step)
                    return True
        if self._rules.include_in_output:
            self._release(self._length, step, all_of_it=True)
        else:
            self._release(self._length - automaton.depth[self._state], step)
        return False

    def _stop_at_text(self, stop: str, end: int, step: Step) -> None:
        visible = end if self._rules.include_in_output else end - len(stop)
        for held in self._held:
            if not held.is_before(visible):
                break
            if not held.token.special:
                held.token.text = held.token.text[: visible - held.start]
                step.text += held.token.text
            step.tokens.append(held.token)
        self._held.clear()
        step.finish = Finish.STOP
        step.stop_match = StopMatch(StopKind.TEXT, stop)

    def _add_stop_token(self, token_id: int, score: ScoreRow | None, step: Step) -> None:
        if token_id not in self._rules.token_ids:
            self.generated += 1
            step.stop_match = StopMatch(StopKind.EOS, token_id)
            self._flush(step)
            step.tokens.append(Token(token_id, self._special.get(token_id, ""), True, score))
        elif not self._rules.include_in_output:
            self.generated += 1
            step.stop_match = StopMatch(StopKind.TOKEN, token_id)
        elif not self._add(token_id, score, step):  # else its own text has completed a stop text
            step.stop_match = StopMatch(StopKind.TOKEN, token_id)

    def _release(self, end: int, step: Step, *, all_of_it: bool = False) -> None:
        held = self._held
        while held and (all_of_it or held[0].is_settled(end)):
            first = held.popleft()
            step.tokens.append(first.token)
            if not first.token.special:
                step.text += first.token.text

    def _flush(self, step: Step) -> None:
        self._release(self._length, step, all_of_it=True)

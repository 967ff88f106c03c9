"""Finding stop texts in a stream of text, and how much of it may be shown meanwhile.

An Aho-Corasick automaton over all stop texts of a request. Its current depth is the length of
the longest tail of the text that may still grow into a stop: exactly the characters to hold
back, no more. vLLM's rule for which stop wins is kept: the one that ends earliest, and among
those that end together the first in the caller's list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """Immutable matcher for the stop texts of one request; states are integers, 0 the start."""

    __slots__ = ("_fail", "_first", "_next", "_stops", "depth", "match")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._first = frozenset(stop[0] for stop in stops)
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        """By state: characters of the text's tail that are a proper start of some stop."""
        self.match: list[int | None] = [None]
        """By state: index of the stop that ends here, if one does."""
        for index, stop in enumerate(stops):
            self._insert(index, stop)
        self._link()

    def _insert(self, index: int, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = following
        if self.match[state] is None:
            self.match[state] = index

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if not self._next[state]:
                self.depth[state] = self.depth[self._fail[state]]
            for char, following in self._next[state].items():
                self._fail[following] = self.advance(self._fail[state], char)
                inherited = self.match[self._fail[following]]
                own = self.match[following]
                if inherited is not None and (own is None or inherited < own):
                    self.match[following] = inherited
                queue.append(following)

    def advance(self, state: int, char: str) -> int:
        """The state after one more character of text."""
        following = self._next[state].get(char)
        while following is None and state:
            state = self._fail[state]
            following = self._next[state].get(char)
        return following or 0

    def can_skip(self, state: int, text: str) -> bool:
        """Whether ``text`` leaves the start state untouched (the common case, and quick)."""
        return not state and self._first.isdisjoint(text)

    def stop_text(self, index: int) -> str:
        """The stop text of this index in the caller's list."""
        return self._stops[index]

"""Stop strings over token borders.

Each stop string is followed by the failure function of Knuth, Morris and Pratt, so that a character costs constant
time however long the strings are, and text that may yet become a stop string is known by its length: it is held back.
The match that ends first wins; of several that end at the same character the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a growing text. One per sequence."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._fail = tuple(_failure(stop) for stop in self._stops)
        self._state = [0] * len(self._stops)
        self._heads = frozenset(stop[0] for stop in self._stops)
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, looking: bool = True) -> tuple[str, str | None]:
        """Take new text; return what may be shown of it, and the stop string that ended in it, or None.

        With `looking` False nothing matches (fewer than min_tokens exist), but a string that began here can end later.
        After a match the matcher is done.
        """
        held = self._held + text
        if not any(self._state) and self._heads.isdisjoint(text):
            self._held = ""
            return held, None
        offset = len(self._held)
        for position, char in enumerate(text, offset + 1):
            matched = self._advance(char, looking)
            if matched is not None:
                self._held = ""
                return held[: position if self._include else position - len(matched)], matched
        keep = 0 if self._include else max(self._state)
        shown = len(held) - keep
        self._held = held[shown:]
        return held[:shown], None

    def flush(self) -> str:
        """The text held back; at the end of the sequence it is no stop string any more."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str, looking: bool) -> str | None:
        """Take one character; return the longest stop string that ends with it."""
        longest: str | None = None
        for i, stop in enumerate(self._stops):
            state, fail = self._state[i], self._fail[i]
            while state and stop[state] != char:
                state = fail[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                if looking:
                    longest = stop if longest is None or len(stop) > len(longest) else longest
                else:
                    state = fail[state - 1]
            self._state[i] = state
        return longest


def _failure(pattern: str) -> tuple[int, ...]:
    """For each prefix of the pattern the length of its longest proper prefix that is also its suffix."""
    fail = [0] * len(pattern)
    state = 0
    for i in range(1, len(pattern)):
        while state and pattern[state] != pattern[i]:
            state = fail[state - 1]
        if pattern[state] == pattern[i]:
            state += 1
        fail[i] = state
    return tuple(fail)

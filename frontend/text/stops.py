"""Stop strings over text that arrives in pieces.

Text goes in and what may be shown comes out: text that could be the beginning of a stop string is held back. An
Aho–Corasick automaton over characters (Aho and Corasick, 1975) finds matches and tells how much to hold at once: the
depth of its state is the length of the longest end of the text that begins a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton of one request's stop strings, which its choices share. Memory grows with their total length."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string may not be empty")
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]
        """By state: characters held back there."""
        self.found = [""]
        """By state: the longest stop string that ends there, or ""."""
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._next)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character; 0 is the start."""
        while True:
            following = self._next[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]

    def cannot_begin_in(self, text: str) -> bool:
        """Whether no character of `text` is the first of a stop string."""
        return self._next[0].keys().isdisjoint(text)

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append("")
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            self.found[state] = self.found[state] or self.found[self._fail[state]]
            for character, following in self._next[state].items():
                if state:
                    self._fail[following] = self.step(self._fail[state], character)
                waiting.append(following)


class StopMatcher:
    """One choice's text on its way to the client.

    Feed it the text of one token at a time (often ""): the token whose text sets `matched` is the k-th, with k the
    least count whose decoded text contains a stop string, whatever number of tokens an engine returns a step. Of
    several stop strings the one that is complete first wins, and the longest of those that end at the same character.
    Text from the match on is dropped; with `include_stop` the stop string itself stays.

    At the end of the output `flush` takes the detokenizer's last text and returns all that was held back; that text
    came with no token of its own, so a match in it belongs to the last one.
    """

    def __init__(self, stops: StopStrings | Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """The stop string, once one is complete. After that no text comes out."""

    def push(self, text: str, *, armed: bool = True) -> str:
        """Take the text of one more token and return what may be shown.

        While not ``armed`` (before min_tokens) a stop string that is complete is text like any other; one that begins
        there and is completed later counts.
        """
        if self.matched is not None or not text:
            return ""
        stops = self._stops
        state = self._state
        if state == 0 and stops.cannot_begin_in(text):
            return text
        step, found = stops.step, stops.found
        whole = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            state = step(state, character)
            if found[state] and armed:
                self.matched = found[state]
                self._held = ""
                return whole[: end if self._include_stop else end - len(found[state])]
        self._state = state
        shown = len(whole) - stops.depth[state]
        self._held = whole[shown:]
        return whole[:shown]

    def flush(self, text: str = "") -> str:
        """The output has ended: take the last text and return everything held back, unless it is a stop string."""
        shown = self.push(text)
        held, self._held = self._held, ""
        return shown + held

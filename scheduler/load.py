"""How loaded a cell is, when frontends are told, and how long a refused client should stay away."""

from __future__ import annotations

from collections import deque

from protocol.frontend import Load

WHILE_CHANGING = 0.25
WHILE_STILL = 1.0
"""Seconds between two Loads."""

WINDOW = 64
"""Admissions that the drain rate is measured over."""

OLDEST = 30.0
"""Seconds after which an admission says nothing about the rate any more."""

SHORTEST_RETRY_MS = 1_000
LONGEST_RETRY_MS = 60_000


class LoadPacer:
    """Lets a Load through when it is due."""

    def __init__(self) -> None:
        self._last: Load | None = None
        self._next_look = self._next_anyway = 0.0

    def due(self, now: float) -> bool:
        """Whether it is time to look at the load at all."""
        return now >= self._next_look

    def passes(self, load: Load, now: float) -> bool:
        """Whether this load is worth sending: it changed, or the last one is a second old."""
        self._next_look = now + WHILE_CHANGING
        if load == self._last and now < self._next_anyway:
            return False
        self._last, self._next_anyway = load, now + WHILE_STILL
        return True


class DrainRate:
    """Choices that start for the first time a second, over the last few."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=WINDOW)

    def admitted(self, now: float) -> None:
        """One more left the queue."""
        self._times.append(now)

    def a_second(self, now: float) -> float:
        """0 while too little is known."""
        while self._times and now - self._times[0] > OLDEST:
            self._times.popleft()
        if len(self._times) < 2 or now <= self._times[0]:
            return 0.0
        return len(self._times) / (now - self._times[0])

    def retry_after_ms(self, waiting: int, now: float) -> int:
        """When a queue of this length has probably drained."""
        rate = self.a_second(now)
        if not rate:
            return SHORTEST_RETRY_MS
        return int(min(max(1000 * waiting / rate, SHORTEST_RETRY_MS), LONGEST_RETRY_MS))

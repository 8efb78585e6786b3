"""How long a group may take for a step before it is doubted, and before it is given up. Pure: the time is passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

FADE = 0.98
"""Per step, the slowest recent step counts a little less: about a hundred steps' memory."""

LARGE_PREFILL = 64
"""Prefill tokens from which on a step's duration says what a token costs."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds, and multiples of the predicted duration."""

    suspect_floor: float = 1.0
    suspect_factor: float = 4.0
    dead_floor: float = 5.0
    dead_factor: float = 10.0
    prefill_token: float = 0.005
    """What a prefill token is taken to cost before the group has shown it."""


class Verdict(Enum):
    """What the duration of the running step says about its group."""

    FINE = "fine"
    SUSPECT = "suspect"
    """Overdue: nothing new is admitted there."""
    DEAD = "dead"


class StepWatch:
    """The clock of one group's oldest outstanding step, which is the one it is working on.

    A step is predicted to take as long as the slowest recent one, and for its prefill what that many tokens took at
    the worst: a chunk after a run of short decodes is no hang.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._slowest = 0.0
        self._slowest_token = times.prefill_token
        self._running_since = 0.0
        self._out: deque[int] = deque()
        """Prefill tokens of each plan that is out, the running one first."""

    def planned(self, now: float, prefill_tokens: int) -> None:
        """A plan went out; the clock runs already if an earlier one is out."""
        if not self._out:
            self._running_since = now
        self._out.append(prefill_tokens)

    def done(self, now: float) -> None:
        """The oldest plan is done; the next one, if it is out, begins now."""
        took, prefill = now - self._running_since, self._out.popleft()
        self._slowest = max(took, self._slowest * FADE)
        if prefill >= LARGE_PREFILL:
            self._slowest_token = max(took / prefill, self._slowest_token * FADE)
        self._running_since = now

    def reset(self) -> None:
        """No plan is out any more."""
        self._out.clear()

    def restart(self, now: float) -> None:
        """This process was paused: the time that passed says nothing about the group."""
        self._running_since = now

    def verdict(self, now: float) -> Verdict:
        """About the step that runs now; FINE when none does."""
        if not self._out:
            return Verdict.FINE
        elapsed, times = now - self._running_since, self._times
        predicted = self._slowest + self._out[0] * self._slowest_token
        if elapsed > max(times.dead_floor, times.dead_factor * predicted):
            return Verdict.DEAD
        if elapsed > max(times.suspect_floor, times.suspect_factor * predicted):
            return Verdict.SUSPECT
        return Verdict.FINE

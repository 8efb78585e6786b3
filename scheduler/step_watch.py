"""How long a group may take for a step before it is doubted, and before it is given up. Pure: the time is passed in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FADE = 0.98
"""Per step, the slowest recent step counts a little less: about a hundred steps' memory."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds, and multiples of the predicted duration."""

    suspect_floor: float = 1.0
    suspect_factor: float = 4.0
    dead_floor: float = 5.0
    dead_factor: float = 10.0


class Verdict(Enum):
    """What the duration of the running step says about its group."""

    FINE = "fine"
    SUSPECT = "suspect"
    """Overdue: nothing new is admitted there."""
    DEAD = "dead"


class StepWatch:
    """The clock of one group's oldest outstanding step, which is the one it is working on."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._slowest = 0.0
        self._running_since: float | None = None

    def planned(self, now: float) -> None:
        """A plan went out; the clock runs already if an earlier one is out."""
        if self._running_since is None:
            self._running_since = now

    def done(self, now: float, more_out: bool) -> None:
        """The oldest plan is done; the next one, if it is out, begins now."""
        if self._running_since is not None:
            self._slowest = max(now - self._running_since, self._slowest * FADE)
        self._running_since = now if more_out else None

    def reset(self) -> None:
        """No plan is out any more."""
        self._running_since = None

    def restart(self, now: float) -> None:
        """This process was paused: the time that passed says nothing about the group."""
        if self._running_since is not None:
            self._running_since = now

    def verdict(self, now: float) -> Verdict:
        """About the step that runs now; FINE when none does."""
        if self._running_since is None:
            return Verdict.FINE
        elapsed, times = now - self._running_since, self._times
        if elapsed > max(times.dead_floor, times.dead_factor * self._slowest):
            return Verdict.DEAD
        if elapsed > max(times.suspect_floor, times.suspect_factor * self._slowest):
            return Verdict.SUSPECT
        return Verdict.FINE

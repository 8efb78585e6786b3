"""Where a request that has output may go on: where the same numbers are computed, as long as that is to be had.

A numeric class is what decides the bits of an answer (weights, precision, backend …); a group registers its digest.
Within one, a request that moves continues with the tokens it would have had. Groups of one model may be of several
classes, a rolling change of precision for example; then a request waits for one of its own, for a while.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.requests import Sequence, State

BETWEEN_LOOKS = 0.5
"""Seconds: what waits in vain is looked for this often, and only while a model has had more than one class."""


class ClassWaits:
    """Waiting requests of one model whose class has no group, and since when."""

    def __init__(self) -> None:
        self.mixed = False
        """More than one class was seen for this model: before that there is nothing to look for."""
        self._seen: bytes | None = None
        self._since: dict[Sequence, float] = {}
        self._next_look = 0.0

    def saw(self, numerics: bytes) -> None:
        """A group of this class registered, or a resume asks for it."""
        if numerics:
            self.mixed |= self._seen not in (None, numerics)
            self._seen = numerics

    def overdue(self, waiting: Iterable[Sequence], present: set[bytes], patience: float, now: float) -> list[Sequence]:
        """Those of ``waiting`` that have waited so long for a class that none of the groups is of."""
        if not self.mixed or now < self._next_look:
            return []
        self._next_look = now + BETWEEN_LOOKS
        in_vain = [each for each in waiting if each.state is State.QUEUED and is_bound(each, present)]
        self._since = {each: self._since.get(each, now) for each in in_vain}
        return [each for each, since in self._since.items() if now - since >= patience]


def is_bound(sequence: Sequence, present: set[bytes]) -> bool:
    """Whether it goes on in a class that none of these is."""
    return bool(sequence.numerics) and sequence.numerics not in present


def starts_on(sequence: Sequence, numerics: bytes) -> None:
    """It was admitted to a group of this class: from now on its output is of that class."""
    sequence.numerics = sequence.numerics or numerics


def returns(sequence: Sequence) -> None:
    """It is to be placed again; without output any class will do."""
    if not len(sequence.output):
        sequence.numerics = b""

"""Requests that may be what kills groups: how they are told from their neighbours, and when one is given up.

A request that was in an outstanding plan when its group died is a little more suspicious than before; 32 clean steps
clear it. Two deaths make a suspect, which runs with other suspects only, and with fewer of them at each further death::

    suspicion      0, 1        2          3         4 …
    runs with     anyone   15 others   3 others   nobody

(At suspicion 2 also beside those that were cleared on the same group meanwhile.) So a death narrows down who it is,
while those who only stood beside it are cleared after a few dozen steps. Whoever ran alone at two deaths is the one: it
is failed, and the same prompt is refused for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from scheduler.requests import Request, Sequence, State

SUSPECT = 2
"""Deaths that make one."""

CLEAN_STEPS = 32
"""Steps without a death that clear it."""

COMPANY = {2: 16, 3: 4}
"""Suspects that may run together, by the suspicion of the most suspicious; with more it is one."""

ALONE = 4
CONDEMNED = ALONE + 2
"""It was the only one, twice."""

QUARANTINE_SECONDS = 600.0
MOST_QUARANTINED = 1024


def is_suspect(sequence: Sequence) -> bool:
    """Whether it must not run beside those that are none."""
    return sequence.suspicion >= SUSPECT


def group_died(in_flight: Iterable[Sequence], steps: int) -> list[Sequence]:
    """Count a death against those that an outstanding plan named, ``steps`` being the group's; returns the condemned.

    One that was the only one there need not be told from others: it counts as alone from the second death on.
    """
    present = list(in_flight)
    for sequence in present:
        if steps - sequence.admitted_at >= CLEAN_STEPS:
            sequence.suspicion = 0
        sequence.suspicion += 1
        if len(present) == 1 and sequence.suspicion == SUSPECT:
            sequence.suspicion = ALONE
    return [sequence for sequence in present if sequence.suspicion >= CONDEMNED]


class Ward:
    """The suspects that run on one group, and those that were cleared there and run on beside them."""

    def __init__(self) -> None:
        self._patients: dict[Sequence, None] = {}
        self._cleared: dict[Sequence, None] = {}

    def __bool__(self) -> bool:
        """Whether any is there, or was a moment ago."""
        return bool(self._patients or self._cleared)

    def enter(self, sequence: Sequence) -> None:
        """A suspect was admitted."""
        self._cleared.pop(sequence, None)
        self._patients[sequence] = None

    def step_done(self, steps: int) -> None:
        """The group has done so many steps: whoever has had enough clean ones is no patient any more."""
        for sequence in self._patients:
            if steps - sequence.admitted_at >= CLEAN_STEPS:
                sequence.suspicion = 0
        self._discharge()

    def takes(self, sequence: Sequence, running: int) -> bool:
        """Whether it may join the ``running`` sequences of this group."""
        self._discharge()
        if not is_suspect(sequence):
            return not self._patients
        if not running:
            return True
        worst = max(each.suspicion for each in (sequence, *self._patients))
        beside = len(self._patients) + (len(self._cleared) if worst == SUSPECT else 0)
        return running == beside and len(self._patients) < COMPANY.get(worst, 1)

    def _discharge(self) -> None:
        """Those that are cleared are no patients any more; those that have left are gone."""
        for sequence in [each for each in self._patients if not is_suspect(each)]:
            del self._patients[sequence]
            self._cleared[sequence] = None
        for those in (self._patients, self._cleared):
            for sequence in [each for each in those if each.state is not State.RUNNING]:
                del those[sequence]


class Quarantine:
    """Prompts that were given up, for a while."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, request: Request, now: float) -> None:
        """Its prompt kills groups."""
        self._until[_digest(request)] = now + QUARANTINE_SECONDS
        if len(self._until) > MOST_QUARANTINED:
            self._until.popitem(last=False)

    def holds(self, request: Request, now: float) -> bool:
        """Whether the same prompt was given up lately."""
        if not self._until:
            return False
        return self._until.get(_digest(request), now) > now


def _digest(request: Request) -> bytes:
    return blake2b(request.model.encode() + b"\0" + request.prompt.tobytes(), digest_size=16).digest()

"""Requests that wait for a group, and whose turn it is.

::

    level −5  │ returning: those that ran before, by arrival
    level  0  │ fresh ones, one line per tenant in a ring:   [a: a1 a2 a3] [b: b1] [c: c1 c2]
    level  7  │ …                                              └ served while its deficit is above 0

Levels are priorities, the lowest number first. Within one, tenants take turns by deficit round robin over tokens
(Shreedhar and Varghese, 1995; the account is charged after the fact, so what a request costs need not be known): each
turn brings a tenant a quantum, what it runs is taken off. Those that were preempted or lost their group come before
the ring, for their tenants were charged before.

Waiting ages: ``aging`` seconds are worth one level, so a request gets where the most urgent ones are after as many
times that as there are levels between them. There it is last in its tenant's line, as if it had just come with that
priority; the ring stays fair, whoever has aged.

Every operation is O(log n) in what waits, most are O(1). Bounds are the caller's: a queue never refuses what already
was accepted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from scheduler.accounts import Account, TenantAccounts
from scheduler.block_pool import IntegrityError
from scheduler.requests import Sequence, State

MOST_AGED_AT_ONCE = 64
"""Requests that change level in one look: a burst that came together ages together."""


@dataclass(eq=False, slots=True)
class Line:
    """What one tenant has waiting on one level."""

    account: Account
    waiting: OrderedDict[Sequence, None] = field(default_factory=OrderedDict)


class Level:
    """Everything that waits with one priority, by birth or by age."""

    def __init__(self, priority: int, quantum: int) -> None:
        self.priority = priority
        self.returning: list[tuple[int, float, Sequence]] = []
        """(arrival, since when it waits on this level, choice)"""
        self.fresh: OrderedDict[Sequence, float] = OrderedDict()
        """In the order they came to this level, with the time they did."""
        self._quantum = quantum
        self._ring: OrderedDict[str, Line] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self.fresh or self.returning)

    def add(self, sequence: Sequence, account: Account, now: float) -> None:
        """It waits on this level from now on."""
        if is_returning(sequence):
            insort(self.returning, (sequence.arrival, now, sequence))
            return
        self.fresh[sequence] = now
        tenant = sequence.request.tenant
        line = self._ring.get(tenant)
        if line is None:
            line = self._ring[tenant] = Line(account)
        line.waiting[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """It waits here no longer."""
        if sequence not in self.fresh:
            del self.returning[bisect_left(self.returning, (sequence.arrival,))]
            return
        del self.fresh[sequence]
        line = self._ring.get(sequence.request.tenant)
        if line is not None and sequence in line.waiting:
            del line.waiting[sequence]
            if not line.waiting:
                del self._ring[sequence.request.tenant]

    def oldest(self) -> list[tuple[Sequence, float]]:
        """The first of either kind, and since when it waits here: the others came later."""
        oldest = [(sequence, since) for _, since, sequence in self.returning[:1]]
        if self.fresh:
            oldest.append(next(iter(self.fresh.items())))
        return oldest

    def in_turn(self) -> Generator[Sequence, None, None]:
        """Everything, in the order it should start. One that is still there when the next is asked for was left."""
        at = 0
        while at < len(self.returning):
            sequence = self.returning[at][2]
            yield sequence
            at += at < len(self.returning) and self.returning[at][2] is sequence
        left: list[tuple[Line, Sequence]] = []
        try:
            while self._ring:
                line = self._whose_turn()
                sequence = next(iter(line.waiting))
                yield sequence
                if sequence in line.waiting:
                    left.append((line, sequence))
                    del line.waiting[sequence]
                    if not line.waiting:
                        del self._ring[sequence.request.tenant]
        finally:
            self._bring_back(left)

    def _whose_turn(self) -> Line:
        """The first line with a deficit above 0; each that is passed gets its quantum."""
        while True:
            tenant, line = next(iter(self._ring.items()))
            if line.account.deficit > 0:
                return line
            line.account.deficit += self._quantum
            self._ring.move_to_end(tenant)

    def _bring_back(self, left: list[tuple[Line, Sequence]]) -> None:
        """Those that were shown and left are first again, in the order they were."""
        for line, sequence in reversed(left):
            if sequence in self.fresh:
                line.waiting[sequence] = None
                line.waiting.move_to_end(sequence, last=False)
                tenant = sequence.request.tenant
                self._ring[tenant] = line
                self._ring.move_to_end(tenant, last=False)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless ring and order hold the same."""
        arrivals = [arrival for arrival, _, _ in self.returning]
        if arrivals != sorted(arrivals) or arrivals != [sequence.arrival for _, _, sequence in self.returning]:
            raise IntegrityError("those that return are out of order")
        in_lines = [sequence for line in self._ring.values() for sequence in line.waiting]
        if len(in_lines) != len(self.fresh) or set(in_lines) != set(self.fresh):
            raise IntegrityError(f"{len(in_lines)} choices stand in lines, {len(self.fresh)} wait")
        if any(
            not line.waiting or any(sequence.request.tenant != tenant for sequence in line.waiting)
            for tenant, line in self._ring.items()
        ):
            raise IntegrityError("a line is empty or holds another tenant's request")


class WaitingQueue:
    """What waits for the groups of one model."""

    def __init__(self, quantum: int = 2048, aging: float = 10.0) -> None:
        """``quantum`` in tokens; ``aging`` in seconds a level, 0 for never."""
        self.tokens = 0
        """Prefill tokens of everything that waits."""
        self.fresh = self.fresh_tokens = 0
        """Choices that never ran, and their tokens: what bounds are for."""
        self.accounts = TenantAccounts(quantum)
        self._quantum, self._aging = quantum, aging
        self._levels: dict[int, Level] = {}
        """Every one that was ever used."""
        self._priorities: list[int] = []
        """Of those with something waiting, sorted."""
        self._places: dict[Sequence, Level] = {}
        self._news = False

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sequence]:
        """Everything as of now, in no order that means anything; entries may be removed on the way."""
        return iter(list(self._places))

    @property
    def by_priority(self) -> dict[int, int]:
        """How many wait on each level."""
        return {
            priority: len(self._levels[priority].fresh) + len(self._levels[priority].returning)
            for priority in self._priorities
        }

    def add(self, sequence: Sequence, now: float) -> None:
        """It waits from now on."""
        sequence.state = State.QUEUED
        self._place(sequence, sequence.request.priority, self.accounts.waits(sequence.request.tenant), now)
        self._count(sequence, 1)
        self._news = True

    def look_again(self) -> None:
        """Something that waits may go where it could not before."""
        self._news = True

    def take_news(self) -> bool:
        """Whether anything was added since the last call."""
        news, self._news = self._news, False
        return news

    def remove(self, sequence: Sequence) -> None:
        """It ended, or is to be considered anew."""
        if sequence not in self._places:
            raise IntegrityError(f"choice {sequence.rid} is not in the queue")
        self._unplace(sequence)
        self.accounts.waits_no_more(sequence.request.tenant)
        self._count(sequence, -1)

    def admit(self, sequence: Sequence) -> None:
        """It starts: its tenant is charged for its prefill, unless it was before."""
        self.accounts.started(sequence, charge=not is_returning(sequence))
        self.remove(sequence)

    def in_turn(self, now: float) -> Generator[Sequence, None, None]:
        """Everything, in the order it should start.

        The caller admits or removes what it is shown before it asks for the next, or leaves it, and closes the
        iterator: what was left keeps its place.
        """
        self._age(now)
        for priority in list(self._priorities):
            yield from self._levels[priority].in_turn()

    def displaceable(self, above: int) -> Iterator[Sequence]:
        """Fresh ones on levels less urgent than ``above``: the least urgent level first, of each the newest first."""
        for priority in reversed(self._priorities):
            if priority <= above:
                return
            yield from reversed(self._levels[priority].fresh)

    def least_urgent(self) -> int | None:
        """The last level with something fresh."""
        return next((priority for priority in reversed(self._priorities) if self._levels[priority].fresh), None)

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.tokens += sign * sequence.length
        if not is_returning(sequence):
            self.fresh += sign
            self.fresh_tokens += sign * sequence.length

    def _place(self, sequence: Sequence, priority: int, account: Account, now: float) -> None:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = Level(priority, self._quantum)
        if not level:
            insort(self._priorities, priority)
        level.add(sequence, account, now)
        self._places[sequence] = level

    def _unplace(self, sequence: Sequence) -> None:
        level = self._places.pop(sequence)
        level.remove(sequence)
        if not level:
            self._priorities.remove(level.priority)

    def _age(self, now: float) -> None:
        """Whoever has waited long enough to be as urgent as the most urgent ones goes to their level."""
        if not self._aging or len(self._priorities) < 2:
            return
        first, moved = self._priorities[0], 0
        for priority in self._priorities[1:]:
            patience = (priority - first) * self._aging
            while moved < MOST_AGED_AT_ONCE:
                ripe = [sequence for sequence, since in self._levels[priority].oldest() if now - since >= patience]
                for sequence in ripe:
                    self._unplace(sequence)
                    self._place(sequence, first, self.accounts.of(sequence.request.tenant), now)
                moved += len(ripe)
                if not ripe:
                    break

    def check_integrity(self) -> None:
        """Raise IntegrityError unless levels, lines, accounts, states and the token count hold."""
        if self._priorities != sorted(priority for priority, level in self._levels.items() if level):
            raise IntegrityError("the levels with something waiting are not those in order")
        found = []
        for level in self._levels.values():
            level.check_integrity()
            found += [*level.fresh, *(sequence for _, _, sequence in level.returning)]
        if len(found) != len(self._places) or set(found) != self._places.keys():
            raise IntegrityError(f"{len(found)} choices stand on levels, {len(self._places)} wait")
        if any(sequence.state is not State.QUEUED or sequence.slot != -1 for sequence in found):
            raise IntegrityError("something in the queue does not wait")
        fresh = [sequence.length for sequence in found if not is_returning(sequence)]
        counted = (self.tokens, self.fresh, self.fresh_tokens)
        if counted != (sum(sequence.length for sequence in found), len(fresh), sum(fresh)):
            raise IntegrityError(f"{counted} tokens, fresh choices and tokens of these are counted as waiting")
        self.accounts.check_integrity(found)


def is_returning(sequence: Sequence) -> bool:
    """Whether it ran before, here or under an earlier scheduler: it was promised to go on."""
    return bool(sequence.group) or len(sequence.output) > 0

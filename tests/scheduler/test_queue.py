"""Whose turn it is: levels, tenants in deficit round robin, waiting that ages."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol.ids import SessionId
from protocol.requests import Sampling
from scheduler.queue import WaitingQueue
from scheduler.requests import Request, Sequence, State

ARRIVALS = itertools.count()
QUANTUM = 100


def waiting(tokens: int = 10, *, tenant: str = "", priority: int = 0, group: str = "") -> Sequence:
    """A choice that is to wait; with a group it ran before."""
    request = Request(
        session=SessionId(1),
        model="m",
        prompt=np.zeros(tokens, dtype=np.int32),
        limit=1000,
        scoring=False,
        sampling=Sampling(),
        stop_ids=b"",
        stops=frozenset(),
        priority=priority,
        deadline=None,
        tenant=tenant,
    )
    arrival = next(ARRIVALS)
    sequence = Sequence(request, arrival, 0, arrival, group=group)
    request.choices.append(sequence)
    return sequence


def filled(*sequences: Sequence, quantum: int = QUANTUM, aging: float = 10.0) -> WaitingQueue:
    queue = WaitingQueue(quantum, aging)
    for sequence in sequences:
        queue.add(sequence, 0.0)
    queue.check_integrity()
    return queue


def start_next(queue: WaitingQueue, now: float = 0.0) -> Sequence:
    """Start whoever is first."""
    turns = queue.in_turn(now)
    sequence = next(turns)
    queue.admit(sequence)
    sequence.state = State.RUNNING
    turns.close()
    return sequence


def end(queue: WaitingQueue, sequence: Sequence, outputs: int = 0) -> None:
    sequence.output = np.zeros(outputs, dtype=np.int32)
    sequence.state = State.FINISHED
    queue.accounts.ended(sequence)


def test_those_that_ran_before_come_first_within_their_level() -> None:
    fresh, returning, urgent = waiting(), waiting(group="g0"), waiting(priority=-1)
    queue = filled(fresh, returning, urgent)
    assert list(queue.in_turn(0.0)) == [urgent, returning, fresh]


def test_a_modest_tenant_does_not_stand_behind_a_greedy_ones_queue() -> None:
    greedy = [waiting(100, tenant="greedy") for _ in range(50)]
    modest = waiting(100, tenant="modest")
    queue = filled(*greedy, modest)
    assert modest in [start_next(queue) for _ in range(2)]


@settings(max_examples=60, deadline=None)
@given(
    tenants=st.integers(2, 5),
    costs=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=20),
    data=st.data(),
)
def test_backlogged_tenants_get_equal_tokens_within_a_quantum_and_a_request(
    tenants: int, costs: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Each tenant always has work; what each one's requests cost is up to chance. Output counts like prompt."""
    queue, served = filled(), Counter({f"t{n}": 0 for n in range(tenants)})
    largest = max(prompt + output for prompt, output in costs)
    outputs: dict[Sequence, int] = {}
    for tenant in served:
        for _ in range(2):
            prompt, output = data.draw(st.sampled_from(costs))
            sequence = waiting(prompt, tenant=tenant)
            outputs[sequence] = output
            queue.add(sequence, 0.0)
    for _ in range(120):
        sequence = start_next(queue)
        tenant = sequence.request.tenant
        end(queue, sequence, outputs[sequence])
        served[tenant] += len(sequence.request.prompt) + outputs.pop(sequence)
        prompt, output = costs[served[tenant] % len(costs)]
        fresh = waiting(prompt, tenant=tenant)
        outputs[fresh] = output
        queue.add(fresh, 0.0)
        assert max(served.values()) - min(served.values()) <= QUANTUM + largest


def test_an_idle_tenant_keeps_neither_credit_nor_debt() -> None:
    queue = filled(waiting(5000, tenant="a"))
    end(queue, start_next(queue), 300)
    assert len(queue.accounts) == 0
    a, b = [waiting(100, tenant="a") for _ in range(4)], [waiting(100, tenant="b") for _ in range(4)]
    for sequence in (*a, *b):
        queue.add(sequence, 0.0)
    order = [start_next(queue).request.tenant for _ in range(8)]
    assert order.count("a") == 4 and order[:4].count("a") == 2


def test_output_is_charged_when_it_is_known() -> None:
    """Equal prompts; the tenant with the long answers gets fewer of them started."""
    queue, started = filled(), Counter()
    for tenant in ("long", "short"):
        for _ in range(3):
            queue.add(waiting(50, tenant=tenant), 0.0)
    for _ in range(100):
        sequence = start_next(queue)
        tenant = sequence.request.tenant
        started[tenant] += 1
        end(queue, sequence, 550 if tenant == "long" else 50)
        queue.add(waiting(50, tenant=tenant), 0.0)
    assert 5 <= started["short"] / started["long"] <= 7


def test_waiting_is_worth_a_level_every_so_often() -> None:
    low = waiting(priority=3)
    queue = filled(low, aging=10.0)
    for second in range(31):
        queue.add(waiting(), float(second))
        first = start_next(queue, float(second))
        assert first is not low or second == 30
        end(queue, first)
    # At 30 s it has reached the level of the urgent ones, behind those that stand there already.
    assert start_next(queue, 31.0) is low


def test_waiting_is_worth_nothing_without_aging() -> None:
    low = waiting(priority=3)
    queue = filled(low, waiting(), aging=0.0)
    assert next(queue.in_turn(1e9)) is not low


def test_the_aged_of_one_tenant_do_not_stand_before_another_tenant() -> None:
    """A flood that has become urgent by waiting shares with whoever comes urgent, tenant by tenant."""
    flood = [waiting(100, tenant="batch", priority=5) for _ in range(200)]
    queue = filled(*flood)
    queue.add(waiting(100, tenant="chat"), 1000.0)
    first = [start_next(queue, 1000.0).request.tenant for _ in range(3)]
    assert "chat" in first


@settings(max_examples=40, deadline=None)
@given(
    priority=st.integers(-5, 20),
    rivals=st.lists(st.integers(-5, 20), min_size=1, max_size=5),
    aging=st.sampled_from([0.5, 2.0, 10.0]),
)
def test_nobody_waits_longer_than_the_levels_between_are_worth(priority: int, rivals: list[int], aging: float) -> None:
    """One start a second, and every second as many new rivals as can start: without aging it might wait forever."""
    one = waiting(1, tenant="x", priority=priority)
    queue = filled(one, aging=aging, quantum=1)
    bound = max(priority - min(rivals), 0) * aging + 2 * len(rivals) + 4
    for second in itertools.count():
        assert second <= bound
        queue.add(waiting(1, tenant=f"r{second % 3}", priority=rivals[second % len(rivals)]), float(second))
        started = start_next(queue, float(second))
        end(queue, started)
        if started is one:
            break


def test_what_is_left_keeps_its_place() -> None:
    sequences = [waiting(10, tenant=tenant) for tenant in "aababcc"]
    queue = filled(*sequences)
    order = list(queue.in_turn(0.0))
    assert len(order) == len(sequences) and set(order) == set(sequences)
    turns = queue.in_turn(0.0)
    left = [next(turns) for _ in range(3)]
    chosen = next(turns)
    queue.admit(chosen)
    chosen.state = State.RUNNING
    turns.close()
    queue.check_integrity()
    again = list(queue.in_turn(0.0))
    assert again[:3] == left and chosen not in again and len(again) == len(sequences) - 1


def test_the_newest_of_the_least_urgent_is_displaced_first_and_never_one_that_ran() -> None:
    sequences = [waiting(priority=priority, group=group) for priority, group in ((0, ""), (2, ""), (2, ""), (2, "g0"))]
    queue = filled(*sequences, waiting(priority=1))
    assert list(queue.displaceable(1)) == [sequences[2], sequences[1]]
    assert list(queue.displaceable(2)) == []
    assert queue.least_urgent() == 2


def test_a_hundred_thousand_waiting_cost_a_step_no_more_than_a_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in Python calls, not in time."""
    import sys

    def calls(queue: WaitingQueue) -> int:
        count = 0

        def tracer(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(tracer)
        try:
            for _ in range(20):
                sequence = start_next(queue, 1.0)
                end(queue, sequence)
                queue.add(waiting(tenant="t1"), 1.0)
            gone = next(iter(queue._places))
            queue.remove(gone)
        finally:
            sys.setprofile(None)
        return count

    small = filled(*(waiting(tenant=f"t{n % 50}", priority=n % 3) for n in range(100)))
    large = WaitingQueue(QUANTUM, 10.0)
    for n in range(100_000):
        large.add(waiting(tenant=f"t{n % 50}", priority=n % 3), 0.0)
    assert calls(large) <= 1.5 * calls(small) + 100


class QueueMachine(RuleBasedStateMachine):
    """Any order of comings, starts, preemptions and ends."""

    @initialize(aging=st.sampled_from([0.0, 1.0, 5.0]))
    def start(self, aging: float) -> None:
        self.queue, self.now = WaitingQueue(QUANTUM, aging), 0.0
        self.waits: set[Sequence] = set()
        self.runs: list[Sequence] = []

    @rule(tenant=st.sampled_from("abc"), priority=st.integers(-2, 2), tokens=st.integers(1, 300))
    def comes(self, tenant: str, priority: int, tokens: int) -> None:
        sequence = waiting(tokens, tenant=tenant, priority=priority)
        self.queue.add(sequence, self.now)
        self.waits.add(sequence)

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(skip=st.integers(0, 5), take=st.integers(1, 4))
    def some_start(self, skip: int, take: int) -> None:
        turns = self.queue.in_turn(self.now)
        shown = set()
        for nth, sequence in enumerate(turns):
            assert sequence in self.waits and sequence not in shown, "everyone once"
            shown.add(sequence)
            if nth >= skip:
                self.queue.admit(sequence)
                sequence.state, sequence.group = State.RUNNING, "g0"
                self.waits.remove(sequence)
                self.runs.append(sequence)
            if nth >= skip + take:
                break
        turns.close()

    @precondition(lambda self: self.runs)
    @rule(pick=st.integers(0, 99), outputs=st.integers(0, 400))
    def one_ends(self, pick: int, outputs: int) -> None:
        end(self.queue, self.runs.pop(pick % len(self.runs)), outputs)

    @precondition(lambda self: self.runs)
    @rule(pick=st.integers(0, 99))
    def one_is_preempted(self, pick: int) -> None:
        sequence = self.runs.pop(pick % len(self.runs))
        sequence.output = np.zeros(len(sequence.output) + 3, dtype=np.int32)
        self.queue.add(sequence, self.now)
        self.waits.add(sequence)

    @precondition(lambda self: self.waits)
    @rule(pick=st.integers(0, 99))
    def one_gives_up(self, pick: int) -> None:
        sequence = sorted(self.waits, key=lambda each: each.arrival)[pick % len(self.waits)]
        self.queue.remove(sequence)
        self.queue.accounts.ended(sequence)
        self.waits.remove(sequence)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "queue"):
            self.queue.check_integrity()
            assert len(self.queue) == len(self.waits) == sum(self.queue.by_priority.values())

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            assert set(self.queue.in_turn(self.now)) == self.waits


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyOrderOfTheQueue = QueueMachine.TestCase

"""Deadlines of what has finished do not pile up."""

from __future__ import annotations

from scheduler.deadlines import SPARE, Deadlines
from scheduler.requests import State
from tests.scheduler.rig import Rig, submit
from tests.scheduler.test_queue import waiting


def test_the_earliest_comes_first_and_what_has_finished_is_passed_over() -> None:
    deadlines = Deadlines()
    first, second, done = (waiting().request for _ in range(3))
    deadlines.watch(second, 2.0)
    deadlines.watch(first, 1.0, 3.0)
    deadlines.watch(done, 1.5)
    done.choices[0].state = State.FINISHED
    assert deadlines.next() == 1.0
    assert list(deadlines.passed(2.5)) == [first, second]
    assert deadlines.next() == 3.0 and list(deadlines.passed(3.0)) == [first] and deadlines.next() is None


def test_memory_is_bounded_by_what_is_live() -> None:
    deadlines = Deadlines()
    live = [waiting().request for _ in range(100)]
    for request in live:
        deadlines.watch(request, 1e6)
    for _ in range(20 * SPARE):
        gone = waiting().request
        deadlines.watch(gone, 1e6)
        gone.choices[0].state = State.FINISHED
    assert len(deadlines) <= 2 * len(live) + SPARE + 1
    assert list(deadlines.passed(1e6)) == live


def test_a_far_deadline_of_a_finished_request_is_nobodys_wake_up() -> None:
    rig = Rig()
    rig.group()
    frontend = rig.frontend()
    rig.submit(frontend, submit(1, remaining_ms=600_000))
    rig.run_until_idle()
    rig.turn(700.0)
    assert len(frontend.finishes) == 1

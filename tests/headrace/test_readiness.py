"""A server is ready once every frontend is and one group has registered."""

from __future__ import annotations

from typing import Any

from headrace.lease import LeaseEvent, LeaseEventKind
from headrace.supervision.readiness import Readiness


def state(role: str, name: str, state: str, **details: Any) -> LeaseEvent:
    return LeaseEvent(role, name, 1, LeaseEventKind.STATE, {"state": state, **details})


def gone(role: str, name: str) -> LeaseEvent:
    return LeaseEvent(role, name, 1, LeaseEventKind.GONE)


def two_frontends() -> Readiness:
    return Readiness(frozenset({"frontend-0", "frontend-1"}))


def test_all_frontends_and_one_rank_are_needed() -> None:
    readiness = two_frontends()
    for event in (state("frontend", "frontend-0", "ready"), state("rank", "m/g0/1/0", "ready")):
        readiness.observe(event)
        assert not readiness.ready
    readiness.observe(state("frontend", "frontend-1", "ready"))
    assert readiness.ready


def test_a_frontend_that_died_is_needed_again() -> None:
    readiness = two_frontends()
    for event in (
        state("frontend", "frontend-0", "ready"),
        state("frontend", "frontend-1", "ready"),
        gone("frontend", "frontend-0"),
        state("rank", "m/g0/1/0", "ready"),
    ):
        readiness.observe(event)
    assert not readiness.ready
    assert readiness.waiting_for() == "1 of 2 frontends are ready"


def test_the_progress_is_that_of_the_rank_that_is_furthest() -> None:
    readiness = two_frontends()
    assert readiness.waiting_for() == "starting"
    readiness.observe(state("ray-head", "ray-head", "starting"))
    assert readiness.waiting_for() == "starting Ray"
    readiness.observe(state("rank", "m/g0/1/0", "loading", stage="loading weights", fraction=0.25))
    readiness.observe(state("rank", "m/g1/1/0", "starting"))
    assert readiness.waiting_for() == "loading weights 25%"


def test_whatever_a_child_reports_there_is_a_phrase() -> None:
    readiness = two_frontends()
    readiness.observe(state("rank", "m/g0/1/0", "loading", stage=7, fraction="x"))
    assert readiness.waiting_for() == "7"

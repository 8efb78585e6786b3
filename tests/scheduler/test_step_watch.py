"""A group is doubted by what its steps have taken and by what the running one holds."""

from __future__ import annotations

import pytest

from scheduler.step_watch import StepTimes, StepWatch, Verdict

TIMES = StepTimes()


@pytest.fixture
def watch() -> StepWatch:
    return StepWatch(TIMES)


def run(watch: StepWatch, start: float, seconds: float, prefill_tokens: int = 0) -> None:
    watch.planned(start, prefill_tokens)
    watch.done(start + seconds)


def test_nothing_out_is_nothing_overdue(watch) -> None:
    assert watch.verdict(1e9) is Verdict.FINE
    run(watch, 0.0, 0.1)
    assert watch.verdict(1e9) is Verdict.FINE


def test_a_first_decode_has_the_floors(watch) -> None:
    watch.planned(0.0, 0)
    assert watch.verdict(0.9) is Verdict.FINE
    assert watch.verdict(1.1) is Verdict.SUSPECT
    assert watch.verdict(5.1) is Verdict.DEAD


def test_a_groups_own_pace_raises_the_limits(watch) -> None:
    run(watch, 0.0, 2.0)
    watch.planned(10.0, 0)
    assert watch.verdict(10.0 + 4 * 2.0) is Verdict.FINE
    assert watch.verdict(10.0 + 10 * 2.0) is Verdict.SUSPECT
    assert watch.verdict(10.0 + 10 * 2.0 + 0.1) is Verdict.DEAD


def test_a_large_chunk_after_short_decodes_is_no_hang(watch) -> None:
    for step in range(500):
        run(watch, float(step), 0.02)
    watch.planned(1000.0, 512)
    assert watch.verdict(1010.0) is Verdict.FINE
    watch.done(1016.0)
    for step in range(500):
        run(watch, 2000.0 + step, 0.02)
    watch.planned(3000.0, 512)
    assert watch.verdict(3016.0) is Verdict.FINE, "what a token took is not forgotten"
    assert watch.verdict(3100.0) is Verdict.SUSPECT
    assert watch.verdict(3200.0) is Verdict.DEAD


def test_the_clock_of_the_second_plan_starts_when_the_first_is_done(watch) -> None:
    watch.planned(0.0, 0)
    watch.planned(0.1, 0)
    watch.done(4.0)
    assert watch.verdict(4.9) is Verdict.FINE
    watch.reset()
    assert watch.verdict(100.0) is Verdict.FINE


def test_a_pause_of_this_process_proves_nothing(watch) -> None:
    watch.planned(0.0, 0)
    watch.restart(60.0)
    assert watch.verdict(60.5) is Verdict.FINE

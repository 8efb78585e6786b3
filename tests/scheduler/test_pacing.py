"""Prefill beside decodes is bounded by what it costs them, in whatever unit the machine counts."""

from __future__ import annotations

import pytest

from scheduler.pacing import PrefillPace


def measured(decodes_us: int, token_us: float, stretch: float = 4.0, most: int = 8192) -> PrefillPace:
    pace = PrefillPace(stretch, most)
    for _ in range(40):
        pace.step_took(decodes_us, 8, 0)
        pace.step_took(round(decodes_us + 256 * token_us), 8, 256)
    return pace


@pytest.mark.parametrize(("decodes_us", "token_us"), [(10_000, 40.0), (60_000, 250.0), (30_000, 60.0)])
def test_a_step_stretches_to_its_bound_and_no_further(decodes_us: int, token_us: float) -> None:
    bound = measured(decodes_us, token_us).bound(8)
    assert bound == pytest.approx(3 * decodes_us / token_us, rel=0.02)


def test_without_decodes_nobody_is_held_up() -> None:
    assert measured(10_000, 500.0).bound(0) == 8192


def test_a_bound_of_zero_is_none() -> None:
    assert measured(10_000, 500.0, stretch=0.0).bound(8) == 8192


def test_prefill_goes_on_however_dear_it_is() -> None:
    assert measured(1_000, 5_000.0).bound(8) == 8192 // 16
    assert PrefillPace(4.0, 2).bound(1) == 1


def test_before_anything_was_measured_prefill_has_a_quarter() -> None:
    assert PrefillPace(4.0, 8192).bound(3) == 2048


def test_an_engine_whose_steps_take_no_time_keeps_the_quarter() -> None:
    pace = PrefillPace(4.0, 512)
    for _ in range(5):
        pace.step_took(0, 8, 0)
        pace.step_took(0, 8, 128)
    assert pace.bound(8) == 128


def test_a_machine_that_got_slower_is_noticed() -> None:
    pace = measured(10_000, 40.0)
    for _ in range(30):
        pace.step_took(10_000 + 50 * 100, 8, 100)
    assert pace.bound(8) == pytest.approx(600, rel=0.01)

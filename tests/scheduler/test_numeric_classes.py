"""An answer that has begun goes on where the same numbers are computed, as long as that is to be had."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protocol.frontend import FinishReason
from protocol.packing import pack_u32
from protocol.worker import Register
from scheduler.numeric_classes import BETWEEN_LOOKS
from scheduler.settings import CellSettings
from tests.scheduler.fake_worker import register
from tests.scheduler.rig import FakeFrontend, Rig, submit

WAIT = 10.0
ONE, OTHER = b"1" * 16, b"2" * 16


def of_class(numerics: bytes, name: str, incarnation: int, **shape: int) -> Register:
    return replace(register(name, incarnation, **shape), numerics_digest=numerics)


@pytest.fixture
def rig() -> Rig:
    return Rig(CellSettings(exact_wait=WAIT))


def begun(rig: Rig) -> FakeFrontend:
    """Choice 1 has two ids from group a, of class ONE; group b, of the other class, is idle."""
    frontend = rig.frontend()
    worker = rig.group(of_class(ONE, "a", 1))
    rig.submit(frontend, submit(1, max_tokens=8))
    for _ in range(2):
        rig.step(worker)
    rig.group(of_class(OTHER, "b", 2))
    rig.lose(worker)
    return frontend


def test_it_waits_for_its_class_although_another_group_is_idle(rig: Rig) -> None:
    frontend = begun(rig)
    rig.turn(WAIT / 2)
    assert rig.cell.load(rig.now).requests_waiting == 1
    back = rig.group(of_class(ONE, "a", 3))
    assert back.plans[0].adds, "it goes on at home"
    rig.run_until_idle()
    rig.check_outcomes()
    assert frontend.finishes[1].reason is FinishReason.LENGTH
    assert rig.cell.statistics().resumed_inexact == 0


def test_after_a_while_it_goes_on_elsewhere_and_is_counted(rig: Rig) -> None:
    frontend = begun(rig)
    rig.turn(BETWEEN_LOOKS)
    rig.turn(WAIT)
    rig.run_until_idle()
    assert frontend.finishes[1].reason is FinishReason.LENGTH
    assert rig.cell.statistics().resumed_inexact == 1


def test_with_exact_only_it_fails_then() -> None:
    rig = Rig(CellSettings(exact_wait=WAIT, exact_only=True))
    frontend = begun(rig)
    rig.turn(BETWEEN_LOOKS)
    assert 1 in frontend.open
    rig.turn(WAIT)
    assert frontend.finishes[1].reason is FinishReason.ERROR and "exactly" in frontend.finishes[1].message


def test_one_without_output_goes_anywhere_at_once(rig: Rig) -> None:
    frontend = rig.frontend()
    worker = rig.group(of_class(ONE, "a", 1))
    rig.group(of_class(OTHER, "b", 2, max_slots=1))
    rig.submit(frontend, submit(1))
    assert frontend.started == {1: "a"}
    rig.lose(worker)
    rig.run_until_idle()
    rig.check_outcomes()


def test_a_resume_after_a_restart_of_the_scheduler_names_its_class(rig: Rig) -> None:
    frontend = rig.frontend()
    rig.group(of_class(OTHER, "b", 2))
    resumed = submit(1, max_tokens=8)
    choice = replace(resumed.choices[0], resume=pack_u32([7, 8]), numerics=ONE)
    frontend.expect(resumed)
    frontend.output[1] += [7, 8]
    rig.cell.submit(frontend.session, replace(resumed, choices=(choice,)), rig.now)
    rig.turn()
    assert not frontend.started
    home = rig.group(of_class(ONE, "a", 3))
    assert frontend.started == {1: "a"} and home.plans


def test_started_tells_the_class(rig: Rig) -> None:
    frontend = rig.frontend()
    rig.group(of_class(ONE, "a", 1))
    rig.submit(frontend, submit(1))
    assert [started.numerics for frame in frontend.frames for started in frame.started] == [ONE]

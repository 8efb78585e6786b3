"""A request that kills its group is found, alone, and given up; those beside it lose nothing but time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.frontend import FinishReason
from protocol.packing import unpack_u32
from scheduler.suspects import (
    ALONE,
    CLEAN_STEPS,
    COMPANY,
    CONDEMNED,
    MOST_QUARANTINED,
    QUARANTINE_SECONDS,
    SUSPECT,
    Quarantine,
)
from tests.scheduler.fake_worker import FakeWorker, register
from tests.scheduler.rig import FakeFrontend, Rig, submit

POISON = [9, 9, 9, 9, 9]
ROOMY = {"max_slots": 40, "num_blocks": 1024, "max_tokens_per_step": 512}


class Epidemic(Rig):
    """Groups that die whenever they execute a plan with the poison's prompt in a slot; each is launched again."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.deaths = 0
        self.company: list[int] = []
        """At each death: how many ran there."""
        self._incarnations = 0
        for index in range(groups):
            self.launch(f"g{index}")

    def launch(self, name: str) -> FakeWorker:
        self._incarnations += 1
        return self.group(register(name, self._incarnations, **ROOMY))

    def run(self, steps: int = 4000) -> None:
        """Until nothing is open."""
        for _ in range(steps):
            self.turn(0.01)
            if not any(frontend.open for frontend in self.frontends.values()):
                return
            for worker in list(self.workers.values()):
                if not worker.plans:
                    continue
                if self._poisoned(worker):
                    self.die(worker)
                else:
                    self.step(worker)
        raise AssertionError(f"still open: {[frontend.open for frontend in self.frontends.values()]}")

    def die(self, worker: FakeWorker) -> None:
        self.deaths += 1
        plan = worker.plans[0]
        self.company.append(int(worker.table.occupied.sum()) - len(unpack_u32(plan.drops)) + len(plan.adds))
        self.lose(worker)
        self.launch(worker.registration.group)

    def _poisoned(self, worker: FakeWorker) -> bool:
        in_slots = (worker.table.tokens[worker.table.occupied][:, : len(POISON)] == POISON).all(axis=1).any()
        coming = any(add.tokens[: 4 * len(POISON)] == _packed() for add in worker.plans[0].adds)
        return bool(in_slots) or coming


def _packed() -> bytes:
    return submit(1, POISON).tokens


def _ask(rig: Rig, frontend: FakeFrontend, healthy: int, max_tokens: int = 8) -> None:
    for rid in range(1, healthy + 1):
        rig.submit(frontend, submit(rid, [1, 2, 3, rid], max_tokens=max_tokens))


@pytest.mark.parametrize("groups", [1, 2])
def test_the_one_that_kills_groups_is_failed_and_nobody_else(groups: int) -> None:
    rig = Epidemic(groups)
    frontend = rig.frontend()
    _ask(rig, frontend, healthy=20, max_tokens=50)
    rig.submit(frontend, submit(99, POISON))
    rig.run()
    assert frontend.finishes[99].reason is FinishReason.ERROR
    assert {frontend.finishes[rid].reason for rid in range(1, 21)} == {FinishReason.LENGTH}
    assert rig.deaths == CONDEMNED, "two, two with less and less company, and two alone"
    assert rig.company[-2:] == [1, 1]
    rig.cell.check_integrity()


def test_one_that_is_always_alone_takes_four_deaths() -> None:
    rig = Epidemic()
    frontend = rig.frontend()
    rig.submit(frontend, submit(99, POISON))
    rig.run()
    assert frontend.finishes[99].reason is FinishReason.ERROR
    assert rig.deaths == 2 + CONDEMNED - ALONE


def test_the_company_of_a_suspect_shrinks() -> None:
    rig = Epidemic()
    frontend = rig.frontend()
    _ask(rig, frontend, healthy=35, max_tokens=50)
    rig.submit(frontend, submit(99, POISON))
    rig.run()
    # At the third death there may also be some that were cleared there.
    bounds = [36, 36, 36, COMPANY[3], 1, 1]
    assert len(rig.company) == len(bounds)
    assert all(ran <= bound for ran, bound in zip(rig.company, bounds, strict=True)), rig.company


def test_suspicion_is_cleared_by_clean_steps() -> None:
    rig = Epidemic()
    frontend = rig.frontend()
    _ask(rig, frontend, healthy=20, max_tokens=50)
    for _ in range(2):
        rig.step(next(iter(rig.workers.values())))
        rig.die(next(iter(rig.workers.values())))
    worker = next(iter(rig.workers.values()))
    rig.step(worker)
    assert worker.table.occupied.sum() == COMPANY[2]
    for _ in range(CLEAN_STEPS + 2):
        rig.step(worker)
    assert worker.table.occupied.sum() == 20, "those who waited came in when the first were cleared"
    rig.run()
    rig.check_outcomes()


def test_fresh_requests_run_beside_no_suspect_and_are_served_by_the_other_group() -> None:
    rig = Epidemic(2)
    frontend = rig.frontend()
    suspected = submit(1, [1, 2], max_tokens=50)
    rig.submit(frontend, replace(suspected, choices=(replace(suspected.choices[0], suspicion=SUSPECT),)))
    ward = frontend.started[1]
    for rid in range(2, 12):
        rig.submit(frontend, submit(rid, [5, 5]))
    assert ward not in {frontend.started[rid] for rid in range(2, 12)}
    rig.run()
    rig.check_outcomes()


def test_a_prompt_that_was_given_up_is_refused_for_a_while() -> None:
    rig = Epidemic()
    frontend = rig.frontend()
    rig.submit(frontend, submit(99, POISON))
    rig.run()
    deaths = rig.deaths
    rig.submit(frontend, submit(100, POISON, seed=12))
    assert frontend.finishes[100].reason is FinishReason.ERROR and rig.deaths == deaths
    rig.submit(frontend, submit(101, [1, *POISON]))
    rig.run()
    rig.turn(QUARANTINE_SECONDS + 1)
    rig.submit(frontend, submit(102, POISON))
    assert 102 in frontend.open, "after a while it may try again"
    rig.run()


def test_the_quarantine_is_bounded() -> None:
    rig = Rig()
    rig.group()
    frontend = rig.frontend()
    quarantine = Quarantine()
    for number in range(MOST_QUARANTINED + 10):
        rig.submit(frontend, submit(number, [number // 50 + 1, number % 50 + 1]))
    requests = [sequence.request for sequence in rig.cell._frontends[frontend.session].values()]
    for request in requests:
        quarantine.add(request, 0.0)
    assert len(quarantine) == MOST_QUARANTINED
    assert not quarantine.holds(requests[0], 1.0) and quarantine.holds(requests[-1], 1.0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 30))
def test_groups_that_die_at_random_lose_nothing(seed: int, groups: int, healthy: int) -> None:
    """No poison: whoever dies does so by chance, and every request ends as it should."""
    rig, chance = Epidemic(groups), random.Random(seed)
    frontend = rig.frontend()
    _ask(rig, frontend, healthy, max_tokens=20)
    for _ in range(400):
        rig.turn(0.01)
        for worker in list(rig.workers.values()):
            if worker.plans and chance.random() < 0.03:
                rig.die(worker)
            elif worker.plans:
                rig.step(worker)
        rig.cell.check_integrity()
    rig.run()
    condemned = [finish for finish in frontend.finishes.values() if finish.reason is FinishReason.ERROR]
    assert len(condemned) <= rig.deaths // CONDEMNED, "only whoever was there at every one of so many deaths"
    assert len(frontend.finishes) == healthy

"""Whatever happens, in whatever order: every request gets its ids, once, in order, and one end."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from protocol.requests import Sampling
from protocol.worker import DrainGroup, RowStatus
from scheduler.group_policy import GroupPolicy
from scheduler.prefix_index import ENTRY_BYTES
from scheduler.settings import CellSettings
from tests.scheduler.fake_worker import VOCAB, FakeWorker, register
from tests.scheduler.rig import EAGER, FakeFrontend, Rig, submit

SHAPES = [
    {"num_blocks": 5, "block_size": 4, "max_slots": 3, "max_tokens_per_step": 5, "context": 16},
    {"num_blocks": 9, "block_size": 4, "max_slots": 4, "max_tokens_per_step": 6, "max_ids_per_row": 3, "context": 20},
    {"num_blocks": 12, "block_size": 4, "max_slots": 6, "max_tokens_per_step": 16, "max_ids_per_row": 8},
    {"num_blocks": 40, "block_size": 4, "max_slots": 6, "max_tokens_per_step": 16, "max_ids_per_row": 2},
    {"num_blocks": 7, "block_size": 2, "max_slots": 3, "max_tokens_per_step": 64, "max_ids_per_row": 1},
    {"num_blocks": 20, "block_size": 1, "max_slots": 8, "max_tokens_per_step": 3, "max_ids_per_row": 2},
]
POLICIES = [
    GroupPolicy(),
    EAGER,
    GroupPolicy(prefix_caching=False, growth_blocks=0),
    GroupPolicy(prefix_index_bytes=3 * ENTRY_BYTES, long_prefill_threshold=2, growth_blocks=1, prefill_stretch=0.0),
]
FAMILIES = [[family, *range(40, 60)] for family in range(2)]
"""Beginnings that prompts share."""
PROMPTS = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14),
    st.builds(
        lambda family, length, tail: family[:length] + tail,
        st.sampled_from(FAMILIES),
        st.integers(1, 14),
        st.lists(st.integers(0, 3), max_size=3),
    ),
)
FAILURES = [RowStatus.NOT_READY, RowStatus.NAN, RowStatus.EMPTY_SUPPORT, RowStatus.FAULT]


class CellMachine(RuleBasedStateMachine):
    """Frontends, groups and faults at random around one cell."""

    @initialize(
        shape=st.sampled_from(SHAPES),
        groups=st.integers(1, 2),
        seed=st.integers(0, 999),
        queue_seconds=st.sampled_from([0.0, 0.0, 2.0]),
        aging=st.sampled_from([0.0, 0.5, 10.0]),
        policy=st.sampled_from(POLICIES),
    )
    def start(
        self, shape: dict[str, int], groups: int, seed: int, queue_seconds: float, aging: float, policy: GroupPolicy
    ) -> None:
        bounds = CellSettings(
            max_queue_requests=12,
            max_queue_tokens=200,
            max_queue_seconds=queue_seconds,
            priority_aging=aging,
            tenant_quantum=8,
            group=policy,
        )
        self.rig = Rig(bounds, seed)
        self.shape = shape
        self.incarnations = 0
        self.next_rid = 1
        for number in range(groups):
            self.launch(f"g{number}")
        self.rig.frontend()

    def launch(self, name: str) -> FakeWorker:
        self.incarnations += 1
        return self.rig.group(register(name, self.incarnations, **self.shape))

    def worker(self, pick: int) -> FakeWorker | None:
        workers = list(self.rig.workers.values())
        return workers[pick % len(workers)] if workers else None

    def any_frontend(self, pick: int) -> FakeFrontend:
        frontends = list(self.rig.frontends.values())
        return frontends[pick % len(frontends)]

    @rule(
        prompt=PROMPTS,
        choices=st.integers(1, 3),
        max_tokens=st.integers(0, 30),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=12),
        min_tokens=st.integers(0, 3),
        alternatives=st.tuples(*[st.sampled_from([-1, -1, 0, 2])] * 2),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["", "a", "b"]),
        remaining_ms=st.one_of(st.none(), st.none(), st.integers(0, 3000)),
        reuses=st.sampled_from([True, True, True, False]),
        salt=st.sampled_from([b"", b"", b"s"]),
        pick=st.integers(0, 9),
    )
    def submits(
        self,
        prompt: list[int],
        choices: int,
        max_tokens: int,
        stops: list[int],
        min_tokens: int,
        alternatives: tuple[int, int],
        priority: int,
        tenant: str,
        remaining_ms: int | None,
        reuses: bool,
        salt: bytes,
        pick: int,
    ) -> None:
        context = min(info.context for info in self.rig.cell.models())
        prompt = prompt[: context - 1]
        first, self.next_rid = self.next_rid, self.next_rid + choices
        message = submit(
            first,
            prompt,
            max_tokens=min(max_tokens, context - len(prompt)),
            stop=tuple(stops),
            sampling=Sampling(min_tokens=min_tokens, logprobs=alternatives[0], prompt_logprobs=alternatives[1]),
            priority=priority,
            tenant=tenant,
            remaining_ms=remaining_ms,
            choices=choices,
            seed=1000 * first,
            block_size=self.shape["block_size"] if reuses else 0,
            salt=salt,
        )
        self.rig.submit(self.any_frontend(pick), message)

    @rule(pick=st.integers(0, 99), at=st.integers(0, 9))
    def aborts(self, pick: int, at: int) -> None:
        frontend = self.any_frontend(at)
        if frontend.output:
            rid = list(frontend.output)[pick % len(frontend.output)]
            was_open = rid in frontend.open
            self.rig.abort(frontend, rid)
            assert not was_open or rid in frontend.finishes

    @rule(pick=st.integers(0, 3), times=st.integers(1, 6))
    def steps(self, pick: int, times: int) -> None:
        for _ in range(times):
            worker = self.worker(pick)
            if worker is not None and worker.plans:
                self.rig.step(worker)

    @rule(pick=st.integers(0, 3), row=st.integers(0, 7), status=st.sampled_from(FAILURES))
    def steps_with_a_failing_row(self, pick: int, row: int, status: RowStatus) -> None:
        worker = self.worker(pick)
        if worker is not None and worker.plans:
            self.rig.step(worker, {row: status})

    @rule(pick=st.integers(0, 3))
    def fails_a_step(self, pick: int) -> None:
        worker = self.worker(pick)
        if worker is not None and worker.plans:
            self.rig.fail(worker)

    @precondition(lambda self: len(self.rig.workers) > 0)
    @rule(pick=st.integers(0, 3), relaunch=st.booleans())
    def loses_a_group(self, pick: int, relaunch: bool) -> None:
        worker = self.worker(pick)
        assert worker is not None
        self.rig.lose(worker)
        if relaunch:
            self.launch(worker.registration.group)

    @precondition(lambda self: len(self.rig.workers) > 0)
    @rule(pick=st.integers(0, 3), remaining_ms=st.sampled_from([0, 500, 5000]))
    def drains_a_group(self, pick: int, remaining_ms: int) -> None:
        worker = self.worker(pick)
        assert worker is not None
        registration = worker.registration
        drain = DrainGroup(registration.group, registration.incarnation, remaining_ms)
        self.rig.cell.drain_group(drain, self.rig.now)
        self.rig.turn()

    @rule(number=st.integers(0, 2))
    def launches_a_group(self, number: int) -> None:
        self.launch(f"g{number}")

    @rule(pick=st.integers(0, 9))
    def loses_a_frontend(self, pick: int) -> None:
        frontend = self.any_frontend(pick)
        del self.rig.frontends[frontend.session]
        self.rig.cell.frontend_lost(frontend.session)
        self.rig.turn()
        if not self.rig.frontends:
            self.rig.frontend()

    @rule(seconds=st.floats(0.0, 0.9))
    def time_passes(self, seconds: float) -> None:
        self.rig.turn(seconds)

    @invariant()
    def accounts_add_up(self) -> None:
        if hasattr(self, "rig"):
            self.rig.cell.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.launch("last")  # others may be about to go
        self.rig.run_until_idle()
        self.rig.check_outcomes()
        self.rig.check_at_rest()


CellMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrderOfEvents = CellMachine.TestCase


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_any_order_of_events_at_length() -> None:
    at_length = settings(
        max_examples=5000, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(CellMachine, settings=at_length)

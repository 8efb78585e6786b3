"""The array bookkeeping of a group is that of a plain one, plan by plan and id by id."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.block_hashes import pack_hashes, root_hash
from protocol.frontend import Submit
from protocol.ids import Epoch, Incarnation, SessionId
from protocol.packing import pack_u8, pack_u32, unpack_u32
from protocol.requests import Choice, Sampling
from protocol.worker import Plan, RowStatus, StepDone
from scheduler.directory import new_model
from scheduler.group import GroupScheduler
from scheduler.group_policy import GroupPolicy
from scheduler.intake import read_submit
from scheduler.queue import WaitingQueue
from scheduler.requests import Sequence, State
from scheduler.shape import GroupShape
from tests.scheduler.fake_worker import register
from tests.scheduler.plain_group import PlainGroup, PlainOutcome, PlainPlan

SHAPES = [
    {"num_blocks": 6, "block_size": 4, "max_slots": 3, "max_tokens_per_step": 5, "context": 16},
    {"num_blocks": 9, "block_size": 4, "max_slots": 4, "max_tokens_per_step": 6, "max_ids_per_row": 3, "context": 20},
    {"num_blocks": 14, "block_size": 2, "max_slots": 6, "max_tokens_per_step": 24, "context": 20},
    {"num_blocks": 40, "block_size": 4, "max_slots": 6, "max_tokens_per_step": 40, "max_ids_per_row": 2},
    {"num_blocks": 20, "block_size": 1, "max_slots": 8, "max_tokens_per_step": 17, "max_ids_per_row": 2},
]
POLICIES = [
    GroupPolicy(),
    GroupPolicy(prefix_caching=False, prefill_stretch=0.0),
    GroupPolicy(long_prefill_threshold=3, prefill_stretch=2.0),
]
FAILURES = [RowStatus.NAN, RowStatus.EMPTY_SUPPORT, RowStatus.FAULT]
VOCAB = 12
EPOCH, INCARNATION = Epoch(1), Incarnation(2)


class Twins:
    """One group with arrays and one without, and what waits for them."""

    def __init__(self, shape: dict[str, int], policy: GroupPolicy, seed: int) -> None:
        self.rng = random.Random(seed)
        registration = register(vocab_size=VOCAB, **shape)
        self.shape = GroupShape.of(registration, 0.01)
        self.model = new_model(registration, WaitingQueue())
        self.group = GroupScheduler(self.shape, EPOCH, INCARNATION, policy)
        self.plain = PlainGroup(self.shape, policy)
        self.waiting: list[tuple[Sequence, Sequence]] = []
        self.live: dict[int, tuple[Sequence, Sequence]] = {}
        self.rids = itertools.count(1)
        self.steps = 0

    def submit(self) -> None:
        rng, rid = self.rng, next(self.rids)
        family = [rng.randrange(2), *range(2, 12)]
        prompt = family[: rng.randint(1, 10)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))]
        prompt = prompt[: self.shape.effective_context - 1]
        ids = pack_u32(prompt)
        size = rng.choice([self.shape.block_size] * 4 + [0])
        submit = Submit(
            (Choice(rid, rid),),
            "m",
            ids,
            max_tokens=rng.randint(1, self.shape.effective_context - len(prompt)),
            sampling=Sampling(min_tokens=rng.choice([0, 0, 2])),
            stop_ids=pack_u32(rng.sample(range(VOCAB), rng.choice([0, 1, 1, 9]))),
            block_hashes=pack_hashes(root_hash(), ids, size),
            block_size=size,
            priority=rng.randint(-1, 1),
        )
        pair = [
            read_submit(submit, SessionId(1), self.model.info, 0.0, itertools.count(rid)).choices[0] for _ in range(2)
        ]
        self.waiting.append((pair[0], pair[1]))
        self.live[rid] = (pair[0], pair[1])

    def admit(self) -> None:
        """In order, whatever fits; both agree on what would."""
        for ours, plains in list(self.waiting):
            free, needed = self.group.free_for_admission(), self.group.blocks_to_admit(ours)
            assert (free, needed) == (self.plain.free_for_admission(), self.plain.blocks_to_admit(plains))
            assert self.group.cached_tokens(ours) == self.plain.found(plains) * self.shape.block_size
            assert self.group.parks(ours) == self.plain.parks(plains)
            if self.group.has_room and needed <= free and not self.group.parks(ours):
                self.waiting.remove((ours, plains))
                self.group.admit(ours)
                self.plain.admit(plains)

    def plan(self) -> None:
        made, expected = self.group.plan(), self.plain.plan()
        assert (made is None) == (expected is None)
        if made is not None and expected is not None:
            assert readable(made) == readable_of(expected)
        self.take_requeued()

    def step(self, fails: bool) -> None:
        """The oldest plan is done."""
        if not self.plain.out:
            return
        rows, rng = self.plain.out[0].rows, self.rng
        statuses = [rng.choice(FAILURES) if fails and rng.random() < 0.2 else RowStatus.OK for _ in rows]
        most = self.shape.max_ids_per_row
        returned = [
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, most))]
            if row.samples and status is RowStatus.OK
            else []
            for row, status in zip(rows, statuses, strict=True)
        ]
        step_us = rng.randint(500, 1500) + 100 * sum(row.length for row in rows)
        done = StepDone(
            EPOCH,
            INCARNATION,
            self.plain.out[0].step,
            pack_u8([len(ids) for ids in returned]),
            pack_u32([token for ids in returned for token in ids]),
            pack_u8(statuses),
            step_us,
        )
        outcome = self.group.step_done(done)
        assert outcome is not None
        made = PlainOutcome(
            [
                (int(rid), int(first), ids[: int(count)].tolist())
                for rid, first, count, ids in zip(
                    outcome.delivery.rid,
                    outcome.delivery.first,
                    outcome.delivery.counts,
                    outcome.delivery.ids,
                    strict=True,
                )
            ],
            [(each.sequence.rid, each.reason, each.count, each.stop_id) for each in outcome.finished],
        )
        assert made == self.plain.step_done(returned, statuses, step_us)
        for rid, *_ in made.finished:
            del self.live[rid]
        self.take_requeued()
        self.group.check_integrity()
        self.steps += 1

    def abort(self) -> None:
        if self.live:
            ours, plains = self.live.pop(self.rng.choice([*self.live]))
            self.waiting = [pair for pair in self.waiting if pair[0] is not ours]
            self.group.end(ours)
            self.plain.abort(plains)
            self.group.check_integrity()

    def take_requeued(self) -> None:
        requeued, self.plain.requeued = self.plain.requeued, []
        made = self.group.take_requeued()
        assert [each.rid for each in made] == [each.rid for each in requeued]
        for ours, plains in zip(made, requeued, strict=True):
            assert ours.output.tolist() == plains.output.tolist()
            ours.state = State.QUEUED
            self.waiting.insert(0, (ours, plains))

    def run_dry(self) -> None:
        """Nothing new comes: everything ends, and every block is free."""
        for _ in range(5000):
            if not self.live and not self.plain.out:
                break
            self.admit()
            self.plan()
            self.step(fails=False)
        assert not self.live and not self.waiting
        blocks = self.group.statistics().blocks
        assert (blocks.used, blocks.cached) == (0, len(self.plain.cached))
        assert self.group.statistics().preemptions == self.plain.preemptions


def readable(plan: Plan) -> PlainPlan:
    return PlainPlan(
        step=plan.step,
        drops=unpack_u32(plan.drops).tolist(),
        adds=[(add.slot, add.tokens, add.computed) for add in plan.adds],
        blocks=[(slot, block) for slot, block in unpack_u32(plan.blocks, 2).tolist()],
        chunks=[(slot, length) for slot, length in unpack_u32(plan.chunks, 2).tolist()],
        skips=unpack_u32(plan.skips).tolist(),
        rows=[],
    )


def readable_of(plan: PlainPlan) -> PlainPlan:
    return PlainPlan(plan.step, plan.drops, plan.adds, plan.blocks, plan.chunks, plan.skips, [])


def run_twins(shape: dict[str, int], policy: GroupPolicy, seed: int, acts: int) -> Twins:
    twins = Twins(shape, policy, seed)
    for _ in range(acts):
        act = twins.rng.random()
        if act < 0.25:
            twins.submit()
        elif act < 0.28:
            twins.abort()
        elif act < 0.6:
            twins.admit()
            twins.plan()
        else:
            twins.step(fails=act > 0.97)
    twins.run_dry()
    return twins


@given(st.sampled_from(SHAPES), st.sampled_from(POLICIES), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_arrays_and_lists_make_the_same_plans(shape: dict[str, int], policy: GroupPolicy, seed: int) -> None:
    run_twins(shape, policy, seed, acts=120)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_arrays_and_lists_make_the_same_plans_at_length() -> None:
    operations = 0
    for seed in range(400):
        run_twins(SHAPES[seed % len(SHAPES)], POLICIES[seed % len(POLICIES)], seed, acts=300)
        operations += 300
    assert operations >= 100_000


def test_the_twins_meet_what_they_are_to_agree_on() -> None:
    """The comparison is of use only if preemption, reuse and growth happen in it."""
    seen = [run_twins(SHAPES[seed % len(SHAPES)], POLICIES[0], seed, acts=200) for seed in range(10)]
    totals = [twins.group.statistics() for twins in seen]
    assert sum(each.preemptions for each in totals) > 10
    assert sum(each.cached_tokens for each in totals) > 200
    assert sum(each.steps for each in totals) > 500

"""The scheduler decides when tokens are computed, never which: greedy text of the real model under every policy.

The real GroupScheduler, the real slot table and the torch reference in fp32, in one process without sockets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from headrace.model_files.artefacts import default_model, load_artefacts
from protocol.block_hashes import pack_hashes, root_hash
from protocol.frontend import Submit
from protocol.ids import Epoch, Incarnation, SessionId
from protocol.packing import pack_u8, pack_u32
from protocol.requests import Choice, Sampling
from protocol.worker import Register, RowStatus, StepDone
from scheduler.directory import new_model
from scheduler.group import GroupScheduler, GroupStatistics
from scheduler.group_policy import GroupPolicy
from scheduler.intake import read_submit
from scheduler.queue import WaitingQueue
from scheduler.requests import Request
from scheduler.shape import GroupShape
from tests.workers.conftest import model_cache
from tests.workers.model_rig import ignore_progress, options
from tests.workers.test_smollm2 import PROMPTS
from workers.engine import Engine
from workers.model_engine import build_model_engine
from workers.slots import SlotTable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

__all__ = ["model_cache"]

HEAD, OUTPUT = 40, 16
"""A prompt here is one of PROMPTS with the first tokens of its own greedy answer; the rest of that is expected."""
BLOCK = 16
Answers = tuple[list[list[int]], list[list[int]]]
EPOCH, INCARNATION = Epoch(1), Incarnation(2)


@pytest.fixture(scope="module")
def engine(model_cache: Path) -> Iterator[Engine]:
    engine = build_model_engine(
        options(default_model(), dtype="float32", threads=2, max_num_seqs=16, kv_cache_memory=64 << 20), ignore_progress
    )
    yield engine
    engine.close()


@dataclass
class Group:
    """A group without anything between its scheduler and its engine."""

    engine: Engine
    policy: GroupPolicy = field(default_factory=GroupPolicy)
    num_blocks: int = 0
    max_tokens_per_step: int = 0
    """0: the engine's own."""

    def __post_init__(self) -> None:
        shape = self.engine.description.shape
        self.register = Register(
            nonce=1,
            oldest_version=1,
            newest_version=1,
            group="g0",
            incarnation=INCARNATION,
            model="m",
            tp=1,
            num_blocks=self.num_blocks or shape.num_blocks,
            block_size=shape.block_size,
            max_slots=shape.max_slots,
            max_tokens_per_step=self.max_tokens_per_step or shape.max_tokens_per_step,
            max_ids_per_row=shape.max_ids_per_row,
            vocab_size=shape.vocab_size,
            context=shape.context,
            numerics_digest=b"",
            tokenizer_digest=b"",
        )
        self.scheduler = GroupScheduler(GroupShape.of(self.register, 0.01), EPOCH, INCARNATION, self.policy)
        self.model = new_model(self.register, WaitingQueue())
        self.table = SlotTable(shape)
        self.arrivals = iter(range(1000))

    def request(self, prompt: Sequence[int], max_tokens: int) -> Request:
        ids = pack_u32(prompt)
        submit = Submit(
            (Choice(1, 1),),
            "m",
            ids,
            max_tokens=max_tokens,
            sampling=Sampling(temperature=0.0),
            block_hashes=pack_hashes(root_hash(), ids, BLOCK),
            block_size=BLOCK,
        )
        return read_submit(submit, SessionId(1), self.model.info, 0.0, self.arrivals)

    def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int = OUTPUT) -> list[list[int]]:
        """The greedy outputs of prompts that come at once."""
        waiting = [self.request(prompt, max_tokens).choices[0] for prompt in prompts]
        wanted, left = list(waiting), len(waiting)
        while left:
            for sequence in list(waiting):
                room = self.scheduler.free_for_admission()
                if (
                    self.scheduler.has_room
                    and not self.scheduler.parks(sequence)
                    and self.scheduler.blocks_to_admit(sequence) <= room
                ):
                    waiting.remove(sequence)
                    self.scheduler.admit(sequence)
                    sequence.started = True
            plan = self.scheduler.plan()
            assert plan is not None, "something is left and nothing runs"
            batch = self.table.apply(plan)
            results = self.engine.execute(batch, self.table)
            assert (results.status == RowStatus.OK).all()
            self.table.commit(batch, results.counts, results.ids, np.ones(len(batch.slots), dtype=np.bool_))
            done = StepDone(
                EPOCH,
                INCARNATION,
                plan.step,
                pack_u8(results.counts),
                pack_u32(results.ids),
                pack_u8(results.status),
                step_us=20_000 + 100 * int(batch.lengths.sum()),
            )
            outcome = self.scheduler.step_done(done)
            assert outcome is not None
            left -= len(outcome.finished)
            waiting += self.scheduler.take_requeued()
            self.scheduler.check_integrity()
        return [sequence.output.tolist() for sequence in wanted]

    @property
    def statistics(self) -> GroupStatistics:
        return self.scheduler.statistics()


@pytest.fixture(scope="module")
def answers(engine: Engine) -> Answers:
    """(prompts, their greedy outputs) with whole prompts, a large pool and no reuse."""
    tokenizer = load_artefacts(default_model()).tokenizer()
    group = Group(engine, GroupPolicy(prefix_caching=False, prefill_stretch=0.0))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS[:4]]
    outputs = group.complete(prompts, HEAD + OUTPUT)
    heads = [[*prompt, *output[:HEAD]] for prompt, output in zip(prompts, outputs, strict=True)]
    return heads, [output[HEAD:] for output in outputs]


def test_a_cached_prefix_changes_no_token(engine: Engine, answers: Answers) -> None:
    prompts, expected = answers
    group = Group(engine)
    assert group.complete(prompts) == expected
    assert group.statistics.cached_tokens == 0
    assert group.complete(prompts) == expected
    found = group.statistics.cached_tokens
    assert found == sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts) > 100
    turns = [[*prompt, *output[:-3]] for prompt, output in answers_of(answers)]
    assert group.complete(turns, 3) == [output[-3:] for output in expected]
    assert group.statistics.cached_tokens > 2 * found, "with the answers"


def test_chunks_change_no_token(engine: Engine, answers: Answers) -> None:
    prompts, expected = answers
    group = Group(engine, GroupPolicy(long_prefill_threshold=21), max_tokens_per_step=50)
    assert group.complete(prompts) == expected


@pytest.mark.parametrize("caching", [False, True])
def test_a_tiny_pool_and_preemption_change_no_token(engine: Engine, answers: Answers, caching: bool) -> None:
    prompts, expected = answers
    group = Group(engine, GroupPolicy(prefix_caching=caching, growth_blocks=0), num_blocks=9, max_tokens_per_step=64)
    assert group.complete(prompts) == expected
    assert group.statistics.preemptions > 0


def test_twins_that_share_while_it_is_computed_get_the_same(engine: Engine, answers: Answers) -> None:
    prompts, expected = answers
    group = Group(engine, max_tokens_per_step=24)
    assert group.complete([prompts[0]] * 3 + [prompts[1]]) == [expected[0]] * 3 + [expected[1]]
    assert group.statistics.cached_tokens == 2 * ((len(prompts[0]) - 1) // BLOCK * BLOCK)


def answers_of(answers: Answers) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, output) of each."""
    return zip(*answers, strict=True)

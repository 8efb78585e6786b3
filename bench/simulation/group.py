"""A group of workers without a model: plans in, steps done out, after as long as the step-time model says.

The tables are the worker's own in miniature (a test holds them to it): everything is an array over slots, because
hundreds of groups share one process. Ids are a pure function of (seed, position).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.packing import pack_u8, pack_u32, unpack_u32
from protocol.worker import Plan, Register, Reset, StepDone, StepFailed
from workers.simulated import StepTimes
from workers.step_log import StepFeatures

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

FIRST_ID = 256
"""Ids below are left for stop ids."""

_GOLDEN, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def ids_at(seeds: UInt64Array, positions: Int64Array, vocab_size: int) -> Int64Array:
    """The ids at some positions of some sequences (any shapes that broadcast): splitmix64 of seed and position."""
    mixed = seeds + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX2
    mixed ^= mixed >> np.uint64(31)
    ids: Int64Array = (mixed % np.uint64(vocab_size - FIRST_ID)).astype(np.int64) + FIRST_ID
    return ids


class SimulatedGroup:
    """One incarnation of one group. The caller keeps the time: ``begin`` a step, and ``end`` it when it has passed."""

    def __init__(self, register: Register, times: StepTimes) -> None:
        self.register = register
        self.plans: deque[Plan] = deque()
        self.slowness = 1.0
        """Steps take so many times as long."""
        self.steps = 0
        self.times = times
        self._epoch = 0
        self._next_step: int | None = None

        def zeros(dtype: Any) -> npt.NDArray[Any]:
            return np.zeros(register.max_slots, dtype=dtype)

        self._occupied: npt.NDArray[np.bool_] = zeros(np.bool_)
        self._length: Int64Array = zeros(np.int64)
        self._computed: Int64Array = zeros(np.int64)
        self._target: Int64Array = zeros(np.int64)
        self._seed: UInt64Array = zeros(np.uint64)
        self._running: Step | None = None

    @property
    def running(self) -> Step | None:
        """The step that runs."""
        return self._running

    @property
    def busy(self) -> bool:
        """A step runs."""
        return self._running is not None

    def receive(self, message: object) -> None:
        """What the scheduler said; plans that come before the next Reset are discarded."""
        if isinstance(message, Reset):
            self._epoch, self._next_step = message.epoch, message.first_step
            self.plans.clear()
            self._running = None
            self._occupied[:] = False
        elif isinstance(message, Plan) and self._next_step is not None:
            self.plans.append(message)

    def begin(self) -> float:
        """Start the oldest plan; returns the seconds it takes."""
        plan = self.plans.popleft()
        if (plan.epoch, plan.step) != (self._epoch, self._next_step):
            raise AssertionError(f"step {plan.step} came where {self._next_step} was due")
        self._next_step = plan.step + 1
        step = self._running = self._apply(plan)
        return self.times.step_us(step.features) * self.slowness / 1e6

    def end(self) -> StepDone:
        """The running step is over."""
        step, most = self._running, self.register.max_ids_per_row
        assert step is not None, "no step runs"
        self._running = None
        self.steps += 1
        slots = step.slots[step.samples]
        moved = step.slots[~step.samples]
        self._computed[moved] += step.lengths[~step.samples]
        positions = self._length[slots][:, None] + np.arange(most)
        ids = ids_at(self._seed[slots][:, None], positions, self.register.vocab_size)
        self._length[slots] += most
        self._computed[slots] = self._length[slots] - 1
        features = step.features
        return StepDone(
            epoch=self._epoch,
            incarnation=self.register.incarnation,
            step=step.plan.step,
            counts=pack_u8(step.samples * most),
            ids=pack_u32(ids),
            status=bytes(len(step.slots)),
            step_us=int(self.times.step_us(features) * self.slowness),
            prefill_tokens=features.prefill_tokens,
            decode_seqs=features.decode_seqs,
            sum_ctx_decode=features.sum_ctx_decode,
            sum_chunk_ctx_prefill=features.sum_chunk_ctx_prefill,
        )

    def fail(self, kind: str = "engine", *, kv_survived: bool = True) -> StepFailed:
        """The running step comes to nothing, and so do the plans until the next Reset."""
        step = self._running
        assert step is not None, "no step runs"
        self._running, self._next_step = None, None
        self.plans.clear()
        return StepFailed(self._epoch, self.register.incarnation, step.plan.step, kind, kv_survived, "simulated")

    def _apply(self, plan: Plan) -> Step:
        """Change the tables as a plan says, and lay out its rows."""
        if plan.drops:
            self._occupied[unpack_u32(plan.drops).astype(np.intp)] = False
        decoding = np.flatnonzero(self._occupied & (self._computed >= self._target))
        for add in plan.adds:
            slot = add.slot
            self._occupied[slot] = True
            self._length[slot] = self._target[slot] = len(add.tokens) // 4
            self._computed[slot] = add.computed
            self._seed[slot] = add.seed
        if plan.skips:
            decoding = np.setdiff1d(decoding, unpack_u32(plan.skips).astype(np.intp))
        chunks = unpack_u32(plan.chunks, 2).astype(np.int64) if plan.chunks else np.zeros((0, 2), dtype=np.int64)
        slots = np.concatenate((decoding, chunks[:, 0]))
        lengths = np.concatenate((np.ones(len(decoding), dtype=np.int64), chunks[:, 1]))
        ends = self._computed[slots] + lengths
        samples = ends >= self._target[slots]
        features = StepFeatures(
            step_us=0,
            prefill_tokens=int(chunks[:, 1].sum()),
            decode_seqs=len(decoding),
            sum_ctx_decode=int(ends[: len(decoding)].sum()),
            sum_chunk_ctx_prefill=int((chunks[:, 1] * ends[len(decoding) :]).sum()),
        )
        return Step(plan, slots, lengths, samples, features)


@dataclass(frozen=True)
class Step:
    """A step that runs. Arrays are [rows]."""

    plan: Plan
    slots: Int64Array
    lengths: Int64Array
    samples: npt.NDArray[np.bool_]
    features: StepFeatures


def registration(
    group: str = "g0",
    incarnation: int = 1,
    *,
    nonce: int = 1,
    num_blocks: int = 4096,
    block_size: int = 16,
    max_slots: int = 64,
    max_tokens_per_step: int = 512,
    max_ids_per_row: int = 1,
    vocab_size: int = 50_000,
    context: int = 8192,
) -> Register:
    """How a simulated group introduces itself."""
    return Register(
        nonce=nonce,
        oldest_version=1,
        newest_version=1,
        group=group,
        incarnation=incarnation,
        model="m",
        tp=1,
        num_blocks=num_blocks,
        block_size=block_size,
        max_slots=max_slots,
        max_tokens_per_step=max_tokens_per_step,
        max_ids_per_row=max_ids_per_row,
        vocab_size=vocab_size,
        context=context,
        numerics_digest=b"simulated",
        tokenizer_digest=b"simulated",
    )

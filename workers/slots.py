"""Per-slot tables of a worker, and what a Plan does to them.

Every engine (model, scripted, simulated) shares this accounting, so a plan means the same to each of them. Knows
nothing of tensors: an engine reads these arrays and fills its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.packing import PackingError, unpack_u32
from protocol.requests import Sampling
from protocol.worker import Plan, SlotAdd

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class PlanError(ValueError):
    """A plan that contradicts the tables: the step is not run and the tables are no longer trusted until a reset."""


@dataclass(frozen=True)
class PoolShape:
    """Bounds of the tables, as registered with the scheduler."""

    num_blocks: int
    block_size: int
    max_slots: int
    max_tokens_per_step: int
    max_ids_per_row: int
    vocab_size: int
    context: int


@dataclass(frozen=True)
class StepBatch:
    """The rows of one step, in plan order: decoding slots ascending, then prefill chunks. All shapes [rows]."""

    slots: Int32Array
    starts: Int32Array
    """Position of each row's first query token."""
    lengths: Int32Array
    """Query tokens of each row: 1 for a decode, the chunk's length for a prefill."""
    samples: BoolArray
    """Whether the row returns ids: every decode, and the chunk that reaches the end of its sequence."""
    num_decodes: int
    """Rows [0, num_decodes) are decodes."""
    dropped: Int32Array
    """Slots freed before this step. Shape [dropped]."""
    added: Int32Array
    """Slots filled before this step: an engine with state of its own per slot starts them afresh. Shape [added]."""

    @property
    def context_lengths(self) -> Int32Array:
        """Tokens each row attends to at its last query token."""
        return self.starts + self.lengths


@dataclass(frozen=True)
class SlotParameters:
    """What stays the same for a sequence while it holds its slot."""

    seed: int
    sampling: Sampling
    stop_ids: Int32Array


class SlotTable:
    """Sequences by slot: token ids, block tables, lengths and parameters.

    ::

        tokens[slot]   p p p p p p g g            prompt, then output;  length = 8, prompt_len = 6
        KV written     k k k k k k k .            computed = 7: a decoding slot has computed = length - 1
        target                     ^              the length it was added with: prefilling while computed < target
    """

    def __init__(self, shape: PoolShape) -> None:
        self.shape = shape
        slots, width = shape.max_slots, shape.context + 2 * shape.max_ids_per_row
        self.tokens: Int32Array = np.zeros((slots, width), dtype=np.int32)
        self.blocks: Int32Array = np.zeros((slots, -(-width // shape.block_size)), dtype=np.int32)
        self.num_blocks: Int32Array = np.zeros(slots, dtype=np.int32)
        self.length: Int32Array = np.zeros(slots, dtype=np.int32)
        self.prompt_len: Int32Array = np.zeros(slots, dtype=np.int32)
        self.computed: Int32Array = np.zeros(slots, dtype=np.int32)
        self.target: Int32Array = np.zeros(slots, dtype=np.int32)
        self.occupied: BoolArray = np.zeros(slots, dtype=np.bool_)
        self.parameters: list[SlotParameters | None] = [None] * slots

    def reset(self) -> None:
        """Drop every slot."""
        self.occupied[:] = False
        self.parameters = [None] * self.shape.max_slots

    def apply(self, plan: Plan) -> StepBatch:
        """Apply a plan's changes and lay out its rows; raises PlanError when it contradicts the tables."""
        try:
            drops = unpack_u32(plan.drops).astype(np.int32)
            pairs = unpack_u32(plan.blocks, 2).astype(np.int32)
            chunks = unpack_u32(plan.chunks, 2).astype(np.int32)
            skips = unpack_u32(plan.skips).astype(np.int32)
        except PackingError as error:
            raise PlanError(str(error)) from error
        self._drop(drops)
        decoding = np.flatnonzero(self.occupied & (self.computed >= self.target)).astype(np.int32)
        added = np.array([self._add(add) for add in plan.adds], dtype=np.int32)
        self._append_blocks(pairs)
        if skips.size:
            self._check_slots(skips)
            if not self.occupied[skips].all():
                raise PlanError("a skipped slot is empty")
            # One that still prefills is no contradiction: its last chunk was not ready after this plan was made.
            decoding = np.setdiff1d(decoding, skips)
        batch = self._rows(decoding, chunks, drops, added)
        self._check_capacity(batch)
        return batch

    def commit(self, batch: StepBatch, counts: npt.NDArray[np.uint8], ids: Int32Array, advanced: BoolArray) -> None:
        """Record what the step returned: ``counts`` [rows], ``ids`` [sum(counts)], ``advanced`` [rows].

        A row that did not advance (not ready, or failed) stays where it was.
        """
        ends = np.cumsum(counts, dtype=np.int64)
        moved = batch.slots[advanced]
        self.computed[moved] = (batch.starts + batch.lengths)[advanced]
        for row in np.flatnonzero(counts):
            slot, count = batch.slots[row], int(counts[row])
            length = self.length[slot]
            self.tokens[slot, length : length + count] = ids[ends[row] - count : ends[row]]
            self.length[slot] = length + count
            self.computed[slot] = length + count - 1

    def sequence(self, slot: int) -> Int32Array:
        """View of a slot's token ids, prompt and output."""
        return self.tokens[slot, : self.length[slot]]

    def block_table(self, slot: int) -> Int32Array:
        """View of a slot's blocks in order."""
        return self.blocks[slot, : self.num_blocks[slot]]

    def _drop(self, slots: Int32Array) -> None:
        self._check_slots(slots)
        if not self.occupied[slots].all() or len(np.unique(slots)) != len(slots):
            raise PlanError("a dropped slot is empty or named twice")
        self.occupied[slots] = False
        for slot in slots:
            self.parameters[slot] = None

    def _add(self, add: SlotAdd) -> int:
        slot, tokens = add.slot, _ids(add.tokens)
        if slot >= self.shape.max_slots or self.occupied[slot]:
            raise PlanError(f"slot {slot} is occupied or beyond {self.shape.max_slots}")
        if not 0 < len(tokens) <= self.shape.context:
            raise PlanError(f"slot {slot} was added with {len(tokens)} tokens; the context is {self.shape.context}")
        if tokens.min() < 0 or tokens.max() >= self.shape.vocab_size:
            raise PlanError(f"slot {slot} has a token id outside the vocabulary of {self.shape.vocab_size}")
        if not 0 < add.prompt_len <= len(tokens) or add.computed >= len(tokens):
            raise PlanError(f"slot {slot}: prompt_len {add.prompt_len} or computed {add.computed} of {len(tokens)}")
        self.tokens[slot, : len(tokens)] = tokens
        self.length[slot] = self.target[slot] = len(tokens)
        self.prompt_len[slot] = add.prompt_len
        self.computed[slot] = add.computed
        self.num_blocks[slot] = 0
        self.occupied[slot] = True
        self.parameters[slot] = SlotParameters(add.seed, add.sampling, _ids(add.stop_ids))
        return slot

    def _append_blocks(self, pairs: Int32Array) -> None:
        if not pairs.size:
            return
        self._check_slots(pairs[:, 0])
        if pairs[:, 1].min() < 0 or pairs[:, 1].max() >= self.shape.num_blocks or not self.occupied[pairs[:, 0]].all():
            raise PlanError("a block outside the pool, or a block for an empty slot")
        for slot, block in pairs:
            if self.num_blocks[slot] == self.blocks.shape[1]:
                raise PlanError(f"slot {slot} was given more blocks than its context can fill")
            self.blocks[slot, self.num_blocks[slot]] = block
            self.num_blocks[slot] += 1

    def _rows(self, decoding: Int32Array, chunks: Int32Array, drops: Int32Array, added: Int32Array) -> StepBatch:
        chunk_slots, chunk_lengths = chunks.reshape(-1, 2).T if chunks.size else np.zeros((2, 0), dtype=np.int32)
        self._check_slots(chunk_slots)
        ends = self.computed[chunk_slots] + chunk_lengths
        if (
            not self.occupied[chunk_slots].all()
            or (chunk_lengths <= 0).any()
            or (ends > self.target[chunk_slots]).any()
            or len(np.unique(chunk_slots)) != len(chunk_slots)
        ):
            raise PlanError("a chunk is empty, repeated, or beyond the end of its sequence")
        slots = np.concatenate([decoding, chunk_slots]).astype(np.int32)
        lengths = np.concatenate([np.ones_like(decoding), chunk_lengths]).astype(np.int32)
        if lengths.sum() > self.shape.max_tokens_per_step:
            raise PlanError(f"{lengths.sum()} tokens in a step of at most {self.shape.max_tokens_per_step}")
        samples = np.concatenate([np.ones(len(decoding), dtype=np.bool_), ends == self.target[chunk_slots]])
        return StepBatch(slots, self.computed[slots], lengths, samples, len(decoding), drops, added)

    def _check_capacity(self, batch: StepBatch) -> None:
        """A row that samples may write KV for all ids but the last it returns."""
        extra = np.where(batch.samples, self.shape.max_ids_per_row - 1, 0)
        capacity = self.num_blocks[batch.slots].astype(np.int64) * self.shape.block_size
        short = np.flatnonzero(batch.context_lengths + extra > capacity)
        if short.size:
            raise PlanError(f"slot {batch.slots[short[0]]} has no block for the position it would write")

    def _check_slots(self, slots: Int32Array) -> None:
        if slots.size and (slots.min() < 0 or slots.max() >= self.shape.max_slots):
            raise PlanError(f"a slot beyond {self.shape.max_slots}")


def _ids(data: bytes) -> Int32Array:
    try:
        return unpack_u32(data).astype(np.int32)
    except PackingError as error:
        raise PlanError(str(error)) from error

"""Who holds which slot and which blocks of a group, and what of that the worker does not know yet.

::

    admit ──► adds ──┐                     a plan carries drops, then adds, then blocks: a slot and its blocks may
    release ► drops ─┴─► next plan         change hands within one plan, because the worker applies them in order

Knows nothing of steps or of who should run.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.block_pool import BlockPool, IntegrityError
from scheduler.requests import Int32Array, Sequence, State
from scheduler.shape import GroupShape
from scheduler.slots import SlotArrays

SlotIndex = npt.NDArray[np.intp]
Int64Array = npt.NDArray[np.int64]


class Tenancy:
    """Slots, blocks, and the changes that wait for the next plan."""

    def __init__(self, shape: GroupShape) -> None:
        self.shape = shape
        self.pool = BlockPool(shape.num_blocks)
        self.slots = SlotArrays(shape.max_slots, shape.blocks_per_slot)
        self._free_slots = list(range(shape.usable_slots))[::-1]
        self.pending_prefill = 0
        """Prefill tokens of its sequences that no plan covers yet."""
        self._prefilling: list[Sequence] = []
        self._adds: dict[int, Sequence] = {}
        self._drops: list[int] = []

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return self.shape.usable_slots - len(self._free_slots)

    @property
    def full(self) -> bool:
        """No slot is free."""
        return not self._free_slots

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence a slot and the blocks of its prefill; the caller knows that there are enough."""
        slot = self._free_slots.pop()
        self.slots.fill(slot, sequence)
        count = self.shape.blocks_to_prefill(sequence.length)
        self.slots.append_blocks(np.array([slot]), np.array([count]), self.pool.take(count))
        sequence.slot, sequence.state = slot, State.RUNNING
        self._adds[slot] = sequence
        self.prefill_again(sequence, sequence.length)

    def grow(self, rows: SlotIndex, wanted: Int64Array) -> Int32Array:
        """Give ``wanted[i]`` blocks to ``rows[i]``; returns the (slot, block) pairs, shape [blocks, 2]."""
        short = np.flatnonzero(wanted)
        return self.slots.append_blocks(rows[short], wanted[short], self.pool.take(int(wanted.sum())))

    def release(self, sequence: Sequence) -> None:
        """End a sequence's tenure, leaving its output with it.

        Its slot and blocks may be used by the very next plan: the worker executes plans in order, so whatever earlier
        plans still do to them is over by then.
        """
        slot, slots = sequence.slot, self.slots
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
            self.pending_prefill -= int(slots.target[slot] - slots.planned[slot])
        sequence.output = slots.output[slot, : slots.outputs[slot]].copy()
        self.pool.give_back(slots.blocks[slot, : slots.num_blocks[slot]].tolist())
        slots.empty(slot)
        if self._adds.pop(slot, None) is None:
            self._drops.append(slot)
        self._free_slots.append(slot)
        sequence.slot = -1

    def sequences(self) -> list[Sequence]:
        """Every sequence that holds a slot, by slot."""
        return [sequence for sequence in self.slots.sequences if sequence is not None]

    def least_important(self) -> Sequence:
        """Newest of the lowest priority, whatever it is doing."""
        return max(self.sequences(), key=lambda sequence: sequence.rank)

    def prefilling_by_rank(self) -> list[Sequence]:
        """Sequences that no plan has covered to their target, the most important first."""
        self._prefilling.sort(key=lambda sequence: sequence.rank)
        return self._prefilling

    def prefill_planned(self, tokens: int) -> None:
        """Plans cover this much more, by the arrays; sequences that are covered now leave the list."""
        if tokens:
            slots = self.slots
            self.pending_prefill -= tokens
            self._prefilling = [seq for seq in self._prefilling if slots.planned[seq.slot] < slots.target[seq.slot]]

    def prefill_again(self, sequence: Sequence, tokens: int) -> None:
        """This much of a sequence is to be planned (once more): on admission, or because its row was not ready."""
        self.pending_prefill += tokens
        if sequence not in self._prefilling:
            self._prefilling.append(sequence)

    def take_changes(self) -> tuple[list[int], list[Sequence], list[Int32Array]]:
        """(dropped slots, added sequences, their block pairs) since the last plan; the next plan must carry them."""
        drops, adds = self._drops, list(self._adds.values())
        self._drops, self._adds = [], {}
        return drops, adds, [self._pairs(sequence.slot) for sequence in adds]

    def _pairs(self, slot: int) -> Int32Array:
        blocks = self.slots.blocks[slot, : self.slots.num_blocks[slot]]
        return np.stack((np.full_like(blocks, slot), blocks), axis=1)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every slot and every block is accounted for exactly once."""
        self.pool.check_integrity()
        occupied = np.flatnonzero(self.slots.occupied).tolist()
        if sorted(occupied + self._free_slots) != list(range(self.shape.usable_slots)):
            raise IntegrityError("a slot is both free and occupied, or neither")
        held: list[int] = []
        for slot in occupied:
            sequence = self.slots.sequence(slot)
            if sequence.slot != slot or sequence.state is not State.RUNNING:
                raise IntegrityError(f"slot {slot} is an orphan: its sequence is {sequence.state} in {sequence.slot}")
            held += self.slots.blocks[slot, : self.slots.num_blocks[slot]].tolist()
        if len(set(held)) != len(held) or len(held) != self.pool.statistics().used:
            raise IntegrityError(
                f"{len(held)} blocks in slots, {len(set(held))} of them different, pool {self.pool.statistics()}"
            )
        waiting = self.slots.occupied & (self.slots.planned < self.slots.target)
        if int((self.slots.target - self.slots.planned)[waiting].sum()) != self.pending_prefill:
            raise IntegrityError(f"{self.pending_prefill} prefill tokens are counted as pending")
        if sorted(sequence.slot for sequence in self._prefilling) != np.flatnonzero(waiting).tolist():
            raise IntegrityError("the prefilling sequences are not those the arrays show")

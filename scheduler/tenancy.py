"""Who holds which slot and which blocks of a group, and what of that the worker does not know yet.

::

    admit ──► adds ──┐                     a plan carries drops, then adds, then blocks: a slot and its blocks may
    release ► drops ─┴─► next plan         change hands within one plan, because the worker applies them in order

A block is registered under its hash once its contents are confirmed: prompt blocks as the steps that fill them are
done, those with output when the sequence leaves. What was not confirmed by then is never registered.

Knows nothing of steps or of who should run.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from protocol.ids import BlockHash
from scheduler.block_pool import IntegrityError
from scheduler.prefix_index import PrefixIndex
from scheduler.requests import Int32Array, Sequence, State
from scheduler.shape import GroupShape
from scheduler.slots import SlotArrays

SlotIndex = npt.NDArray[np.intp]
Int64Array = npt.NDArray[np.int64]


class Tenancy:
    """Slots, blocks, and the changes that wait for the next plan."""

    def __init__(self, shape: GroupShape, index_bytes: int = 0) -> None:
        self.shape = shape
        self.index = PrefixIndex(shape.num_blocks, index_bytes)
        self.pool = self.index.pool
        self.slots = SlotArrays(shape.max_slots, shape.blocks_per_slot)
        self._free_slots = list(range(shape.usable_slots))[::-1]
        self._registered = [0] * shape.max_slots
        """Leading blocks of each slot that are the registered ones of their hashes."""
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

    def hit(self, sequence: Sequence) -> int:
        """Leading blocks that a sequence would find computed."""
        if not self._caches(sequence):
            return 0
        most = sequence.reusable // self.shape.block_size
        return self.index.hit(sequence.chain_to(most), most)

    def blocks_to_admit(self, sequence: Sequence) -> int:
        """Blocks that its admission would take from the free ones: cached ones that nobody holds count, too."""
        shared = self.index.blocks(self._chain(sequence, 0)[: self.hit(sequence)])
        held = sum(self.pool.is_held(block) for block in shared)
        return self.shape.blocks_to_prefill(sequence.length) - held

    def parks(self, sequence: Sequence) -> bool:
        """Whether the first block that it lacks is being computed by another, no less important, right now."""
        if not self.index.written or not self._caches(sequence):
            return False
        most, found = sequence.reusable // self.shape.block_size, self.hit(sequence)
        if found == most:
            return False
        writer = self.index.writer(sequence.chain_to(most)[found])
        return writer is not None and writer.request.priority <= sequence.request.priority

    def coming(self, sequence: Sequence) -> int:
        """Blocks behind its hit that others are computing right now: what it would find if it waited for them."""
        if not self.index.written or not self._caches(sequence):
            return 0
        most, found = sequence.reusable // self.shape.block_size, self.hit(sequence)
        chain, end = sequence.chain_to(most), found
        while end < most and self.index.writer(chain[end]) is not None:
            end += 1
        return end - found

    def admit(self, sequence: Sequence) -> int:
        """Give a sequence a slot and the blocks of its prefill; the caller knows that there are enough.

        Returns how many of its tokens are computed already.
        """
        slot, found = self._free_slots.pop(), self.hit(sequence)
        cached = found * self.shape.block_size
        self.slots.fill(slot, sequence, cached)
        count = self.shape.blocks_to_prefill(sequence.length)
        shared = self.index.blocks(self._chain(sequence, 0)[:found])
        self.pool.share(shared)
        if shared:
            self.slots.append_to(slot, np.array(shared, dtype=np.int32))
        self.slots.append_to(slot, self.pool.take(count - found))
        sequence.slot, sequence.state = slot, State.RUNNING
        self._registered[slot] = found
        self.index.writes(sequence, self._own(sequence, found))
        self._adds[slot] = sequence
        self.prefill_again(sequence, sequence.length - cached)
        return cached

    def confirm(self, slot: int) -> None:
        """Steps have computed more of a slot's prompt: the blocks filled by them may be shared from now on."""
        sequence = self.slots.sequence(slot)
        if self._caches(sequence):
            known = self._registered[slot]
            self._register(slot, sequence)
            self.index.wrote(sequence, self._chain(sequence, 0)[known : self._full_blocks(slot)])

    def grow(self, rows: SlotIndex, wanted: Int64Array) -> Int32Array:
        """Give ``wanted[i]`` blocks to ``rows[i]``; returns the (slot, block) pairs, shape [blocks, 2]."""
        (short,) = wanted.nonzero()
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
        if self._caches(sequence):
            self._register(slot, sequence)
            self.index.wrote(sequence, self._own(sequence, 0))
        self.pool.give_back(slots.blocks[slot, : slots.num_blocks[slot]].tolist())
        slots.empty(slot)
        if self._adds.pop(slot, None) is None:
            self._drops.append(slot)
        self._free_slots.append(slot)
        sequence.slot = -1

    def worker_forgot(self) -> None:
        """The worker dropped every slot, and here each was released: there is nothing to tell it."""
        self._drops = []

    def _caches(self, sequence: Sequence) -> bool:
        """Whether its blocks have names that mean anything here."""
        return self.index.most_entries > 0 and sequence.request.hash_block_size == self.shape.block_size

    def _chain(self, sequence: Sequence, blocks: int) -> list[BlockHash]:
        return sequence.chain_to(blocks) if self._caches(sequence) else []

    def _own(self, sequence: Sequence, found: int) -> list[BlockHash]:
        """Names of what it computes in its prefill and others may wait for."""
        full = sequence.length // self.shape.block_size
        return self._chain(sequence, full)[found:full]

    def _full_blocks(self, slot: int) -> int:
        return self.slots.confirmed(slot) // self.shape.block_size

    def _register(self, slot: int, sequence: Sequence) -> None:
        """Blocks that are full and certain, up to the first whose name another block has: see PrefixIndex."""
        full, known = self._full_blocks(slot), self._registered[slot]
        if known < full:
            names = sequence.chain_to(full)[known:full]
            self._registered[slot] += self.index.register(names, self.slots.blocks[slot, known:full].tolist())

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
        pairs = np.empty((len(blocks), 2), dtype=np.int32)
        pairs[:, 0], pairs[:, 1] = slot, blocks
        return pairs

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every slot is accounted for exactly once, and every block by all who hold it."""
        self.index.check_integrity()
        occupied = np.flatnonzero(self.slots.occupied).tolist()
        if sorted(occupied + self._free_slots) != list(range(self.shape.usable_slots)):
            raise IntegrityError("a slot is both free and occupied, or neither")
        held: Counter[int] = Counter()
        for slot in occupied:
            sequence = self.slots.sequence(slot)
            if sequence.slot != slot or sequence.state is not State.RUNNING:
                raise IntegrityError(f"slot {slot} is an orphan: its sequence is {sequence.state} in {sequence.slot}")
            blocks = self.slots.blocks[slot, : self.slots.num_blocks[slot]].tolist()
            held.update(blocks)
            if len(set(blocks)) != len(blocks):
                raise IntegrityError(f"slot {slot} holds a block twice")
            if any(self.index.name(block) is None for block in blocks[: self._registered[slot]]):
                raise IntegrityError(f"slot {slot} holds blocks that are shared and have no name")
            if any(self.pool.owners(block) > 1 for block in blocks[self._registered[slot] :]):
                raise IntegrityError(f"slot {slot} shares a block that it still writes")
        if len(held) != self.pool.statistics().used or any(self.pool.owners(b) != n for b, n in held.items()):
            raise IntegrityError(f"{len(held)} different blocks in slots, pool {self.pool.statistics()}")
        if not self.index.writers() <= {id(self.slots.sequence(slot)) for slot in occupied}:
            raise IntegrityError("someone waits for a block that nobody computes")
        waiting = self.slots.occupied & (self.slots.planned < self.slots.target)
        if int((self.slots.target - self.slots.planned)[waiting].sum()) != self.pending_prefill:
            raise IntegrityError(f"{self.pending_prefill} prefill tokens are counted as pending")
        if sorted(sequence.slot for sequence in self._prefilling) != np.flatnonzero(waiting).tolist():
            raise IntegrityError("the prefilling sequences are not those the arrays show")

"""What the next step of a group runs, and who gives way when blocks are short.

Knows tenancy and ledger; nothing of what comes back from a step.
"""

from __future__ import annotations

import numpy as np

from protocol.ids import Epoch, Incarnation
from protocol.packing import pack_u32
from protocol.worker import Plan, SlotAdd
from scheduler.ledger import StepLedger
from scheduler.pacing import PrefillPace
from scheduler.requests import Int32Array, Sequence
from scheduler.slots import BoolArray, Int64Array
from scheduler.tenancy import SlotIndex, Tenancy


class Planner:
    """The step policy of one group."""

    def __init__(
        self,
        tenancy: Tenancy,
        ledger: StepLedger,
        epoch: Epoch,
        incarnation: Incarnation,
        pace: PrefillPace,
        long_prefill_threshold: int,
    ) -> None:
        self.shape = tenancy.shape
        self.preempted: list[Sequence] = []
        """Preempted by a plan and named by none that is out: their output is complete, they may be queued again."""
        self.preemptions = 0
        self._tenancy = tenancy
        self._ledger = ledger
        self._epoch = epoch
        self._incarnation = incarnation
        self._pace = pace
        self._long_prefill_threshold = long_prefill_threshold
        self._wanted_next: int | None = None

    def plan(self) -> Plan | None:
        """The next step, or None when two are out or there is nothing to run.

        One budget of tokens: running decodes first, then prefill chunks by rank, the newly admitted among them, and
        beside decodes no more than does not hold them up.
        """
        if self._ledger.full:
            return None
        self.rows_changed()
        decodes, skips, growth = self._plan_decodes()
        room = self.shape.max_tokens_per_step - len(decodes)
        chunks = self._plan_chunks(min(room, self._pace.bound(len(decodes))), bool(len(decodes)))
        if not (len(decodes) or chunks):
            return None
        step = self._ledger.open(self._tenancy.slots, decodes, chunks)
        drops, adds, pairs = self._tenancy.take_changes()
        pairs += growth
        return Plan(
            epoch=self._epoch,
            incarnation=self._incarnation,
            step=step,
            drops=pack_u32(drops),
            adds=tuple(_slot_add(sequence, int(self._tenancy.slots.computed[sequence.slot])) for sequence in adds),
            blocks=pack_u32(np.concatenate(pairs)) if pairs else b"",
            chunks=pack_u32(np.array(chunks)) if chunks else b"",
            skips=pack_u32(skips),
        )

    def decoding(self) -> SlotIndex:
        """Decoding slots that do not end for certain with what is already under way: a row returns at least one id."""
        slots = self._tenancy.slots
        return self._open_ended(slots.occupied & (slots.planned >= slots.target)).nonzero()[0]

    def _open_ended(self, decoding: BoolArray) -> BoolArray:
        slots = self._tenancy.slots
        rows: BoolArray = decoding & (slots.outputs + slots.under_way < slots.limit)
        return rows

    def _plan_decodes(self) -> tuple[SlotIndex, SlotIndex, list[Int32Array]]:
        """(slots that decode, decoding slots that sit the step out, block pairs)."""
        slots = self._tenancy.slots
        decoding = slots.occupied & (slots.planned >= slots.target)
        (rows,) = self._open_ended(decoding).nonzero()
        wanted = self.blocks_wanted(rows)
        total = int(wanted.sum())
        growth: list[Int32Array] = []
        if total > self._tenancy.pool.free:
            rows, growth = self._grow_by_rank(rows, wanted)
        elif total:
            growth = [self._tenancy.grow(rows, wanted)]
        decoding &= slots.occupied  # those just preempted are no more
        decoding[rows] = False
        return rows, decoding.nonzero()[0], growth

    def blocks_wanted(self, rows: SlotIndex) -> Int64Array:
        """Blocks each row lacks for one more step when every row under way returns the most ids it may."""
        slots, most = self._tenancy.slots, self.shape.max_ids_per_row
        reach = slots.prompt_len[rows] + slots.outputs[rows] + slots.under_way[rows] * most + (most - 1)
        lacking: Int64Array = np.maximum(-(-reach // self.shape.block_size) - slots.num_blocks[rows], 0)
        return lacking

    def blocks_wanted_next(self) -> int:
        """Blocks that the running decodes will ask the next plan for."""
        if self._wanted_next is None:
            self._wanted_next = int(self.blocks_wanted(self.decoding()).sum())
        return self._wanted_next

    def rows_changed(self) -> None:
        """Decodes moved on, came or went: what they want next is to be computed anew."""
        self._wanted_next = None

    def _grow_by_rank(self, rows: SlotIndex, wanted: Int64Array) -> tuple[SlotIndex, list[Int32Array]]:
        """Blocks are short: serve the most important first and preempt the least important until it fits.

        A row with ids under way sits the step out instead: it asked for their worst case, which may not come.
        """
        tenancy, growth, served = self._tenancy, [], wanted == 0
        for row in sorted(np.flatnonzero(wanted).tolist(), key=lambda row: tenancy.slots.sequence(int(rows[row])).rank):
            slot = int(rows[row])
            while (
                tenancy.slots.occupied[slot] and wanted[row] > tenancy.pool.free and not tenancy.slots.under_way[slot]
            ):
                self._preempt(tenancy.least_important())
            if tenancy.slots.occupied[slot] and wanted[row] <= tenancy.pool.free:
                growth.append(tenancy.grow(rows[row : row + 1], wanted[row : row + 1]))
                served[row] = True
        return rows[served & tenancy.slots.occupied[rows]], growth

    def _preempt(self, sequence: Sequence) -> None:
        """Recompute later: free its slot and blocks now, queue it again once every plan that names it is done."""
        slot, slots = sequence.slot, self._tenancy.slots
        generation, last_step = int(slots.generation[slot]), int(slots.last_step[slot])
        self._tenancy.release(sequence)
        self.preemptions += 1
        if not self._ledger.await_last_row(sequence, slot, generation, last_step):
            self.preempted.append(sequence)

    def _plan_chunks(self, budget: int, beside_decodes: bool) -> list[tuple[int, int]]:
        """(slot, tokens) of prefill by rank, as far as the budget goes."""
        slots, chunks = self._tenancy.slots, []
        prefilling = self._tenancy.prefilling_by_rank()
        longest = budget
        if self._long_prefill_threshold and (beside_decodes or len(prefilling) > 1):
            longest = self._long_prefill_threshold
        for sequence in prefilling:
            slot = sequence.slot
            length = min(int(slots.target[slot] - slots.planned[slot]), budget, longest)
            if not length:
                break
            slots.planned[slot] += length
            budget -= length
            chunks.append((slot, length))
        self._tenancy.prefill_planned(sum(length for _, length in chunks))
        return chunks


def _slot_add(sequence: Sequence, computed: int) -> SlotAdd:
    request = sequence.request
    return SlotAdd(
        slot=sequence.slot,
        tokens=pack_u32(sequence.tokens()),
        prompt_len=len(request.prompt),
        seed=sequence.seed,
        sampling=sequence.sampling,
        stop_ids=request.stop_ids,
        computed=computed,
    )

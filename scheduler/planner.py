"""What the next step of a group runs, and who gives way when blocks are short.

Knows tenancy and ledger; nothing of what comes back from a step.
"""

from __future__ import annotations

import numpy as np

from protocol.ids import Epoch, Incarnation
from protocol.packing import pack_u32
from protocol.worker import Plan, SlotAdd
from scheduler.group_policy import GroupPolicy
from scheduler.ledger import StepLedger
from scheduler.pacing import PrefillPace
from scheduler.requests import Int32Array, Sequence
from scheduler.shape import PLANS_IN_FLIGHT
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
        policy: GroupPolicy,
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
        self._long_prefill_threshold = policy.long_prefill_threshold
        self._growth = policy.growth_blocks * self.shape.block_size
        self._wanted_soon: int | None = None

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

    def _decoding(self) -> tuple[BoolArray, BoolArray]:
        """(decoding slots; of these, those that do not end for certain with what is under way), over all slots.

        A row under way returns at least one id.
        """
        slots = self._tenancy.slots
        decoding = slots.occupied & (slots.planned >= slots.target)
        return decoding, decoding & (slots.outputs + slots.under_way < slots.limit)

    def _plan_decodes(self) -> tuple[SlotIndex, SlotIndex, list[Int32Array]]:
        """(slots that decode, decoding slots that sit the step out, block pairs)."""
        decoding, open_ended = self._decoding()
        (rows,) = open_ended.nonzero()
        wanted = self._blocks_wanted(open_ended)
        growth: list[Int32Array] = []
        if wanted is not None:
            if wanted.sum() > self._tenancy.pool.free:
                rows, growth = self._grow_by_rank(rows, wanted[rows])
                decoding &= self._tenancy.slots.occupied
            else:
                growth = [self._tenancy.grow(rows, wanted[rows])]
        decoding[rows] = False
        return rows, decoding.nonzero()[0], growth

    def _blocks_wanted(self, rows: BoolArray) -> Int64Array | None:
        """Blocks that slots lack for one more step when every row under way returns the most ids it may.

        Over all slots, 0 where not in ``rows``; None when none lacks any, as most steps are.
        """
        slots, most = self._tenancy.slots, self.shape.max_ids_per_row
        reach = slots.prompt_len + slots.outputs + slots.under_way * most + (most - 1)
        lacking: Int64Array = reach - slots.num_blocks * self.shape.block_size
        short = rows & (lacking > 0)
        return -(-lacking // self.shape.block_size) * short if np.count_nonzero(short) else None

    @property
    def most_wanted_soon(self) -> int:
        """The most that ``blocks_wanted_soon`` can count for one sequence, whose prefill has its blocks."""
        return self.shape.blocks_for(self._growth + (PLANS_IN_FLIGHT + 1) * self.shape.max_ids_per_row) + 1

    def blocks_wanted_soon(self) -> int:
        """Blocks to keep for those who run: for the next plan, and for as much more as the policy wants them to grow.

        Whoever is admitted into less is soon preempted, or preempts.
        """
        if self._wanted_soon is None:
            slots, most = self._tenancy.slots, self.shape.max_ids_per_row
            growth = np.minimum(np.maximum(slots.limit - slots.outputs, 0), self._growth)
            reach = slots.prompt_len + slots.outputs + slots.under_way * most + (most - 1) + growth
            lacking = -(-reach // self.shape.block_size) - slots.num_blocks
            self._wanted_soon = int(lacking[slots.occupied & (lacking > 0)].sum())
        return self._wanted_soon

    def rows_changed(self) -> None:
        """Sequences moved on, came or went: what they want is to be computed anew."""
        self._wanted_soon = None

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

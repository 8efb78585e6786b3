"""The plans that are out: which sequence each row was, and when a sequence's last row has come back.

A StepDone is matched to its plan by step number and each row to a sequence by (slot, generation), never by slot alone:
the slot may have changed hands since.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.block_pool import IntegrityError
from scheduler.logprobs import JudgedChunk, Wanted
from scheduler.requests import Sequence, State
from scheduler.shape import PLANS_IN_FLIGHT
from scheduler.slots import SlotArrays
from scheduler.tenancy import SlotIndex


@dataclass
class PlanRecord:
    """The rows of an outstanding plan, as the worker will report them. All arrays [rows]."""

    step: int
    slots: SlotIndex
    generations: npt.NDArray[np.int64]
    samples: npt.NDArray[np.bool_]
    """Rows that return ids: every decode, and the chunk that reaches its target."""
    lengths: npt.NDArray[np.int64]
    """Query tokens of each row."""
    num_decodes: int
    wanted: Wanted | None = None
    """Logprob records that the rows asked for, if any did."""

    @property
    def prefill_tokens(self) -> int:
        """Query tokens of all chunks."""
        return int(self.lengths[self.num_decodes :].sum()) if len(self.slots) > self.num_decodes else 0

    def row_of(self, slot: int, generation: int) -> int | None:
        """The row of one tenure of a slot."""
        rows = np.flatnonzero((self.slots == slot) & (self.generations == generation))
        return int(rows[0]) if len(rows) else None

    def remove(self, row: int) -> None:
        """The worker will have no such row."""
        self.slots, self.generations = np.delete(self.slots, row), np.delete(self.generations, row)
        self.samples, self.lengths = np.delete(self.samples, row), np.delete(self.lengths, row)
        self.num_decodes -= row < self.num_decodes
        if self.wanted is not None:
            self.wanted.record_bytes = np.delete(self.wanted.record_bytes, row)


class StepLedger:
    """Outstanding plans in order, and the preempted sequences that wait for theirs."""

    def __init__(self, last_planned: int = 0) -> None:
        self.last_planned = self.last_done = last_planned
        self.records: deque[PlanRecord] = deque()
        self.settling: dict[tuple[int, int], Sequence] = {}

    @property
    def full(self) -> bool:
        """As many plans are out as may be."""
        return len(self.records) == PLANS_IN_FLIGHT

    def open(self, slots: SlotArrays, decodes: SlotIndex, chunks: list[tuple[int, int]]) -> int:
        """Record the rows of the next plan and mark them in the arrays; returns the step's number."""
        rows, count = decodes, len(decodes) + len(chunks)
        samples, lengths = np.ones(count, dtype=np.bool_), np.ones(count, dtype=np.int64)
        if chunks:
            chunk_slots = np.array([slot for slot, _ in chunks], dtype=np.intp)
            rows = np.concatenate((decodes, chunk_slots))
            samples[len(decodes) :] = slots.planned[chunk_slots] >= slots.target[chunk_slots]
            lengths[len(decodes) :] = [length for _, length in chunks]
        self.last_planned += 1
        slots.under_way[rows] += samples
        slots.last_step[rows] = self.last_planned
        record = PlanRecord(self.last_planned, rows, slots.generation[rows], samples, lengths, len(decodes))
        if slots.recorded:
            record.wanted = Wanted(slots.record_bytes[rows], _judged(slots, chunks))
        self.records.append(record)
        return self.last_planned

    def expects(self, step: int) -> bool:
        """Whether a StepDone of this step is the next one due; any other is stale."""
        return bool(self.records) and self.records[0].step == step

    def close(self) -> PlanRecord:
        """The oldest plan is done."""
        record = self.records.popleft()
        self.last_done = record.step
        return record

    def await_last_row(self, sequence: Sequence, slot: int, generation: int, last_step: int) -> bool:
        """Hold a preempted sequence until every plan that names it is done; False when none is out."""
        if last_step <= self.last_done:
            return False
        sequence.state, sequence.settles_at = State.SETTLING, last_step
        self.settling[slot, generation] = sequence
        return True

    def take_settled(self) -> list[Sequence]:
        """Preempted sequences whose last row has come back."""
        settled = [key for key, sequence in self.settling.items() if sequence.settles_at <= self.last_done]
        return [self.settling.pop(key) for key in settled]

    def forget(self, sequence: Sequence) -> None:
        """A settling sequence ended: what its last rows return goes nowhere."""
        self.settling = {key: other for key, other in self.settling.items() if other is not sequence}

    def row_stood_still(self, slots: SlotArrays, slot: int, generation: int, length: int) -> None:
        """A prefill row of this length did not advance: the later plans that are out mean something else to the worker.

        A decode row there does not exist: the slot is still prefilling. A chunk begins where this one did, and if it
        was to be the last it is not: nothing is sampled.
        """
        live = slots.generation[slot] == generation
        for record in self.records:
            row = record.row_of(slot, generation)
            if row is None:
                continue
            slots.under_way[slot] -= int(record.samples[row]) * live
            if row < record.num_decodes:
                record.remove(row)
                continue
            record.samples[row] = False
            for chunk in record.wanted.judged if record.wanted else ():
                chunk.start -= length * ((chunk.slot, chunk.generation) == (slot, generation))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless steps are consecutive and every settling sequence waits for one of them."""
        steps = [record.step for record in self.records]
        if steps != list(range(self.last_done + 1, self.last_planned + 1)) or len(steps) > PLANS_IN_FLIGHT:
            raise IntegrityError(f"plans {steps} are out; done {self.last_done}, planned {self.last_planned}")
        for sequence in self.settling.values():
            if sequence.state is not State.SETTLING or not self.last_done < sequence.settles_at <= self.last_planned:
                raise IntegrityError(f"a sequence settles at step {sequence.settles_at} in state {sequence.state}")


def _judged(slots: SlotArrays, chunks: list[tuple[int, int]]) -> list[JudgedChunk]:
    """The chunks of a plan that get prompt records; the arrays count their tokens as planned already."""
    return [
        JudgedChunk(
            row=nth - len(chunks),
            slot=slot,
            generation=int(slots.generation[slot]),
            start=int(slots.planned[slot]) - length,
            length=length,
            prompt_len=int(slots.prompt_len[slot]),
            record_bytes=int(slots.prompt_record_bytes[slot]),
        )
        for nth, (slot, length) in enumerate(chunks)
        if slots.prompt_record_bytes[slot]
    ]

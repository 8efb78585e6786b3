"""The state of a group's running sequences as arrays over slots: what a decode step reads and writes.

::

    tokens       p p p p p p o o o              length = prompt_len + outputs, as confirmed by StepDone
    computed     ─────►                         prefill tokens that were cached or that a StepDone confirmed
    planned      ─────────►                     prefill tokens that plans have covered so far
    target                 ^                    length when it was admitted: decoding once planned = target
    under_way                  ? ?              outstanding plans in which the row samples: each adds 1 … max_ids
    blocks       [  ][  ][  ][  ]               reach to the furthest position those plans and the next may write

    last_step                                   the last step whose plan has a row for the slot
    record_bytes                                size of the logprob record of an output id; 0 when none is wanted

Knows nothing of plans or pools.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.logprobs import record_size
from scheduler.requests import Int32Array, Sequence

Slots = npt.NDArray[np.intp]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

STOP_COLUMNS = 8
"""Stop ids compared as a matrix; a sequence with more is compared one by one."""

FIELDS = 13
"""Rows of the table of integers."""

NO_ID = -1
FIRST_OUTPUT_COLUMNS = 256


class SlotArrays:
    """Struct of arrays, all indexed by slot. Only rows with ``occupied`` mean anything, ``generation`` excepted."""

    def __init__(self, max_slots: int, blocks_per_slot: int) -> None:
        def zeros(dtype: Any) -> npt.NDArray[Any]:
            return np.zeros(max_slots, dtype=dtype)

        # What a step reads lies together: one table, of which the names below are rows.
        self._table: npt.NDArray[np.int64] = np.zeros((FIELDS, max_slots), dtype=np.int64)
        (
            self.session,
            self.prompt_len,
            self.target,
            self.computed,
            self.planned,
            self.outputs,
            self.limit,
            self.min_tokens,
            self.under_way,
            self.last_step,
            self.num_blocks,
            self.record_bytes,
            self.prompt_record_bytes,
        ) = self._table
        self.occupied: npt.NDArray[np.bool_] = zeros(np.bool_)
        self.generation: npt.NDArray[np.int64] = zeros(np.int64)
        """Rises at every release: (slot, generation) names one tenure."""
        self.rid: npt.NDArray[np.uint64] = zeros(np.uint64)
        self.blocks: Int32Array = np.zeros((max_slots, blocks_per_slot), dtype=np.int32)
        self.stops: npt.NDArray[np.int64] = np.full((max_slots, STOP_COLUMNS), NO_ID, dtype=np.int64)
        self.most_stops = 1
        """Columns of ``stops`` that were ever used."""
        self.many_stops: npt.NDArray[np.bool_] = zeros(np.bool_)
        self.with_many_stops = 0
        """Occupied slots with more stop ids than columns."""
        self.output: Int32Array = np.zeros((max_slots, FIRST_OUTPUT_COLUMNS), dtype=np.int32)
        self.recorded = 0
        """Occupied slots that want records of either kind: while there are none, nobody looks further."""
        self.sequences: list[Sequence | None] = [None] * max_slots

    def fill(self, slot: int, sequence: Sequence, cached: int) -> None:
        """A sequence enters a slot, this many of its tokens computed; its blocks follow by ``append_blocks``."""
        request, outputs, sampling = sequence.request, len(sequence.output), sequence.sampling
        prompt_len = len(request.prompt)
        self._table[:, slot] = (
            request.session,
            prompt_len,
            prompt_len + outputs,  # target
            cached,  # computed
            cached,  # planned
            outputs,
            request.limit,
            sampling.min_tokens,
            0,  # under_way
            0,  # last_step
            0,  # num_blocks
            _record_bytes(sampling.logprobs),
            _record_bytes(sampling.prompt_logprobs),
        )
        self.occupied[slot] = True
        self.rid[slot] = sequence.rid
        self.stops[slot] = NO_ID
        stops = len(request.stops)
        self.many_stops[slot] = many = stops > STOP_COLUMNS
        self.with_many_stops += many
        if not many:
            self.stops[slot, :stops] = list(request.stops)
            self.most_stops = max(self.most_stops, stops)
        self._make_room_for_output(outputs)
        if outputs:
            self.output[slot, :outputs] = sequence.output
        self.recorded += self._is_recorded(slot)
        self.sequences[slot] = sequence

    def empty(self, slot: int) -> None:
        """The slot's tenure ends."""
        self.occupied[slot] = False
        self.generation[slot] += 1
        self.sequences[slot] = None
        self.recorded -= self._is_recorded(slot)
        self.with_many_stops -= int(self.many_stops[slot])

    def _is_recorded(self, slot: int) -> bool:
        return bool(self.record_bytes[slot] or self.prompt_record_bytes[slot])

    def sequence(self, slot: int) -> Sequence:
        """The sequence in an occupied slot."""
        sequence = self.sequences[slot]
        assert sequence is not None
        return sequence

    def tenant(self, slot: int, generation: int) -> Sequence | None:
        """Whoever has this tenure of a slot, while it lasts."""
        return self.sequences[slot] if self.generation[slot] == generation else None

    def confirmed(self, slot: int) -> int:
        """Leading tokens whose KV is certain: an outstanding plan writes behind them only.

        The last output's KV is written by the step that it is the input of.
        """
        computed = int(self.computed[slot])
        if computed < self.target[slot]:
            return computed
        return max(computed, int(self.prompt_len[slot] + self.outputs[slot]) - 1)

    def stops_of(self, slots: Slots) -> Int64Array:
        """Stop ids of slots, padded with what no id equals; [slots, k]. Those with many have none here."""
        stops: Int64Array = self.stops[slots, : self.most_stops]
        return stops

    def append_to(self, slot: int, blocks: Int32Array) -> None:
        """Give these blocks to one slot."""
        held = int(self.num_blocks[slot])
        self.blocks[slot, held : held + len(blocks)] = blocks
        self.num_blocks[slot] = held + len(blocks)

    def append_blocks(self, slots: Slots, counts: Int64Array, blocks: Int32Array) -> Int32Array:
        """Give ``counts[i]`` of the blocks to ``slots[i]``; returns the (slot, block) pairs, shape [blocks, 2]."""
        if len(blocks) == len(slots):  # one each, as decodes want them
            owners = slots
            self.blocks[slots, self.num_blocks[slots]] = blocks
        else:
            owners = np.repeat(slots, counts)
            nth = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
            self.blocks[owners, self.num_blocks[owners] + nth] = blocks
        self.num_blocks[slots] += counts
        pairs = np.empty((len(blocks), 2), dtype=np.int32)
        pairs[:, 0], pairs[:, 1] = owners, blocks
        return pairs

    def append_output(self, slots: Slots, first: Int64Array, counts: Int64Array, ids: Int64Array) -> None:
        """Append the ``counts[i]`` leftmost of ``ids[i]`` at index ``first[i]``; ids is [slots, width]."""
        ends = first + counts
        self._make_room_for_output(int(ends.max(initial=0)))
        if ids.shape[1] == 1:
            self.output[slots, first] = ids[:, 0]
        else:
            row, column = np.nonzero(np.arange(ids.shape[1]) < counts[:, None])
            self.output[slots[row], first[row] + column] = ids[row, column]
        self.outputs[slots] = ends

    def _make_room_for_output(self, outputs: int) -> None:
        """Widen the output matrix so that every slot may hold this many ids; doubles, so it is rare."""
        columns = self.output.shape[1]
        if outputs > columns:
            wider = np.zeros((self.output.shape[0], max(outputs, 2 * columns)), dtype=np.int32)
            wider[:, :columns] = self.output
            self.output = wider


def _record_bytes(alternatives: int) -> int:
    return 0 if alternatives < 0 else record_size(alternatives)

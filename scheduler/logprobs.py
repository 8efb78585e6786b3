"""Which logprob records a step owes, and whose they are. What a record says passes through unread.

::

    StepDone.logprobs          | row 0: 2 ids | row 3: 1 id |       rows that asked, one record per returned id
    StepDone.prompt_logprobs   | chunk of slot 5 | chunk of slot 2 |        chunks that asked and succeeded

Pure: knows the rows of plans, nothing of sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.logprobs import prompt_records_of_chunk
from protocol.worker import StepDone
from scheduler.results import ADVANCES, BadStepDone, Rows

Int64Array = npt.NDArray[np.int64]


@dataclass
class JudgedChunk:
    """A prefill chunk of an outstanding plan whose prompt tokens get records."""

    row: int
    """Negative: counted from the plan's last row, because only decode rows, which come first, are ever taken out."""
    slot: int
    generation: int
    start: int
    length: int
    prompt_len: int
    record_bytes: int

    @property
    def records(self) -> int:
        """How many; the first judges the token at ``start + 1``."""
        return prompt_records_of_chunk(self.start, self.length, self.prompt_len)


@dataclass
class Wanted:
    """The records that the rows of a plan asked for."""

    record_bytes: Int64Array
    """[rows]: size of one record per returned id; 0 where none was asked for."""
    judged: list[JudgedChunk]
    """In row order."""


class StepRecords:
    """The records of one StepDone, found by row and by chunk."""

    def __init__(self, done: StepDone, wanted: Wanted | None, rows: Rows) -> None:
        """Raises BadStepDone when they are not as many as ids were returned and prompt tokens judged."""
        self._wanted, self._done = wanted, done
        self._chunks: list[JudgedChunk] = []
        due = judged = 0
        if wanted is not None:
            owed = rows.counts * wanted.record_bytes
            self._starts = np.cumsum(owed) - owed
            self._chunks = [chunk for chunk in wanted.judged if ADVANCES[rows.status[chunk.row]]]
            due, judged = int(owed.sum()), sum(chunk.records * chunk.record_bytes for chunk in self._chunks)
        if len(done.logprobs) != due or len(done.prompt_logprobs) != judged:
            raise BadStepDone(
                f"{len(done.logprobs)} bytes of logprobs and {len(done.prompt_logprobs)} of prompt logprobs; "
                f"{due} and {judged} were due"
            )

    def of_row(self, row: int, count: int) -> bytes:
        """The records of a row's first ``count`` ids; nothing when it asked for none."""
        assert self._wanted is not None
        start = int(self._starts[row])
        return self._done.logprobs[start : start + count * int(self._wanted.record_bytes[row])]

    def of_rows(self, rows: npt.NDArray[np.intp], counts: Int64Array) -> list[bytes] | None:
        """The same for several rows; None when no row of the step asked."""
        if not self._done.logprobs:
            return None
        return [self.of_row(row, count) for row, count in zip(rows.tolist(), counts.tolist(), strict=True)]

    def prompts(self) -> Iterator[tuple[JudgedChunk, bytes]]:
        """Each chunk that gave prompt records, with them."""
        at = 0
        for chunk in self._chunks:
            end = at + chunk.records * chunk.record_bytes
            yield chunk, self._done.prompt_logprobs[at:end]
            at = end

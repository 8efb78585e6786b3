"""Which prompt tokens the chunks of a step judge, and their logprob records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from protocol.logprobs import prompt_records_of_chunk
from workers.slots import BoolArray, Int32Array, SlotTable, StepBatch

Int64Array = npt.NDArray[np.int64]
Logits = TypeVar("Logits", bound=Sized)
Judge = Callable[[Logits, Int32Array, Int64Array], tuple[list[bytes], BoolArray]]
"""``Sampler.token_records``."""


@dataclass
class JudgedRows:
    """The rows of a step whose sequences want prompt logprobs, and what they judge, end to end."""

    rows: list[int]
    counts: list[int]
    """Prompt tokens that each row judges; may be 0."""
    tokens_of_step: Int64Array
    """[judged]: index, among the step's tokens, of the one whose logits judge."""
    judged: Int32Array
    """[judged]: the token that is judged, which is the next in its sequence."""
    alternatives: Int64Array
    """[judged]"""
    broken: list[int] = field(default_factory=list)
    """Rows that judged with numbers that are none; known once ``records`` was called."""

    def records(self, pieces: Iterable[Logits], judge: Judge[Logits]) -> list[tuple[int, bytes]]:
        """(row, its records) from the logits [≤ judged, vocab] of ``tokens_of_step``, which come in pieces."""
        records: list[bytes] = []
        sound: list[bool] = []
        for logits in pieces:
            part = slice(len(records), len(records) + len(logits))
            found, right = judge(logits, self.judged[part], self.alternatives[part])
            records += found
            sound += right.tolist()
        by_row, at = [], 0
        for row, count in zip(self.rows, self.counts, strict=True):
            by_row.append((row, b"".join(records[at : at + count])))
            if not all(sound[at : at + count]):
                self.broken.append(row)
            at += count
        return by_row


def judged_rows(batch: StepBatch, table: SlotTable) -> JudgedRows:
    """Look at the chunks of a step."""
    ends = np.cumsum(batch.lengths, dtype=np.int64)
    rows, counts, tokens_of_step, judged, alternatives = [], [], [], [], []
    for row in range(batch.num_decodes, len(batch.slots)):
        slot, start, length = int(batch.slots[row]), int(batch.starts[row]), int(batch.lengths[row])
        parameters = table.parameters[slot]
        assert parameters is not None, "a prefilling slot has parameters"
        if parameters.sampling.prompt_logprobs < 0:
            continue
        count = prompt_records_of_chunk(start, length, int(table.prompt_len[slot]))
        rows.append(row)
        counts.append(count)
        tokens_of_step.append(ends[row] - length + np.arange(count))
        judged.append(table.tokens[slot, start + 1 : start + 1 + count])
        alternatives.append(np.full(count, parameters.sampling.prompt_logprobs, dtype=np.int64))
    return JudgedRows(
        rows,
        counts,
        np.concatenate([np.zeros(0, dtype=np.int64), *tokens_of_step]),
        np.concatenate([np.zeros(0, dtype=np.int32), *judged]),
        np.concatenate([np.zeros(0, dtype=np.int64), *alternatives]),
    )

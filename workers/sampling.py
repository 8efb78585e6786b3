"""What a sampler is, and what it gives. Knows no tensor library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from workers.slots import BoolArray, Int32Array, SlotTable

LogitsIn = TypeVar("LogitsIn", contravariant=True)
"""fp32 [rows, vocab] in whatever a backend computes with."""

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampled:
    """Result for the sampling rows, in row order."""

    ids: Int32Array
    """[rows]; meaningless where status is not OK."""
    status: npt.NDArray[np.uint8]
    """[rows] of RowStatus: OK, NAN or EMPTY_SUPPORT"""
    logprobs: list[bytes]
    """[rows]: the record of the row's id; empty where none was asked for, meaningless where status is not OK."""


class Sampler(Protocol[LogitsIn]):
    """Draws one id per row. The order of its stages is that of ``workers/sampler.py``."""

    def add(self, slots: Int32Array, table: SlotTable) -> None:
        """Take over the parameters of slots that were just added."""

    def sample(self, logits: LogitsIn, slots: Int32Array, positions: Int32Array, table: SlotTable) -> Sampled:
        """Draw for ``slots`` [rows] from ``logits`` [rows, vocab], which may be used up.

        ``positions`` [rows] are the indices the drawn ids will have in their sequences; the table holds the tokens
        before them.
        """

    def token_records(
        self, logits: LogitsIn, tokens: Int32Array, alternatives: Int64Array
    ) -> tuple[list[bytes], BoolArray]:
        """The record of each row's token [rows], and whether the row's numbers are all right."""

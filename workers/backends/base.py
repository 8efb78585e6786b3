"""What a backend is: it owns the weights and the KV pool, and turns the tokens of a step into logits.

``Logits`` are fp32 arrays of whatever it computes with: torch's on the reference, numpy's on the native one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from workers.slots import BoolArray, Int32Array

Logits = TypeVar("Logits", bound=Sized)
LogitsOut = TypeVar("LogitsOut", bound=Sized, covariant=True)
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepInputs:
    """The rows of a step, their tokens end to end.

    ::

        rows      | decode | decode |  prefill chunk  |
        tokens    |   t    |   t    | t   t   t   t   |      row r has lengths[r] tokens, from position starts[r]
    """

    tokens: Int64Array
    """[sum(lengths)]"""
    starts: Int32Array
    """[rows]"""
    lengths: Int32Array
    """[rows]"""
    block_tables: Int32Array
    """[rows, width]; what lies beyond a row's blocks is ignored."""
    samples: BoolArray
    """[rows]: whose last token needs logits."""
    judged: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[judged]: tokens of the step, by index, whose logits are wanted too, for the logprobs of what follows them."""


class StepOutputs(Protocol[LogitsOut]):
    """What the forward pass gave."""

    @property
    def logits(self) -> LogitsOut:
        """fp32 [sampling rows, vocab], in row order, on the backend's device."""

    @property
    def broken(self) -> BoolArray:
        """[rows]: the row's last hidden state is not finite."""

    @property
    def judged(self) -> Iterator[LogitsOut]:
        """fp32 [at most a few dozen, vocab] each: logits of ``StepInputs.judged`` in pieces, made as they are taken."""


class Backend(Protocol[LogitsOut]):
    """A decoder with its KV pool, on one device."""

    @property
    def name(self) -> str:
        """For the log and the metrics: backend, device and precision."""

    @property
    def numeric_class(self) -> Mapping[str, str]:
        """What decides the bits it computes, the weights aside."""

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make the KV pool; once, before the first step. Memory is taken as blocks are first written."""

    def warm_up(self, max_tokens: int, max_rows: int) -> None:
        """Do whatever would otherwise make the first steps slow. The pool is as before."""

    def step(self, inputs: StepInputs) -> StepOutputs[LogitsOut]:
        """Write K/V of every token into the pool, attend from the pool alone, and give logits."""

    def clear_blocks(self, blocks: Int32Array) -> None:
        """Zero these blocks: what a broken row wrote must not reach the next owner through a masked product."""

    def close(self) -> None:
        """Let weights and pool go."""

"""What a leader drives: an engine turns the rows of a step into token ids.

Three engines implement this: the model, the scripted one (exact outputs for tests of everything around it) and the
simulated one (step times without a model).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from workers.slots import Int32Array, PoolShape, SlotTable, StepBatch


class EngineFault(RuntimeError):
    """A step failed as a whole; the leader answers StepFailed with this kind."""

    def __init__(self, kind: str, message: str, *, kv_survived: bool) -> None:
        super().__init__(message)
        self.kind = kind
        self.kv_survived = kv_survived


class ModelDoesNotFit(RuntimeError):
    """Weights and the smallest useful KV pool exceed the memory; the message gives both and the bound."""


@dataclass(frozen=True)
class EngineDescription:
    """What a group registers of its engine."""

    shape: PoolShape
    numerics_digest: bytes
    tokenizer_digest: bytes
    backend: str
    """For the log and the metrics: backend, device and precision."""


@dataclass(frozen=True)
class RowResults:
    """What the rows of a step returned, in row order."""

    counts: npt.NDArray[np.uint8]
    """[rows]; 0 for rows that do not sample or did not succeed."""
    ids: Int32Array
    """[sum(counts)]"""
    status: npt.NDArray[np.uint8]
    """[rows] of RowStatus"""
    details: dict[int, str] = field(default_factory=dict)
    """Row → what went wrong, for the log."""
    logprobs: bytes = b""
    """Records (protocol/logprobs.py) of the ids of each row whose ``Sampling.logprobs`` is not -1, in row order."""
    prompt_logprobs: bytes = b""
    """Records of the prompt tokens that each chunk row judged whose ``Sampling.prompt_logprobs`` is not -1, in row
    order; none of a row that was not ready or failed."""


class Engine(Protocol):
    """Owned by one thread of the leader's process."""

    @property
    def description(self) -> EngineDescription:
        """Complete once the engine is built: weights loaded, KV allocated, kernels warm."""

    def execute(self, batch: StepBatch, table: SlotTable) -> RowResults:
        """Run one step. ``table`` is as of before the step and is not changed here. Raises EngineFault."""

    def reset(self) -> None:
        """Every slot was dropped."""

    def close(self) -> None:
        """Free what is held outside Python."""

"""A request's logit rules on tensors. Neutral for slots that ask for nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.requests import Sampling
from workers.logit_rules import has_rules, read_rules
from workers.slots import BoolArray, Int32Array, SlotTable


@dataclass(frozen=True)
class _Control:
    """One slot's rules, as the tensors that the stages use."""

    bias_ids: Tensor
    biases: Tensor
    allowed: Tensor | None
    """None allows every id."""
    forbidden: Tensor
    """Bad words of one id."""
    endings: tuple[tuple[Int32Array, int], ...]
    """Longer bad words: the ids before the last, and the last."""


class LogitControl:
    """Two stages of the sampler, on the rows of slots that need them."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._controlled: BoolArray = np.zeros(max_slots, dtype=np.bool_)
        self._controls: dict[int, _Control] = {}

    def fill(self, slot: int, sampling: Sampling) -> None:
        """A slot has a new sequence."""
        self._controlled[slot] = has_rules(sampling)
        self._controls.pop(slot, None)
        if self._controlled[slot]:
            self._controls[slot] = self._read(sampling)

    def bias_and_allow(self, logits: Tensor, slots: Int32Array) -> None:
        """Add biases and rule out what is not allowed, in ``logits`` fp32 [rows, vocab] of ``slots`` [rows]."""
        for row, control in self._rows(slots):
            values = logits[row]
            values[control.bias_ids] += control.biases
            if control.allowed is not None:
                # What the mask hides must not pass for sound.
                broken = (values.isnan() | values.isposinf()).any()
                kept = values[control.allowed]
                values.copy_(torch.where(broken, torch.nan, -torch.inf).expand_as(values))
                values[control.allowed] = torch.where(broken, torch.nan, kept)

    def forbid(self, logits: Tensor, slots: Int32Array, positions: Int32Array, table: SlotTable) -> None:
        """Rule out every id that would complete a bad word; ``positions`` [rows] are those of the ids to come."""
        for row, control in self._rows(slots):
            before = table.tokens[slots[row], : positions[row]]
            completing = [last for start, last in control.endings if _ends_with(before, start)]
            for ids in (control.forbidden, torch.tensor(completing, dtype=torch.int64, device=self._device)):
                logits[row, ids] = -torch.inf

    def _rows(self, slots: Int32Array) -> list[tuple[int, _Control]]:
        rows = np.flatnonzero(self._controlled[slots]).tolist()
        return [(row, self._controls[int(slots[row])]) for row in rows]

    def _read(self, sampling: Sampling) -> _Control:
        rules = read_rules(sampling, self._vocab_size)
        return _Control(
            bias_ids=self._ids(rules.bias_ids),
            biases=self._tensor(rules.biases),
            allowed=None if rules.allowed is None else self._ids(rules.allowed),
            forbidden=self._ids(rules.forbidden),
            endings=tuple((word[:-1], int(word[-1])) for word in rules.endings),
        )

    def _ids(self, values: Int32Array) -> Tensor:
        return self._tensor(values.astype(np.int64))

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _ends_with(tokens: Int32Array, tail: Int32Array) -> bool:
    """Whether a sequence ends with these ids; the last, which rarely matches, is looked at first."""
    count = len(tail)
    return count <= len(tokens) and tokens[-1] == tail[-1] and bool((tokens[-count:] == tail).all())

"""Matrix products whose rows have the same bits however many rows there are.

BLAS libraries choose kernels, and with them the order of summation, by the number of rows. Two measures undo that:
products run only with row counts from a short ladder (padding up, and cutting what is longer), and the ladder holds
only counts that gave, on this machine and for these very weights, the bits of the reference count for every row. The
ladder also bounds how many kernels the library has to prepare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LADDER = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
REFERENCE_ROWS = 16
"""The count that others must agree with; always on the ladder."""


class CpuLinear:
    """A linear layer on the CPU, its weight reordered once for oneDNN where torch can do that."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.most_rows = LADDER[-1]
        """Longer inputs run in pieces of this."""
        self._bias = bias
        self._weight, self._product = _prepare(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] → [rows, out]; ``rows`` comes from ``padded_rows``."""
        if x.shape[0] <= self.most_rows:
            return self._product(x, self._weight, self._bias)
        return torch.cat([self._product(part, self._weight, self._bias) for part in x.split(self.most_rows)])


def padded_rows(rows: int, ladder: Sequence[int]) -> int:
    """The row count a step of ``rows`` runs with: one of the ladder, on top of pieces of its largest."""
    whole, rest = divmod(rows, ladder[-1])
    return whole * ladder[-1] + (next(count for count in ladder if count >= rest) if rest else 0)


def agree_on_rows(linears: Sequence[CpuLinear], most: int) -> tuple[int, ...]:
    """Find the counts up to ``most`` whose rows agree bit for bit for every one of these layers, and hold them to it.

    Tries each shape once. When no larger count agrees, what is longer runs in pieces of the reference count.
    """
    counts = [count for count in LADDER if count <= padded_rows(most, LADDER)]
    counts = sorted({*counts, REFERENCE_ROWS})
    for linear in {(each.in_features, each.out_features): each for each in linears}.values():
        counts = _agreeing(linear, counts)
    for linear in linears:
        linear.most_rows = counts[-1]
    return tuple(counts)


def _agreeing(linear: CpuLinear, counts: Sequence[int]) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(counts), linear.in_features, generator=generator).to(linear.dtype)
    # Each row in another place than in the products compared with it.
    shifted = torch.cat((x[-5:], x))
    pieces = [F.pad(part, (0, 0, 0, REFERENCE_ROWS - len(part))) for part in shifted.split(REFERENCE_ROWS)]
    reference = torch.cat([linear(piece) for piece in pieces])[5 : 5 + len(x)]
    return [count for count in counts if count == REFERENCE_ROWS or torch.equal(linear(x[:count]), reference[:count])]


_Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _prepare(weight: Tensor) -> tuple[Tensor, _Product]:
    if torch.backends.mkldnn.is_available() and weight.dtype in (torch.float32, torch.bfloat16):
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 2 * REFERENCE_ROWS)
            _packed(torch.zeros(1, weight.shape[1], dtype=weight.dtype), packed, None)
        except (AttributeError, NotImplementedError, RuntimeError):
            return weight.contiguous().clone(), F.linear  # another torch: these operators are not public
        return packed, _packed
    return weight.contiguous().clone(), F.linear


def _packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result

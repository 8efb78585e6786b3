"""The noise of sampling: a pure function of (seed, position, token id), the same bits in every backend.

A token is drawn as the argmax of ``(logit - max) / temperature + noise``: the Gumbel-max trick. No generator state
exists, so batch layout, preemption and migration cannot change a draw. ``position`` is the index the drawn token will
have in its sequence, prompt included. Integers wrap at the width given; >> is logical::

    mix64(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31

    key   u64  = mix64(mix64(seed) + (position + 1) * 0x9E3779B97F4A7C15)
    x     u32  = token * 0x9E3779B1 ^ (key & 0xFFFFFFFF)
                 x ^= x >> 16;  x *= 0x7FEB352D;  x ^= key >> 32;
                 x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    u     fp32 = (x >> 8 | 1) * 2**-24          exact: an odd multiple of 2**-24, never 0 or 1
    noise fp32 = -ln(-ln(u))

with ln as below, every operation rounded to fp32 on its own (no fused multiply-add). For positive normal a::

    i = bits(a) as i32;  e = (i - 0x3F3504F3) >> 23 (arithmetic);  f = float(i - (e << 23) as bits) - 1
    z = f * f
    p = ((…(C0 * f + C1) * f + …) * f + C8)     C0 … C8: LOG_COEFFICIENTS
    ln(a) = (((f * z) * p + e * LN2_LOW) - z * 0.5 + f) + e * LN2_HIGH

The polynomial is Cephes' logf, the mixers are splitmix64's and Ellis' lowbias32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UInt64Array = npt.NDArray[np.uint64]

LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4

LARGEST = 16.64
"""No noise is larger, nor smaller than SMALLEST."""
SMALLEST = -2.82
ROUGHNESS = 1e-3
"""Far more than a library's logarithm and ours can differ by in a score that may win."""

_GOLDEN = 0x9E3779B97F4A7C15
_SQRT_HALF_BITS = 0x3F3504F3


def keys(seeds: UInt64Array, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The key of each (seed, position) as int32 [rows, 2]: low half, high half."""
    offsets = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    key = _mix64(_mix64(seeds) + offsets)
    return np.ascontiguousarray(key).astype("<u8").view("<i4").reshape(-1, 2)


def uniform(row_keys: Tensor, tokens: Tensor) -> Tensor:
    """u, fp32 [rows, tokens], for keys int32 [rows, 2] and token ids int32 [tokens] or [rows, tokens].

    torch has no unsigned 32-bit arithmetic: int32 products wrap the same, shifts are masked.
    """
    x = (tokens * _signed(0x9E3779B1)) ^ row_keys[:, :1]
    x ^= _shifted(x, 16)
    x *= _signed(0x7FEB352D)
    x ^= row_keys[:, 1:]
    x ^= _shifted(x, 15)
    x *= _signed(0x846CA68B)
    x ^= _shifted(x, 16)
    return _shifted(x, 8).bitwise_or_(1).to(torch.float32).mul_(2.0**-24)


def gumbel(u: Tensor) -> Tensor:
    """The noise of u."""
    return ln(ln(u).neg_()).neg_()


def rough_gumbel(u: Tensor) -> Tensor:
    """The noise of u to within ROUGHNESS, by the library's logarithm, which is faster; u is used up."""
    return u.log_().neg_().log_().neg_()


def ln(a: Tensor) -> Tensor:
    """The module's logarithm of positive normal fp32."""
    bits = a.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    e = exponent.to(torch.float32)
    z = f * f
    p = f * LOG_COEFFICIENTS[0]
    for coefficient in LOG_COEFFICIENTS[1:-1]:
        p.add_(coefficient).mul_(f)
    p.add_(LOG_COEFFICIENTS[-1])
    y = (f * z).mul_(p).add_(e * LN2_LOW)
    return y.sub_(z.mul_(0.5)).add_(f).add_(e.mul_(LN2_HIGH))


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift right of int32."""
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(value: int) -> int:
    """The i32 with these 32 bits."""
    return value - (1 << 32) if value >> 31 else value


def _mix64(z: UInt64Array) -> UInt64Array:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))

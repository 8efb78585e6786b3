"""Rotary position embedding, as tables: cos and sin are looked up, never recomputed, so a position always gets the
same bits whatever else is in the step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, factors: Tensor | None = None) -> Tensor:
    """Angle per position of each pair of dimensions, fp32 [head_dim / 2].

    ``factors`` [head_dim / 2] divide the unscaled frequencies in place of the configured scaling: GGUF files carry
    llama3 scaling this way.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if factors is not None:
        return frequencies / factors.float()
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def rope_tables(frequencies: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin for positions from 0 on, fp32 [positions, 2 * len(frequencies)].

    sin is negated in the first half, so that rotating is ``x * cos + swap_halves(x) * sin``.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate fp32 heads x [tokens, heads, head_dim] by tables taken at their positions [tokens, 1, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((high, low), dim=-1).mul_(sin).add_(x * cos)


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are divided by the factor, short ones kept, a linear blend between."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_context / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies

"""Rotary position embedding, as tables: cos and sin are looked up, never recomputed, so a position always gets the
same bits whatever else is in the step. Knows no tensor library.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from workers.model.config import RopeConfig

Float32Array = npt.NDArray[np.float32]


def inverse_frequencies(rope: RopeConfig, head_dim: int, factors: Float32Array | None = None) -> Float32Array:
    """Angle per position of each pair of dimensions, fp32 [head_dim / 2].

    ``factors`` [head_dim / 2] divide the unscaled frequencies in place of the configured scaling: GGUF files carry
    llama3 scaling this way.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies: Float32Array = np.reciprocal(np.power(np.float32(rope.theta), exponents))
    if factors is not None:
        return np.divide(frequencies, factors, dtype=np.float32)
    if rope.kind == "linear":
        return np.divide(frequencies, np.float32(rope.factor), dtype=np.float32)
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def rope_tables(frequencies: Float32Array, positions: int) -> tuple[Float32Array, Float32Array]:
    """cos and sin for positions from 0 on, fp32 [positions, len(frequencies)]."""
    angles = np.outer(np.arange(positions, dtype=np.float32), frequencies)
    return np.cos(angles), np.sin(angles)


def _llama3(rope: RopeConfig, frequencies: Float32Array) -> Float32Array:
    """Llama 3.1's scaling: long wavelengths are divided by the factor, short ones kept, a linear blend between."""
    wavelengths = np.float32(2 * math.pi) / frequencies
    turns = np.float32(rope.original_context) / wavelengths
    blend = (turns - np.float32(rope.low_freq_factor)) / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clip(0, 1)
    return (1 - blend) * frequencies / np.float32(rope.factor) + blend * frequencies

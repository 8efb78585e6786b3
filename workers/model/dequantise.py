"""GGUF's block formats to fp32, vectorised over blocks. Layouts follow ggml's ggml-common.h.

Every function takes the raw blocks, uint8 [blocks, bytes], and returns fp32 [blocks, values].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workers.model.errors import ModelError


def dequantise(rows: Tensor, kind: str) -> Tensor:
    """Decode uint8 rows [rows, bytes] of a GGUF tensor type to fp32 [rows, values]; ModelError on other types."""
    if kind in _PLAIN:
        return rows.view(_PLAIN[kind]).to(torch.float32)
    if kind not in _BLOCKS:
        raise ModelError(f"GGUF tensor type not supported: {kind}; supported: {', '.join(SUPPORTED)}")
    size, decode = _BLOCKS[kind]
    return decode(rows.reshape(-1, size)).reshape(rows.shape[0], -1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The fp16 scale at a byte offset, fp32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """Low nibbles, then high: [blocks, n] → [blocks, 2n]."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """32 bits from four bytes, little end first: uint8 [blocks, 32] of 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (blocks[:, start : start + 4, None] >> shifts) & 1
    return bits.reshape(-1, 32) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (values.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * values.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and minima out of twelve bytes, fp32 [blocks, 8, 1] each.

    ::

        byte  0..3   s0..s3 (low 6 bits), top 2 bits of s4..s7
        byte  4..7   m0..m3 (low 6 bits), top 2 bits of m4..m7
        byte  8..11  low nibbles: s4..s7, high nibbles: m4..m7
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)), dim=1)
    minima = torch.cat((second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)), dim=1)
    return scales.float()[:, :, None], minima.float()[:, :, None]


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks[:, 4:16])
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    values = torch.stack((packed & 0x0F, packed >> 4), dim=2).reshape(-1, 8, 32).float()
    scale, minimum = _half(blocks, 0)[:, :, None] * scales, _half(blocks, 2)[:, :, None] * minima
    return (scale * values - minimum).reshape(-1, 256)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks[:, 4:16])
    packed = blocks[:, 48:].reshape(-1, 4, 32)
    low = torch.stack((packed & 0x0F, packed >> 4), dim=2).reshape(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8)[None, :, None]
    high = (blocks[:, None, 16:48] >> shifts) & 1  # bit s of byte i belongs to value i of sub-block s
    values = (low | (high << 4)).float()
    scale, minimum = _half(blocks, 0)[:, :, None] * scales, _half(blocks, 2)[:, :, None] * minima
    return (scale * values - minimum).reshape(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((packed & 0x0F, packed >> 4), dim=2).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    values = (low | (high << 4)).reshape(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()[:, :, None]
    return (_half(blocks, 208)[:, :, None] * scales * values).reshape(-1, 256)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
SUPPORTED = (*_PLAIN, *_BLOCKS)
"""GGUF tensor types this module decodes, by their names in the ``gguf`` package."""

"""Bulk integers on the wire: little-endian arrays inside ``bytes`` fields, never lists of ints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

U32 = np.dtype("<u4")
U64 = np.dtype("<u8")
U8 = np.dtype("u1")
BIAS = np.dtype([("id", "<u4"), ("bias", "<f4")])
"""One token's logit bias."""

U32Array = npt.NDArray[np.uint32]
U64Array = npt.NDArray[np.uint64]
U8Array = npt.NDArray[np.uint8]


class PackingError(ValueError):
    """A bulk field whose length is not a whole number of items or rows."""


def pack_u32(values: Iterable[int] | npt.NDArray[Any]) -> bytes:
    """Encode token ids, slots or blocks; values must fit u32."""
    return _pack(values, U32)


def pack_u64(values: Iterable[int] | npt.NDArray[Any]) -> bytes:
    """Encode request ids; values must fit u64."""
    return _pack(values, U64)


def pack_u8(values: Iterable[int] | npt.NDArray[Any]) -> bytes:
    """Encode counts or statuses; values must fit u8."""
    return _pack(values, U8)


def unpack_u32(data: bytes, columns: int = 1) -> U32Array:
    """Read-only view of u32 values; shape [n], or [n, columns] when columns > 1.

    Raises PackingError when the length is not a multiple of the row size.
    """
    return _unpack(data, U32, columns)


def unpack_u64(data: bytes) -> U64Array:
    """Read-only view of u64 values, shape [n]. Raises PackingError on a ragged length."""
    return _unpack(data, U64, 1)


def unpack_u8(data: bytes) -> U8Array:
    """Read-only view of u8 values, shape [n]."""
    return _unpack(data, U8, 1)


def unpack_biases(data: bytes) -> npt.NDArray[Any]:
    """Read-only view of token biases as records of ``BIAS``, shape [n]. Raises PackingError on a ragged length."""
    return _unpack(data, BIAS, 1)


def _pack(values: Iterable[int] | npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    if isinstance(values, np.ndarray):
        return values.astype(dtype, copy=False).tobytes()
    items = list(values)
    return np.array(items, dtype=dtype).tobytes() if items else b""


def _unpack(data: bytes, dtype: np.dtype[Any], columns: int) -> npt.NDArray[Any]:
    row = dtype.itemsize * columns
    if len(data) % row:
        raise PackingError(f"{len(data)} bytes is not a whole number of {row}-byte rows")
    array = np.frombuffer(data, dtype=dtype)
    return array if columns == 1 else array.reshape(-1, columns)

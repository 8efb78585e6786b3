"""Tensors as they lie in a file: bytes with a type's name, mapped, nothing read before it is used.

Knows no tensor library. Types have GGUF's names; safetensors' F32, F16 and BF16 are spelt the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from workers.model.errors import ModelError

ByteArray = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]

_ITEMSIZES = {"F32": 4, "F16": 2, "BF16": 2}
_MOST_HEADER = 100 << 20
_OTHER_ITEMSIZES = {"F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class RawTensor:
    """One tensor of a file."""

    kind: str
    """Such as BF16 or Q4_1."""
    shape: tuple[int, ...]
    data: ByteArray
    """All its bytes, row after row."""
    row_order: Int32Array | None = None
    """[rows]: which stored row comes at each place; None: as they lie."""

    def float32(self) -> Float32Array:
        """A small tensor's values in order; raises ModelError for a block format."""
        if self.kind not in _ITEMSIZES:
            raise ModelError(f"a tensor of type {self.kind} where plain numbers are expected")
        if self.kind == "BF16":
            values = (self.data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            values = self.data.view(np.float32 if self.kind == "F32" else np.float16).astype(np.float32)
        values = values.reshape(self.shape)
        return values if self.row_order is None else values[self.row_order]


class RawTensors(Protocol):
    """The tensors of one model, by Hugging Face names."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by name."""

    def raw(self, name: str) -> RawTensor:
        """One tensor."""


class SafetensorsFiles:
    """One or more safetensors files, mapped."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._tensors: dict[str, RawTensor] = {}
        for file in files:
            for name, tensor in _read_safetensors(file):
                if name in self._tensors:
                    raise ModelError(f"{file}: tensor {name} is in another file too")
                self._tensors[name] = tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def raw(self, name: str) -> RawTensor:
        return self._tensors[name]


def deinterleaved(rows: int, heads: int) -> Int32Array:
    """Undoes llama.cpp's order of q and k rows: pairs side by side → first halves of all pairs, then second halves."""
    order = np.arange(rows, dtype=np.int32).reshape(heads, rows // heads // 2, 2)
    return np.ascontiguousarray(order.swapaxes(1, 2)).reshape(-1)


def _read_safetensors(file: Path) -> list[tuple[str, RawTensor]]:
    """A header of JSON behind its length in 8 bytes, then the tensors at the offsets it gives."""
    try:
        data = np.memmap(file, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as safetensors: {error}") from error
    length = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or not 2 <= length <= min(len(data) - 8, _MOST_HEADER):
        raise ModelError(f"{file}: cannot be read as safetensors: its header of {length} bytes is not there")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        return [(name, _tensor(file, data[8 + length :], name, entry)) for name, entry in entries]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{file}: cannot be read as safetensors: its header is not understood: {error}") from error


def _tensor(file: Path, body: ByteArray, name: str, entry: dict[str, Any]) -> RawTensor:
    kind, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    start, end = (int(offset) for offset in entry["data_offsets"])
    if not 0 <= start <= end <= len(body):
        raise ModelError(f"{file}: the file ends inside {name}")
    itemsize = _ITEMSIZES.get(kind, _OTHER_ITEMSIZES.get(kind))
    if itemsize is not None and end - start != int(np.prod(shape, dtype=np.int64)) * itemsize:
        raise ModelError(f"{file}: {name} of shape {list(shape)} and type {kind} has {end - start} bytes")
    return RawTensor(kind, shape, body[start:end])

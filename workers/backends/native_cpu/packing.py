"""Weights as the native library wants them: packed from a file's bytes once, then kept in a file that starts map.

::

    "HRPACK01" | length of the index, u64 | index, JSON | 0 … 0 | data, each part at a multiple of ALIGNMENT
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec
import numpy as np

from headrace.model_files.cache import private_directory
from workers.backends.native_cpu.backend import NativeCpu
from workers.backends.native_cpu.errors import NativeCpuError
from workers.backends.native_cpu.library import (
    ALIGNMENT,
    QUANTISED,
    ByteArray,
    Float32Array,
    Matrix,
    NativeLibrary,
    NumericType,
    Team,
    Vector,
    aligned_bytes,
)
from workers.model.checkpoint import EMBEDDING, FINAL_NORM, HEAD, ROPE_FACTORS, layer_prefix
from workers.model.config import ModelConfig
from workers.model.errors import ModelError
from workers.model.raw_tensors import RawTensors

_MAGIC = b"HRPACK01"
_PAGE = 4096
_MOST_INDEX = 64 << 20

_LAYER_MATRICES = (
    (Matrix.QKV, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    (Matrix.ATTENTION_OUT, ("self_attn.o_proj",)),
    (Matrix.GATE_UP, ("mlp.gate_proj", "mlp.up_proj")),
    (Matrix.DOWN, ("mlp.down_proj",)),
)
_LAYER_NORMS = ((Vector.INPUT_NORM, "input_layernorm"), (Vector.MLP_NORM, "post_attention_layernorm"))
_BIASES = {
    Matrix.QKV: Vector.QKV_BIAS,
    Matrix.ATTENTION_OUT: Vector.ATTENTION_OUT_BIAS,
    Matrix.GATE_UP: Vector.GATE_UP_BIAS,
    Matrix.DOWN: Vector.DOWN_BIAS,
}


class Precision(Enum):
    """What matrices are packed to."""

    STORED = "stored"
    """GGUF's block formats stay as they are; plain numbers become bf16."""
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    """One scale per output channel."""


class PackedMatrix(msgspec.Struct, frozen=True):
    """A matrix [rows, columns] and where it lies, in bytes from the start of the data."""

    name: str
    matrix: int
    layer: int
    part: int
    kind: int
    """A NumericType."""
    rows: int
    columns: int
    offset: int
    size: int


class PackedVector(msgspec.Struct, frozen=True):
    """An fp32 vector, made of these tensors end to end, and where it lies."""

    names: tuple[str, ...]
    vector: int
    """A Vector; -1 for the factors of rope."""
    layer: int
    offset: int
    count: int


class PackedIndex(msgspec.Struct, frozen=True):
    """What is packed, and where."""

    matrices: tuple[PackedMatrix, ...]
    vectors: tuple[PackedVector, ...]
    size: int
    """Of the data."""

    @property
    def types(self) -> str:
        """The types of matrices, those with the most bytes first, such as Q4_1+Q8_0."""
        sizes: dict[str, int] = {}
        for each in self.matrices:
            name = NumericType(each.kind).name
            sizes[name] = sizes.get(name, 0) + each.size
        return "+".join(sorted(sizes, key=lambda name: -sizes[name]))


@dataclass(frozen=True)
class PackedWeights:
    """An index and the data it speaks of."""

    index: PackedIndex
    data: ByteArray

    def attach(self, backend: NativeCpu) -> None:
        """Give a backend all of it; the matrices stay where they are."""
        for each in self.index.matrices:
            packed = self.data[each.offset : each.offset + each.size]
            shape, kind = (each.rows, each.columns), NumericType(each.kind)
            backend.attach_matrix(Matrix(each.matrix), each.layer, each.part, kind, shape, packed)
        for vector in self.index.vectors:
            if vector.vector >= 0:
                backend.attach_vector(Vector(vector.vector), vector.layer, self._values(vector))
        backend.complete()

    def rope_factors(self) -> Float32Array | None:
        """fp32 [head_dim / 2], see ``rope.inverse_frequencies``."""
        return next((self._values(vector) for vector in self.index.vectors if vector.vector < 0), None)

    def _values(self, vector: PackedVector) -> Float32Array:
        return self.data[vector.offset : vector.offset + 4 * vector.count].view(np.float32)


def index_weights(
    library: NativeLibrary, config: ModelConfig, tensors: RawTensors, precision: Precision
) -> PackedIndex:
    """Lay out a model's weights. Raises ModelError on a type that cannot be packed."""
    end = 0

    def place(size: int) -> int:
        nonlocal end
        offset = end
        end = -(-(offset + size) // ALIGNMENT) * ALIGNMENT
        return offset

    matrices = []
    for name, matrix, layer, part in _matrices(config):
        tensor = tensors.raw(name)
        rows, columns = tensor.shape
        kind = _packed_type(library, tensor.kind, (rows, columns), precision, name)
        size = library.packed_bytes(kind, rows, columns)
        matrices.append(PackedMatrix(name, matrix, layer, part, kind, rows, columns, place(size), size))
    vectors = []
    shapes = tensors.shapes()
    for names, vector, layer in _vectors(config, shapes.keys()):
        count = sum(shapes[name][0] for name in names)
        vectors.append(PackedVector(names, vector, layer, place(4 * count), count))
    return PackedIndex(tuple(matrices), tuple(vectors), end)


def pack_weights(
    library: NativeLibrary, team: Team, tensors: RawTensors, index: PackedIndex, progress: Callable[[float], None]
) -> PackedWeights:
    """Pack into memory of our own, each matrix by all threads."""
    data = aligned_bytes(index.size)
    done = 0
    for each in index.matrices:
        tensor, target = tensors.raw(each.name), data[each.offset : each.offset + each.size]
        kind, shape = NumericType(each.kind), (each.rows, each.columns)
        library.pack(team, tensor.data, NumericType[tensor.kind], kind, shape, target, tensor.row_order)
        done += each.size
        progress(done / index.size)
    for vector in index.vectors:
        values = np.concatenate([tensors.raw(name).float32() for name in vector.names])
        data[vector.offset : vector.offset + 4 * vector.count].view(np.float32)[:] = values
    return PackedWeights(index, data)


def write_packed(weights: PackedWeights, target: Path) -> None:
    """Keep packed weights in a file that appears whole or not at all. Raises OSError or ArtefactError."""
    private_directory(target.parent)
    encoded = msgspec.json.encode(weights.index)
    head = _MAGIC + len(encoded).to_bytes(8, "little") + encoded
    handle, made = tempfile.mkstemp(prefix=".making-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(head + bytes(-len(head) % _PAGE))
            file.write(weights.data.data)
        Path(made).replace(target)
    finally:
        Path(made).unlink(missing_ok=True)


def read_packed(path: Path) -> PackedWeights | None:
    """Map what ``write_packed`` wrote; None when it is not there or not whole."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
        os.utime(path)
    except (OSError, ValueError):
        return None
    whole = np.frombuffer(mapped, dtype=np.uint8)
    length = int.from_bytes(whole[8:16].tobytes(), "little")
    if whole[:8].tobytes() != _MAGIC or length > min(len(whole), _MOST_INDEX):
        return None
    try:
        index = msgspec.json.decode(whole[16 : 16 + length].tobytes(), type=PackedIndex)
    except msgspec.DecodeError:
        return None
    start = -(-(16 + length) // _PAGE) * _PAGE
    if len(whole) != start + index.size or any(end > index.size for end in _ends(index)):
        return None
    return PackedWeights(index, whole[start:])


def _ends(index: PackedIndex) -> Iterator[int]:
    yield from (each.offset + each.size for each in index.matrices)
    yield from (each.offset + 4 * each.count for each in index.vectors)


def _matrices(config: ModelConfig) -> Iterator[tuple[str, Matrix, int, int]]:
    """(tensor, matrix, layer, part) of every matrix, in the order a step reads them."""
    yield EMBEDDING, Matrix.EMBEDDING, 0, 0
    for layer in range(config.num_layers):
        for matrix, names in _LAYER_MATRICES:
            for part, name in enumerate(names):
                yield f"{layer_prefix(layer)}{name}.weight", matrix, layer, part
    if not config.tied_embeddings:
        yield HEAD, Matrix.HEAD, 0, 0


def _vectors(config: ModelConfig, found: Iterable[str]) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """(tensors end to end, vector, layer) of every vector."""
    yield (FINAL_NORM,), Vector.FINAL_NORM, 0
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        for vector, name in _LAYER_NORMS:
            yield (f"{prefix}{name}.weight",), vector, layer
        for matrix, names in _LAYER_MATRICES:
            attention = matrix in (Matrix.QKV, Matrix.ATTENTION_OUT)
            if config.attention_bias if attention else config.mlp_bias:
                yield tuple(f"{prefix}{name}.bias" for name in names), _BIASES[matrix], layer
    if ROPE_FACTORS in found:
        yield (ROPE_FACTORS,), -1, 0


def _packed_type(
    library: NativeLibrary, stored: str, shape: tuple[int, int], precision: Precision, name: str
) -> NumericType:
    if stored not in NumericType.__members__:
        supported = ", ".join(each.name for each in NumericType if each is not NumericType.INT8)
        raise ModelError(f"tensor type not supported: {stored} of {name}; supported: {supported}")
    if precision is Precision.INT8:
        return NumericType.INT8
    kind = NumericType[stored]
    if precision is Precision.STORED and kind in QUANTISED:
        try:
            library.packed_bytes(kind, *shape)
        except NativeCpuError:
            return NumericType.BF16  # such as a width that does not fill the library's tiles
        return kind
    return NumericType.BF16

"""Levels of the native library, random matrices in every format, tiny random models, and steps driven by hand."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from workers.backends.base import StepInputs
from workers.backends.native_cpu.backend import NativeCpu, NativeOutputs
from workers.backends.native_cpu.build import EMULATED_TILES, RELEASE, Variant, build_library
from workers.backends.native_cpu.errors import NativeCpuUnavailable
from workers.backends.native_cpu.library import (
    QUANTISED,
    Activation,
    ByteArray,
    Matrix,
    NativeConfig,
    NativeLibrary,
    NumericType,
    Team,
    Vector,
    aligned_bytes,
)

FloatArray = npt.NDArray[np.float32]
BLOCK = 16
PACKED_TYPES = [each for each in NumericType if each not in (NumericType.F32, NumericType.F16)]

LEVELS = {"avx512": (RELEASE, "avx512"), "amx": (RELEASE, "amx"), "amx, emulated tiles": (EMULATED_TILES, "amx")}


def level_library(level: str, patch: pytest.MonkeyPatch) -> NativeLibrary:
    """The library held to one level; skips where this machine cannot run it."""
    variant, isa = LEVELS[level]
    patch.setenv("HEADRACE_CPU_ISA", isa)
    library = _built(variant)
    if library.isa != isa:
        pytest.skip(f"this CPU has no {isa}")
    return library


@functools.cache
def _built(variant: Variant) -> NativeLibrary:
    try:
        return NativeLibrary(build_library(variant))
    except NativeCpuUnavailable as error:
        pytest.skip(f"no native library here: {error}")


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix as the library holds it, and the values that it stands for."""

    kind: NumericType
    shape: tuple[int, int]
    data: ByteArray
    values: FloatArray


def random_matrix(
    library: NativeLibrary,
    team: Team,
    kind: NumericType,
    shape: tuple[int, int],
    rng: np.random.Generator,
    scale: float = 0.05,
) -> PackedMatrix:
    values = rng.standard_normal(shape).astype(np.float32) * np.float32(scale)
    if kind in QUANTISED:
        return pack(library, team, quantise(values, kind, rng), kind, kind, shape)
    return pack(library, team, values, NumericType.F32, kind, shape)


def pack(
    library: NativeLibrary,
    team: Team,
    source: npt.NDArray[np.generic],
    source_kind: NumericType,
    kind: NumericType,
    shape: tuple[int, int],
) -> PackedMatrix:
    data = aligned_bytes(library.packed_bytes(kind, *shape))
    raw = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
    library.pack(team, raw, source_kind, kind, shape, data)
    return PackedMatrix(kind, shape, data, library.unpack_rows(kind, shape, data, np.arange(shape[0])))


def quantise(values: FloatArray, kind: NumericType, rng: np.random.Generator) -> ByteArray:
    """GGUF's bytes, [rows, bytes of a row]. Random codes for the formats that the gguf package only reads."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    ggml = GGMLQuantizationType[kind.name]
    try:
        return quants.quantize(values, ggml)
    except NotImplementedError:
        values_of_block, size = GGML_QUANT_SIZES[ggml]
    raw = rng.integers(0, 256, (values.shape[0], values.shape[1] // values_of_block, size), dtype=np.uint8)
    where, scales = (208, [2e-5]) if kind is NumericType.Q6_K else (0, [1e-4, 4e-4])
    raw[:, :, where : where + 2 * len(scales)] = np.array(scales, dtype=np.float16).view(np.uint8)
    return raw.reshape(values.shape[0], -1)


@dataclass(frozen=True)
class Shape:
    """A tiny decoder: sizes chosen not to be whole tiles, and the switches that families differ by."""

    vocab: int = 150
    hidden: int = 72
    inner: int = 104
    layers: int = 2
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 24
    positions: int = 1200
    tied: bool = True
    bias: bool = False
    qk_norm: bool = False
    branch_norms: bool = False
    window: int = 0
    activation: Activation = Activation.SILU
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    rotary_dim: int = 0

    @property
    def windows(self) -> tuple[int, ...]:
        """Every other layer has one."""
        return tuple(self.window if index % 2 == 0 else 0 for index in range(self.layers)) if self.window else ()


WIDE = Shape(hidden=256, inner=512, heads=4, kv_heads=2, head_dim=64)
"""Inputs in whole blocks of 256, for K-quants."""


@dataclass
class TinyModel:
    """Weights of a random decoder, attached to a backend and kept for the oracle."""

    shape: Shape
    backend: NativeCpu
    cos: FloatArray
    sin: FloatArray
    matrices: dict[tuple[Matrix, int, int], FloatArray] = field(default_factory=dict)
    vectors: dict[tuple[Vector, int], FloatArray] = field(default_factory=dict)


def tiny_model(
    library: NativeLibrary,
    team: Team,
    shape: Shape,
    kinds: Sequence[NumericType] = (NumericType.BF16,),
    kv: NumericType = NumericType.BF16,
    blocks: int = 160,
    broken_token: int | None = None,
) -> TinyModel:
    """``kinds`` are given to the matrices in turn. The embedding of ``broken_token`` is not a number."""
    rng = np.random.default_rng(3)
    half = (shape.rotary_dim or shape.head_dim) // 2
    angles = np.outer(np.arange(shape.positions), 1.0 / 10000.0 ** (np.arange(half) / half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    config = NativeConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        norm_eps=1e-5,
        rope_cos=cos,
        rope_sin=sin,
        rotary_dim=shape.rotary_dim,
        kv_type=kv,
        activation=shape.activation,
        attention_softcap=shape.attention_softcap,
        logit_softcap=shape.logit_softcap,
        embedding_multiplier=shape.embedding_multiplier,
        residual_multiplier=shape.residual_multiplier,
        windows=shape.windows,
    )
    model = TinyModel(shape, NativeCpu(library, team, config), cos, sin)
    for index, (matrix, layer, part, size) in enumerate(_matrices(shape)):
        kind = kinds[index % len(kinds)]
        scale = 1.0 if matrix is Matrix.EMBEDDING else 2.0 / size[1] ** 0.5
        if matrix is Matrix.EMBEDDING and broken_token is not None:
            values = rng.standard_normal(size).astype(np.float32)
            values[broken_token] = np.nan
            packed = pack(library, team, values, NumericType.F32, NumericType.BF16, size)
        else:
            packed = random_matrix(library, team, kind, size, rng, scale)
        model.backend.attach_matrix(matrix, layer, part, packed.kind, size, packed.data)
        model.matrices[matrix, layer, part] = packed.values
    for vector, layer, count in _vectors(shape):
        is_bias = vector.name.endswith("BIAS")
        values = rng.standard_normal(count).astype(np.float32) * np.float32(0.1) + np.float32(0 if is_bias else 1)
        model.backend.attach_vector(vector, layer, values)
        model.vectors[vector, layer] = values
    model.backend.complete()
    model.backend.allocate_kv(blocks, BLOCK)
    return model


def _matrices(shape: Shape) -> Iterator[tuple[Matrix, int, int, tuple[int, int]]]:
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield Matrix.EMBEDDING, 0, 0, (shape.vocab, shape.hidden)
    if not shape.tied:
        yield Matrix.HEAD, 0, 0, (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        for part, rows in enumerate((width, kv_width, kv_width)):
            yield Matrix.QKV, layer, part, (rows, shape.hidden)
        yield Matrix.ATTENTION_OUT, layer, 0, (shape.hidden, width)
        yield Matrix.GATE_UP, layer, 0, (shape.inner, shape.hidden)
        yield Matrix.GATE_UP, layer, 1, (shape.inner, shape.hidden)
        yield Matrix.DOWN, layer, 0, (shape.hidden, shape.inner)


def _vectors(shape: Shape) -> Iterator[tuple[Vector, int, int]]:
    yield Vector.FINAL_NORM, 0, shape.hidden
    for layer in range(shape.layers):
        yield Vector.INPUT_NORM, layer, shape.hidden
        yield Vector.MLP_NORM, layer, shape.hidden
        if shape.bias:
            yield Vector.QKV_BIAS, layer, (shape.heads + 2 * shape.kv_heads) * shape.head_dim
            yield Vector.ATTENTION_OUT_BIAS, layer, shape.hidden
            yield Vector.GATE_UP_BIAS, layer, 2 * shape.inner
            yield Vector.DOWN_BIAS, layer, shape.hidden
        if shape.qk_norm:
            yield Vector.Q_NORM, layer, shape.head_dim
            yield Vector.K_NORM, layer, shape.head_dim
        if shape.branch_norms:
            yield Vector.POST_ATTENTION_NORM, layer, shape.hidden
            yield Vector.POST_MLP_NORM, layer, shape.hidden


@dataclass(frozen=True)
class Row:
    """Tokens of one row of a step, from ``start`` on, and the blocks of its sequence."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    samples: bool = True


def step(backend: NativeCpu, rows: Sequence[Row], judged: Sequence[int] = ()) -> NativeOutputs:
    width = max(len(row.blocks) for row in rows)
    tables = np.full((len(rows), width), -1, dtype=np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.blocks)] = row.blocks
    return backend.step(
        StepInputs(
            tokens=np.concatenate([np.asarray(row.tokens, dtype=np.int64) for row in rows]),
            starts=np.array([row.start for row in rows], dtype=np.int32),
            lengths=np.array([len(row.tokens) for row in rows], dtype=np.int32),
            block_tables=tables,
            samples=np.array([row.samples for row in rows], dtype=np.bool_),
            judged=np.asarray(judged, dtype=np.int64),
        )
    )


def last_logits(backend: NativeCpu, tokens: Sequence[int], blocks: Sequence[int], chunks: Sequence[int]) -> FloatArray:
    """Logits after ``tokens``, computed in chunks of these lengths; the last length repeats."""
    done, cut = 0, list(chunks)
    while True:
        length = min(cut.pop(0) if len(cut) > 1 else cut[0], len(tokens) - done)
        outputs = step(backend, [Row(tokens[done : done + length], done, blocks)])
        done += length
        if done == len(tokens):
            return outputs.logits[0].copy()

"""A decoder on the native library, behind the interface every backend has, but for numpy arrays in place of tensors.

The loader attaches packed weights, which stay where they are: in memory of ``aligned_bytes`` or in a mapped file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from workers.backends.native_cpu.library import (
    ByteArray,
    Float32Array,
    Int32Array,
    Matrix,
    NativeConfig,
    NativeLibrary,
    NumericType,
    Team,
    Vector,
    native_config,
    step_arguments,
)

if TYPE_CHECKING:
    from workers.backends.base import StepInputs

_JUDGED_AT_ONCE = 64
"""Prompt tokens whose logits exist at a time."""


@dataclass(frozen=True)
class NativeOutputs:
    """What a step gave. The arrays are the backend's own and hold until its next step."""

    logits: Float32Array
    """[sampling rows, vocab], in row order."""
    greedy: Int32Array
    """[sampling rows]: id of the largest logit, the lowest on a tie."""
    broken: npt.NDArray[np.bool_]
    """[rows]: the row's last hidden state is not finite."""
    judged: Iterator[Float32Array]
    """[at most a few dozen, vocab] each: logits of ``StepInputs.judged`` in pieces, made as they are taken, in one
    array that the next piece overwrites; to be taken before the next step."""


class NativeCpu:
    """Backend of the native library."""

    def __init__(self, library: NativeLibrary, team: Team, config: NativeConfig) -> None:
        self._library, self._team, self._config = library, team, config
        self._kept: list[ByteArray] = []
        self._logits: Float32Array = np.empty((0, config.vocab_size), dtype=np.float32)
        self._judged_logits: Float32Array = np.empty((0, config.vocab_size), dtype=np.float32)
        native, alive = native_config(config)
        created = ctypes.c_void_p()
        library.check(library.handle.headrace_model_create(ctypes.byref(native), team.pointer, ctypes.byref(created)))
        del alive
        self._model = created

    @property
    def name(self) -> str:
        return f"native cpu, {self._library.isa}, {self._team.threads} threads"

    @property
    def numeric_class(self) -> dict[str, str]:
        """The build is named after sources, compiler and flags. Types of weights are the loader's to add."""
        return {
            "backend": "native cpu 1",
            "isa": self._library.isa,
            "build": self._library.path.stem,
            "kv dtype": self._config.kv_type.name,
        }

    @property
    def kv_block_bytes(self) -> int:
        """K and V of all layers for one block of 16 tokens."""
        return int(self._library.handle.headrace_kv_block_bytes(self._model))

    def attach_matrix(
        self, matrix: Matrix, layer: int, part: int, packed_type: NumericType, shape: tuple[int, int], packed: ByteArray
    ) -> None:
        """A packed matrix [out, in]. The array is kept alive; ``layer`` is 0 for embedding and head."""
        address = packed.ctypes.data
        call = self._library.handle.headrace_attach_matrix
        self._library.check(call(self._model, matrix, layer, part, packed_type, *shape, address))
        self._kept.append(packed)

    def attach_vector(self, vector: Vector, layer: int, values: Float32Array) -> None:
        """Copied."""
        values = np.ascontiguousarray(values, dtype=np.float32)
        call = self._library.handle.headrace_attach_vector
        self._library.check(call(self._model, vector, layer, values.ctypes.data, values.size))

    def complete(self) -> None:
        """Raises NativeCpuError naming a weight that was not attached."""
        self._library.check(self._library.handle.headrace_model_complete(self._model))

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self._library.check(self._library.handle.headrace_allocate_kv(self._model, num_blocks, block_size))

    def warm_up(self, max_tokens: int, max_rows: int) -> None:
        self._library.check(self._library.handle.headrace_reserve(self._model, max_tokens, max_rows))
        self._grow_logits(max_rows)

    def step(self, inputs: StepInputs) -> NativeOutputs:
        """Write K/V of every token into the pool, attend from the pool alone, and give logits."""
        tokens = np.ascontiguousarray(inputs.tokens, dtype=np.int64)
        starts = np.ascontiguousarray(inputs.starts, dtype=np.int32)
        lengths = np.ascontiguousarray(inputs.lengths, dtype=np.int32)
        tables = np.ascontiguousarray(inputs.block_tables, dtype=np.int32)
        samples = np.ascontiguousarray(inputs.samples, dtype=np.bool_)
        judged = np.ascontiguousarray(inputs.judged, dtype=np.int64)
        sampling = int(np.count_nonzero(samples))
        self._grow_logits(sampling)
        greedy = np.empty(sampling, dtype=np.int32)
        broken = np.zeros(len(starts), dtype=np.bool_)
        arguments = step_arguments(
            rows=len(starts),
            tokens=len(tokens),
            table_width=tables.shape[1],
            judged_count=len(judged),
            token_ids=tokens.ctypes.data,
            starts=starts.ctypes.data,
            lengths=lengths.ctypes.data,
            block_tables=tables.ctypes.data,
            samples=samples.ctypes.data,
            judged=judged.ctypes.data,
            logits=self._logits.ctypes.data,
            greedy=greedy.ctypes.data,
            broken=broken.ctypes.data,
        )
        self._library.check(self._library.handle.headrace_step(self._model, ctypes.byref(arguments)))
        return NativeOutputs(self._logits[:sampling], greedy, broken, self._judged(len(judged)))

    def clear_blocks(self, blocks: Int32Array) -> None:
        blocks = np.ascontiguousarray(blocks, dtype=np.int32)
        self._library.check(self._library.handle.headrace_clear_blocks(self._model, blocks.ctypes.data, len(blocks)))

    def close(self) -> None:
        """Let weights and pool go; the team is its owner's to close."""
        if self._model:
            self._library.handle.headrace_model_destroy(self._model)
            self._model = ctypes.c_void_p()
        self._kept.clear()

    def _grow_logits(self, rows: int) -> None:
        if rows > len(self._logits):
            self._logits = np.zeros((rows, self._config.vocab_size), dtype=np.float32)

    def _judged(self, count: int) -> Iterator[Float32Array]:
        for first in range(0, count, _JUDGED_AT_ONCE):
            size = min(_JUDGED_AT_ONCE, count - first)
            if len(self._judged_logits) < size:
                self._judged_logits = np.empty((size, self._config.vocab_size), dtype=np.float32)
            call = self._library.handle.headrace_judged_logits
            self._library.check(call(self._model, first, size, self._judged_logits.ctypes.data))
            yield self._judged_logits[:size]

"""Products and steps of the native CPU backend beside the limits of this machine, measured in the same process.

Usage: python bench/kernels.py [--threads N] [--repeats N] [--json PATH]

Matrices are those of SmolLM2-135M with random weights. For each format and number of rows: milliseconds, GB/s of
packed weights and GFLOP/s, the best of the repeats; and how much of the time the slower of two limits would take:
reading the same packed bytes with the same threads, or the best rate that a product of this format reached. Products
alone find their weights in a cache where they fit one, and so does their limit. Then whole steps, which do not, with
the KV read for their context counted as bytes too.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from workers.backends.base import StepInputs
from workers.backends.native_cpu.backend import NativeCpu
from workers.backends.native_cpu.library import (
    QUANTISED,
    ByteArray,
    Matrix,
    NativeConfig,
    NativeLibrary,
    NumericType,
    Team,
    Vector,
    aligned_bytes,
    load_library,
)

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, WIDTH, VOCAB = 576, 1536, 30, 9, 3, 64, 49152
LINEARS = {"qkv": (960, HIDDEN), "attention out": (HIDDEN, HIDDEN), "gate and up": (2 * INNER, HIDDEN)}
LINEARS |= {"down": (HIDDEN, INNER), "head": (VOCAB, HIDDEN)}
ROWS = (1, 8, 32, 128)
KINDS = (NumericType.BF16, NumericType.INT8, NumericType.Q8_0, NumericType.Q4_1, NumericType.Q4_0)
DECODES = ((1, 128), (8, 256), (32, 256))
PREFILLS = (128, 512)


@dataclass(frozen=True)
class Measurement:
    """``limit_ms`` is what the slower of the two limits takes; ``of_limit`` its share of the time."""

    what: str
    kind: str
    rows: int
    ms: float
    gb_per_s: float
    gflop_per_s: float
    limit_ms: float
    of_limit: float


def main() -> int:
    parser = argparse.ArgumentParser(description="Kernels of the native CPU backend beside this machine's limits.")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--kinds", nargs="*", default=[kind.name for kind in KINDS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    library = load_library()
    team = Team(library, options.threads)
    print(f"{library.isa}, {team.threads} threads; best of {options.repeats}")
    results: list[Measurement] = []
    for name in options.kinds:
        results += measure_kind(library, team, NumericType[name], options.repeats)
    if options.json:
        facts = {"machine": platform.platform(), "isa": library.isa, "threads": team.threads}
        options.json.write_text(json.dumps({**facts, "results": [asdict(each) for each in results]}, indent=1))
    return 0


@dataclass(frozen=True)
class Timing:
    """What took how long, and what it had to read and to multiply."""

    what: str
    rows: int
    size: float
    flops: float
    seconds: float
    stream: float
    """Bytes a second at which the same weights were only read."""

    def beside(self, peak: float, kind: NumericType) -> Measurement:
        limit = max(self.size / self.stream, self.flops / peak)
        return Measurement(
            what=self.what,
            kind=kind.name,
            rows=self.rows,
            ms=self.seconds * 1e3,
            gb_per_s=self.size / self.seconds / 1e9,
            gflop_per_s=self.flops / self.seconds / 1e9,
            limit_ms=limit * 1e3,
            of_limit=limit / self.seconds,
        )


def measure_kind(library: NativeLibrary, team: Team, kind: NumericType, repeats: int) -> list[Measurement]:
    """Every product and step of one format."""
    weights = Weights(library, team, kind)
    stream = library.stream_rate(team, weights.all, 5)
    products = list(time_products(library, team, weights, kind, repeats))
    peak = max(timing.flops / timing.seconds for timing in products)
    steps = list(time_steps(weights, repeats, stream))
    print(f"\n{kind.name}: {len(weights.all) / 1e6:.0f} MB, streamed at {stream / 1e9:.1f} GB/s", end="; ")
    print(f"best product {peak / 1e9:.0f} GFLOP/s")
    print(f"{'':16}{'rows':>6}{'ms':>10}{'GB/s':>8}{'GFLOP/s':>9}{'limit ms':>10}{'of limit':>9}")
    results = [timing.beside(peak, kind) for timing in (*products, *steps)]
    for each in results:
        print(
            f"{each.what:16}{each.rows:6}{each.ms:10.3f}{each.gb_per_s:8.1f}{each.gflop_per_s:9.0f}"
            f"{each.limit_ms:10.3f}{each.of_limit:9.0%}"
        )
    return results


def time_products(
    library: NativeLibrary, team: Team, weights: Weights, kind: NumericType, repeats: int
) -> Iterator[Timing]:
    for what, shape in LINEARS.items():
        data = weights.matrix(shape)
        stream = library.stream_rate(team, data, repeats)
        for rows in ROWS:
            x = np.random.default_rng(0).standard_normal((rows, shape[1])).astype(np.float32)
            out = np.zeros((rows, shape[0]), dtype=np.float32)
            seconds = best(repeats, partial(library.linear, team, kind, shape, data, x, out))
            yield Timing(what, rows, len(data), 2.0 * rows * shape[0] * shape[1], seconds, stream)


def time_steps(weights: Weights, repeats: int, stream: float) -> Iterator[Timing]:
    backend = weights.backend()
    for count, context in DECODES:
        seconds = best(repeats, partial(backend.step, decode(count, context)))
        kv = count * context * backend.kv_block_bytes / 16
        yield Timing(f"decode at {context}", count, weights.size + kv, count * weights.flops_of_token, seconds, stream)
    for count in PREFILLS:
        seconds = best(max(3, repeats // 3), partial(backend.step, prefill(count)))
        flops = count * weights.flops_of_body + 2.0 * VOCAB * HIDDEN
        yield Timing("prefill", count, weights.size, flops, seconds, stream)
    backend.close()


class Weights:
    """Packed matrices of a whole model, one behind the other: no more of them is in a cache than would be."""

    def __init__(self, library: NativeLibrary, team: Team, kind: NumericType) -> None:
        self._library, self._team, self._kind = library, team, kind
        matrices = [(Matrix.EMBEDDING, 0, 0, (VOCAB, HIDDEN))]
        for layer in range(LAYERS):
            for matrix, part, shape in self._layer():
                matrices.append((matrix, layer, part, shape))
        sizes = [library.packed_bytes(kind, *shape) for _, _, _, shape in matrices]
        self.all = aligned_bytes(sum(-(-size // 64) * 64 for size in sizes))
        self._attached: list[tuple[Matrix, int, int, tuple[int, int], ByteArray]] = []
        made: dict[tuple[int, int], ByteArray] = {}
        start = 0
        for (matrix, layer, part, shape), size in zip(matrices, sizes, strict=True):
            data = self.all[start : start + size]
            if shape not in made:
                made[shape] = self._random(shape)
            data[:] = made[shape]
            self._attached.append((matrix, layer, part, shape, data))
            start += -(-size // 64) * 64
        self._loose: dict[tuple[int, int], ByteArray] = made
        self.size = sum(sizes)
        self.flops_of_body = 2.0 * LAYERS * sum(rows * columns for _, _, (rows, columns) in self._layer())
        self.flops_of_token = self.flops_of_body + 2.0 * VOCAB * HIDDEN

    def matrix(self, shape: tuple[int, int]) -> ByteArray:
        if shape not in self._loose:
            self._loose[shape] = self._random(shape)
        return self._loose[shape]

    def backend(self) -> NativeCpu:
        angles = np.outer(np.arange(2048), 1.0 / 1e5 ** (np.arange(WIDTH // 2) * 2 / WIDTH))
        config = NativeConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_layers=LAYERS,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=WIDTH,
            norm_eps=1e-5,
            rope_cos=np.cos(angles).astype(np.float32),
            rope_sin=np.sin(angles).astype(np.float32),
        )
        backend = NativeCpu(self._library, self._team, config)
        for matrix, layer, part, shape, data in self._attached:
            backend.attach_matrix(matrix, layer, part, self._kind, shape, data)
        ones = np.ones(HIDDEN, dtype=np.float32)
        backend.attach_vector(Vector.FINAL_NORM, 0, ones)
        for layer in range(LAYERS):
            backend.attach_vector(Vector.INPUT_NORM, layer, ones)
            backend.attach_vector(Vector.MLP_NORM, layer, ones)
        backend.complete()
        backend.allocate_kv(max(count * context for count, context in DECODES) // 16, 16)
        backend.warm_up(max(PREFILLS), max(count for count, _ in DECODES))
        return backend

    @staticmethod
    def _layer() -> list[tuple[Matrix, int, tuple[int, int]]]:
        heads = [(Matrix.QKV, 0, (HEADS * WIDTH, HIDDEN)), (Matrix.QKV, 1, (KV_HEADS * WIDTH, HIDDEN))]
        heads += [(Matrix.QKV, 2, (KV_HEADS * WIDTH, HIDDEN)), (Matrix.ATTENTION_OUT, 0, (HIDDEN, HEADS * WIDTH))]
        inner = [(Matrix.GATE_UP, 0, (INNER, HIDDEN)), (Matrix.GATE_UP, 1, (INNER, HIDDEN))]
        return [*heads, *inner, (Matrix.DOWN, 0, (HIDDEN, INNER))]

    def _random(self, shape: tuple[int, int]) -> ByteArray:
        values = np.random.default_rng(1).standard_normal(shape).astype(np.float32) * np.float32(0.04)
        source, source_kind = values.reshape(-1).view(np.uint8), NumericType.F32
        if self._kind in QUANTISED:
            from gguf import GGMLQuantizationType, quants

            source = quants.quantize(values, GGMLQuantizationType[self._kind.name]).reshape(-1)
            source_kind = self._kind
        data = aligned_bytes(self._library.packed_bytes(self._kind, *shape))
        self._library.pack(self._team, source, source_kind, self._kind, shape, data)
        return data


def decode(count: int, context: int) -> StepInputs:
    width = context // 16
    return StepInputs(
        tokens=np.arange(count, dtype=np.int64),
        starts=np.full(count, context - 1, dtype=np.int32),
        lengths=np.ones(count, dtype=np.int32),
        block_tables=np.arange(count * width, dtype=np.int32).reshape(count, width),
        samples=np.ones(count, dtype=np.bool_),
    )


def prefill(count: int) -> StepInputs:
    return StepInputs(
        tokens=np.arange(count, dtype=np.int64),
        starts=np.zeros(1, dtype=np.int32),
        lengths=np.array([count], dtype=np.int32),
        block_tables=np.arange(count // 16, dtype=np.int32)[None],
        samples=np.ones(1, dtype=np.bool_),
    )


def best(repeats: int, work: Callable[[], Any]) -> float:
    """Seconds of the fastest of these calls, after one that does not count."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    raise SystemExit(main())

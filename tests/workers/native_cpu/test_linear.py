"""Products with packed matrices: right, and the same bits for a row whatever rows are beside it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.workers.native_cpu.rig import PACKED_TYPES, pack, quantise, random_matrix
from workers.backends.native_cpu.errors import NativeCpuError
from workers.backends.native_cpu.library import QUANTISED, NativeLibrary, NumericType, Team, aligned_bytes

ROWS_AT_ONCE = (1, 2, 3, 5, 6, 7, 8, 15, 16, 17, 31, 32, 33, 47, 64, 65, 70)


def columns_of(kind: NumericType) -> int:
    return 512 if kind.name.endswith("_K") else 96


@pytest.mark.parametrize("kind", PACKED_TYPES, ids=lambda kind: kind.name)
def test_products_are_those_of_the_unpacked_matrix(library: NativeLibrary, team: Team, kind: NumericType) -> None:
    rng = np.random.default_rng(1)
    matrix = random_matrix(library, team, kind, (83, columns_of(kind)), rng)
    x = rng.standard_normal((70, columns_of(kind))).astype(np.float32)
    out = library.linear(team, kind, matrix.shape, matrix.data, x)
    exact = x.astype(np.float64) @ matrix.values.T.astype(np.float64)
    bound = np.abs(x).astype(np.float64) @ np.abs(matrix.values.T).astype(np.float64)
    # What activations are rounded to: bf16 with AMX, else fp32, or 16-bit integers beside quantised weights.
    unit = 2.0**-9 if library.isa == "amx" else 2.0**-14
    assert (np.abs(out - exact) <= unit * bound).all()


@pytest.mark.parametrize("kind", PACKED_TYPES, ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_in_any_company(
    library: NativeLibrary, team: Team, lone: Team, kind: NumericType
) -> None:
    rng = np.random.default_rng(2)
    matrix = random_matrix(library, team, kind, (83, columns_of(kind)), rng)
    x = rng.standard_normal((70, columns_of(kind))).astype(np.float32)
    together = library.linear(team, kind, matrix.shape, matrix.data, x)
    for count in ROWS_AT_ONCE:
        first = 70 - count
        for threads in (lone, team):
            part = library.linear(threads, kind, matrix.shape, matrix.data, x[first:])
            np.testing.assert_array_equal(part, together[first:], err_msg=f"{count} rows, {threads.threads} threads")


@pytest.mark.parametrize("columns", [1, 31, 40, 100])
@pytest.mark.parametrize("kind", [NumericType.BF16, NumericType.INT8], ids=lambda kind: kind.name)
def test_columns_need_not_fill_tiles(library: NativeLibrary, team: Team, kind: NumericType, columns: int) -> None:
    rng = np.random.default_rng(3)
    matrix = random_matrix(library, team, kind, (17, columns), rng)
    x = rng.standard_normal((5, columns)).astype(np.float32)
    out = library.linear(team, kind, matrix.shape, matrix.data, x)
    np.testing.assert_allclose(out, x @ matrix.values.T, atol=0.02)


@pytest.mark.parametrize("kind", sorted(QUANTISED), ids=lambda kind: kind.name)
def test_quantised_tensors_keep_their_values(library: NativeLibrary, team: Team, kind: NumericType) -> None:
    from gguf import GGMLQuantizationType, quants

    rng = np.random.default_rng(4)
    shape = (21, columns_of(kind))
    raw = quantise(rng.standard_normal(shape).astype(np.float32), kind, rng)
    meant = quants.dequantize(raw, GGMLQuantizationType[kind.name])
    np.testing.assert_array_equal(pack(library, team, raw, kind, kind, shape).values, meant)
    decoded = pack(library, team, raw, kind, NumericType.BF16, shape).values
    np.testing.assert_allclose(decoded, meant, rtol=2.0**-8)


@pytest.mark.parametrize("kind", [NumericType.F16, NumericType.BF16], ids=lambda kind: kind.name)
def test_bf16_matrices_are_made_from_half_precision(library: NativeLibrary, team: Team, kind: NumericType) -> None:
    values = np.random.default_rng(5).standard_normal((20, 40)).astype(np.float32)
    source = values.astype(np.float16) if kind is NumericType.F16 else (values.view(np.uint32) >> 16).astype(np.uint16)
    packed = pack(library, team, source, kind, NumericType.BF16, (20, 40))
    np.testing.assert_allclose(packed.values, values, rtol=2.0**-7, atol=1e-6)


def test_rows_can_be_put_in_another_order(library: NativeLibrary, team: Team) -> None:
    values = np.random.default_rng(6).standard_normal((20, 40)).astype(np.float32)
    order = np.random.default_rng(7).permutation(20).astype(np.int32)
    data = aligned_bytes(library.packed_bytes(NumericType.BF16, 20, 40))
    raw = values.reshape(-1).view(np.uint8)
    library.pack(team, raw, NumericType.F32, NumericType.BF16, (20, 40), data, order)
    rows = library.unpack_rows(NumericType.BF16, (20, 40), data, np.arange(20))
    np.testing.assert_allclose(rows, values[order], rtol=2.0**-8)


def test_what_is_not_finite_stays_so_and_reaches_no_other_row(library: NativeLibrary, team: Team) -> None:
    rng = np.random.default_rng(8)
    for kind in (NumericType.BF16, NumericType.INT8, NumericType.Q4_1):
        matrix = random_matrix(library, team, kind, (33, 96), rng)
        x = rng.standard_normal((9, 96)).astype(np.float32)
        before = library.linear(team, kind, matrix.shape, matrix.data, x)
        x[4, 50] = np.nan
        after = library.linear(team, kind, matrix.shape, matrix.data, x)
        assert np.isnan(after[4]).all()
        np.testing.assert_array_equal(np.delete(after, 4, axis=0), np.delete(before, 4, axis=0))


def test_a_shape_that_a_format_cannot_hold_is_refused(library: NativeLibrary) -> None:
    with pytest.raises(NativeCpuError, match="Q4_K cannot hold a matrix of 8 x 96"):
        library.packed_bytes(NumericType.Q4_K, 8, 96)

"""Bulk integers survive the trip exactly, and ragged ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.packing import PackingError, pack_u8, pack_u32, pack_u64, unpack_u8, unpack_u32, unpack_u64


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_u32_round_trip(values: list[int]) -> None:
    assert unpack_u32(pack_u32(values)).tolist() == values


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_u64_round_trip(values: list[int]) -> None:
    assert unpack_u64(pack_u64(values)).tolist() == values


@given(st.lists(st.integers(0, 255)))
def test_u8_round_trip(values: list[int]) -> None:
    assert unpack_u8(pack_u8(values)).tolist() == values


def test_the_bytes_are_little_endian_on_every_machine() -> None:
    assert pack_u32([1]) == b"\1\0\0\0"
    assert pack_u32(np.array([1], dtype=">u4")) == b"\1\0\0\0"


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_value_that_does_not_fit_is_an_error(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_u32([value])


def test_rows_have_their_columns() -> None:
    assert unpack_u32(pack_u32([1, 2, 3, 4]), 2).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(("data", "columns"), [(b"\0", 1), (b"\0" * 7, 1), (b"\0" * 4, 2)])
def test_a_ragged_field_is_refused(data: bytes, columns: int) -> None:
    with pytest.raises(PackingError):
        unpack_u32(data, columns)

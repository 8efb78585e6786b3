"""Logprob records keep ids, values and ranks exactly, minus infinity included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.logprobs import pack_records, prompt_records_of_chunk, record_size, unpack_records
from protocol.packing import PackingError


@given(st.integers(0, 20), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_records_come_back_as_they_were_sent(alternatives: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = rng.integers(1, 2**32, count, dtype=np.uint32)
    ids = rng.integers(0, 2**32, (count, 1 + alternatives), dtype=np.uint32)
    logprobs = -rng.random((count, 1 + alternatives), dtype=np.float32)
    logprobs[:, -1:] = -np.inf
    data = pack_records(ranks, ids, logprobs, alternatives)
    assert len(data) == count * record_size(alternatives)
    records = unpack_records(data, alternatives)
    np.testing.assert_array_equal(records["rank"], ranks)
    np.testing.assert_array_equal(records["pairs"]["id"], ids)
    np.testing.assert_array_equal(records["pairs"]["logprob"], logprobs)


def test_a_ragged_length_is_refused() -> None:
    with pytest.raises(PackingError):
        unpack_records(b"\0" * (record_size(2) + 1), 2)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 12))
def test_chunks_judge_every_prompt_token_but_the_first_exactly_once(lengths: list[int], resumed: int) -> None:
    """However a sequence of prompt and resumed output is cut into chunks."""
    total = sum(lengths)
    prompt_len = max(1, total - resumed)
    starts = np.cumsum([0, *lengths[:-1]])
    counts = [
        prompt_records_of_chunk(int(start), length, prompt_len) for start, length in zip(starts, lengths, strict=True)
    ]
    judged = [int(start) + 1 + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
    assert judged == list(range(1, prompt_len))

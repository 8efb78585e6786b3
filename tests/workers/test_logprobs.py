"""Records of raw logits: right values, ranks and order, the same bits for a row in any company."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.logprobs import record_size, unpack_records
from tests.workers.model_rig import DEVICES
from workers.logprobs import largest, token_records

pytestmark = pytest.mark.usefixtures("one_thread")


def records(logits: npt.NDArray[np.float32], tokens: list[int], alternatives: list[int], device: str = "cpu"):
    return token_records(
        torch.from_numpy(logits).to(device),
        np.array(tokens, dtype=np.int32),
        np.array(alternatives, dtype=np.int64),
    )


def order_of(row: npt.NDArray[np.float32]) -> list[int]:
    """Ids by falling logit, equals by the lower id."""
    return sorted(range(len(row)), key=lambda token: (-float(row[token]), token))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 70),
    vocab=st.integers(1, 60),
    levels=st.sampled_from([0, 1, 3]),
    hidden=st.floats(0, 0.9),
    data=st.data(),
)
def test_a_record_says_what_the_softmax_says(seed, rows, vocab, levels, hidden, data) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    if levels:  # many ties
        logits = np.round(logits * levels).astype(np.float32) / np.float32(levels) + np.float32(0.0)
    logits[rng.random((rows, vocab)) < hidden] = -np.inf
    logits[:, rng.integers(vocab)] = 1.0  # something is possible
    tokens = rng.integers(0, vocab, rows).tolist()
    alternatives = data.draw(st.lists(st.integers(0, min(20, vocab)), min_size=rows, max_size=rows))
    found, sound = records(logits, tokens, alternatives)
    assert sound.all() and len(found) == rows
    for row, token, shown, data_of_row in zip(logits, tokens, alternatives, found, strict=True):
        assert len(data_of_row) == record_size(shown)
        (record,) = unpack_records(data_of_row, shown)
        order = order_of(row)
        assert record["rank"] == 1 + order.index(token)
        assert record["pairs"]["id"].tolist() == [token, *order[:shown]]
        total = math.log(np.exp(row.astype(np.float64)).sum())
        expected = row.astype(np.float64)[record["pairs"]["id"]] - total
        np.testing.assert_allclose(record["pairs"]["logprob"], expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_rows_record_has_the_same_bits_alone_and_in_company(device: str) -> None:
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((70, 49_157)) * 4).astype(np.float32)
    tokens, alternatives = rng.integers(0, 49_157, 70).tolist(), [row % 21 for row in range(70)]
    together, _ = records(logits, tokens, alternatives, device)
    for row in (0, 1, 20, 31, 32, 63, 69):
        alone, _ = records(logits[row : row + 1], tokens[row : row + 1], alternatives[row : row + 1], device)
        assert alone == [together[row]]
    shuffled, _ = records(logits[::-1].copy(), tokens[::-1], alternatives[::-1], device)
    assert shuffled == together[::-1]


@pytest.mark.parametrize("device", DEVICES)
def test_the_largest_of_equals_are_those_with_the_lowest_ids(device: str) -> None:
    rows = torch.zeros(4, 5000, device=device)
    rows[1, 4000:4030] = 1.0
    rows[2, [4999, 17]] = 2.0
    rows[3] = -torch.inf
    assert largest(rows, 20).tolist() == [
        [*range(20)],
        [*range(4000, 4020)],
        [17, 4999, *range(17), 18],
        [*range(20)],
    ]
    assert largest(rows, 0).shape == (4, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_numbers_that_are_none_are_told_apart_by_row(device: str, poison: float) -> None:
    logits = np.random.default_rng(1).standard_normal((40, 50)).astype(np.float32)
    clean, _ = records(logits, [3] * 40, [2] * 40, device)
    logits[[4, 35], 7] = poison
    found, sound = records(logits, [3] * 40, [2] * 40, device)
    assert np.flatnonzero(~sound).tolist() == [4, 35]
    assert [each for row, each in enumerate(found) if row not in (4, 35)] == [
        each for row, each in enumerate(clean) if row not in (4, 35)
    ]

"""The native sampler draws what the torch one draws, whatever is asked for, and tells the same logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.logprobs import unpack_records
from protocol.packing import BIAS, pack_u32
from protocol.requests import Sampling
from protocol.worker import RowStatus
from tests.workers.native_rig import native_library
from workers.backends.native_cpu.library import NativeLibrary, Team
from workers.backends.native_cpu.sampler import NativeSampler
from workers.sampler import Sampler
from workers.sampling import Sampled
from workers.slots import PoolShape, SlotParameters, SlotTable

pytestmark = pytest.mark.usefixtures("one_thread")

SLOTS = 6
LENGTH = 40
Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    return native_library()


@pytest.fixture(scope="module", params=[1, 3])
def team(request: pytest.FixtureRequest, library: NativeLibrary) -> Iterator[Team]:
    team = Team(library, request.param)
    yield team
    team.close()


class Draws:
    """One batch of rows, drawn by either sampler."""

    def __init__(self, logits: Logits, samplings: list[Sampling], rng: np.random.Generator) -> None:
        rows, vocab = logits.shape
        self.logits = logits
        self.slots = rng.permutation(SLOTS)[:rows].astype(np.int32)
        self.table = SlotTable(PoolShape(8, 16, SLOTS, 64, 1, vocab, LENGTH))
        for slot, sampling in zip(self.slots.tolist(), samplings, strict=True):
            length = int(rng.integers(1, LENGTH))
            self.table.tokens[slot, :length] = rng.integers(0, min(vocab, 12), length)
            self.table.length[slot] = length
            self.table.prompt_len[slot] = rng.integers(1, length + 1)
            stops = rng.integers(0, vocab + 3, 2).astype(np.int32)
            self.table.parameters[slot] = SlotParameters(int(rng.integers(2**64, dtype=np.uint64)), sampling, stops)

    def by_torch(self) -> Sampled:
        sampler = Sampler(SLOTS, self.logits.shape[1], torch.device("cpu"))
        sampler.add(self.slots, self.table)
        return sampler.sample(
            torch.from_numpy(self.logits.copy()), self.slots, self.table.length[self.slots], self.table
        )

    def by_native(self, library: NativeLibrary, team: Team, rows: slice = slice(None)) -> Sampled:
        sampler = NativeSampler(library, team, SLOTS, self.logits.shape[1])
        slots = self.slots[rows]
        sampler.add(slots, self.table)
        drawn = sampler.sample(self.logits[rows].copy(), slots, self.table.length[slots], self.table)
        sampler.close()
        return drawn


def biases(rng: np.random.Generator, vocab: int) -> bytes:
    ids = rng.permutation(vocab + 2)[: min(vocab, 5)]
    pairs = np.empty(len(ids), dtype=BIAS)
    pairs["id"], pairs["bias"] = ids, rng.standard_normal(len(ids)) * 4
    return pairs.tobytes()


@st.composite
def samplings(draw: st.DrawFn, vocab: int) -> Sampling:
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    fields: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 0.3, 1.0, 1.7, 20.0])),
        "top_k": draw(st.sampled_from([0, 1, 7, 50, vocab, vocab + 5])),
        "top_p": draw(st.sampled_from([1.0, 0.95, 0.6, 0.05])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.02, 0.4])),
        "logprobs": draw(st.sampled_from([-1, 0, 3, 20])),
    }
    if fields["logprobs"] > vocab:
        fields["logprobs"] = vocab
    if draw(st.booleans()):
        fields |= {
            "presence_penalty": draw(st.sampled_from([0.0, 0.5, -1.2])),
            "frequency_penalty": draw(st.sampled_from([0.0, 0.3, -0.4])),
            "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.7])),
            "min_tokens": draw(st.sampled_from([0, 10, 100])),
        }
    if draw(st.integers(0, 3)) == 0:
        fields["logit_bias"] = biases(rng, vocab)
    if draw(st.integers(0, 3)) == 0:
        fields["allowed_ids"] = pack_u32(rng.permutation(vocab + 2)[: int(rng.integers(1, vocab + 2))])
    if draw(st.integers(0, 3)) == 0:
        words = [rng.integers(0, min(vocab, 12), int(rng.integers(1, 4))) for _ in range(4)]
        fields["bad_words"] = tuple(pack_u32(word) for word in words)
    return Sampling(**fields)


def some_logits(rng: np.random.Generator, rows: int, vocab: int, levels: int, hidden: float) -> Logits:
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    if levels:  # many ties
        logits = np.round(logits * levels).astype(np.float32) / np.float32(levels) + np.float32(0.0)
    logits[rng.random((rows, vocab)) < hidden] = -np.inf
    return logits


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_ids_statuses_and_logprobs_are_those_of_the_torch_sampler(
    library: NativeLibrary, team: Team, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    rows, vocab = data.draw(st.integers(1, SLOTS)), data.draw(st.sampled_from([1, 5, 16, 17, 300, 1111, 5000]))
    logits = some_logits(
        rng, rows, vocab, data.draw(st.sampled_from([0, 0, 4])), data.draw(st.sampled_from([0.0, 0.5]))
    )
    if data.draw(st.integers(0, 5)) == 0:
        logits[rng.integers(rows), rng.integers(vocab)] = data.draw(st.sampled_from([np.nan, np.inf]))
    draws = Draws(logits, [data.draw(samplings(vocab)) for _ in range(rows)], rng)
    expected, found = draws.by_torch(), draws.by_native(library, team)
    assert found.status.tolist() == expected.status.tolist()
    sound = found.status == RowStatus.OK
    assert found.ids[sound].tolist() == expected.ids[sound].tolist()
    for row in np.flatnonzero(sound).tolist():
        compare_records(draws, row, expected.logprobs[row], found.logprobs[row])


def compare_records(draws: Draws, row: int, expected: bytes, found: bytes) -> None:
    parameters = draws.table.parameters[draws.slots[row]]
    assert parameters is not None
    shown = parameters.sampling.logprobs
    assert len(found) == len(expected)
    if shown < 0:
        return
    (one,), (other,) = unpack_records(found, shown), unpack_records(expected, shown)
    assert one["rank"] == other["rank"]
    assert one["pairs"]["id"].tolist() == other["pairs"]["id"].tolist()
    np.testing.assert_allclose(one["pairs"]["logprob"], other["pairs"]["logprob"], rtol=1e-5, atol=2e-6)


def test_a_row_has_the_same_bytes_alone_and_in_company(library: NativeLibrary, team: Team) -> None:
    rng = np.random.default_rng(3)
    asked = [
        Sampling(temperature=0.0, logprobs=20),
        Sampling(logprobs=5),
        Sampling(top_p=0.9, logprobs=2, frequency_penalty=0.5),
        Sampling(top_k=900, top_p=0.99, temperature=5.0),
        Sampling(min_p=0.01, temperature=2.0, logprobs=0),
        Sampling(logit_bias=biases(rng, 5000), temperature=0.7),
    ]
    draws = Draws(some_logits(rng, SLOTS, 5000, 0, 0.0), asked, rng)
    together = draws.by_native(library, team)
    for row in range(SLOTS):
        alone = draws.by_native(library, team, slice(row, row + 1))
        assert (alone.ids[0], alone.logprobs[0]) == (together.ids[row], together.logprobs[row])


@pytest.mark.parametrize("parameters", [{"top_p": 0.97}, {"top_k": 3000}, {"top_k": 3000, "top_p": 0.9}, {}])
def test_a_wide_support_is_drawn_from_whole(library: NativeLibrary, team: Team, parameters: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    logits = np.zeros((SLOTS, 5000), dtype=np.float32)
    logits[:, ::2] = 0.5
    for _ in range(20):
        draws = Draws(logits, [Sampling(**parameters)] * SLOTS, rng)
        assert draws.by_native(library, team).ids.tolist() == draws.by_torch().ids.tolist()


def test_prompt_records_are_those_of_the_torch_sampler(library: NativeLibrary, team: Team) -> None:
    rng = np.random.default_rng(8)
    logits = some_logits(rng, 70, 900, 3, 0.2)
    logits[:, 7] = 1.0
    logits[4, 5], logits[9, 800] = np.nan, np.inf
    tokens, shown = rng.integers(0, 900, 70).astype(np.int32), rng.integers(0, 21, 70)
    sampler = NativeSampler(library, team, SLOTS, 900)
    found, sound = sampler.token_records(logits, tokens, shown)
    sampler.close()
    expected, expected_sound = Sampler(SLOTS, 900, torch.device("cpu")).token_records(
        torch.from_numpy(logits), tokens, shown
    )
    assert sound.tolist() == expected_sound.tolist() and sound.sum() == 68
    for row in np.flatnonzero(sound).tolist():
        (one,), (other,) = unpack_records(found[row], int(shown[row])), unpack_records(expected[row], int(shown[row]))
        assert one["rank"] == other["rank"] and one["pairs"]["id"].tolist() == other["pairs"]["id"].tolist()
        np.testing.assert_allclose(one["pairs"]["logprob"], other["pairs"]["logprob"], rtol=1e-5, atol=2e-6)

"""Sampling: which tokens may come, which comes for a seed, and how often each comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.requests import Sampling
from protocol.worker import RowStatus
from tests.workers.model_rig import DEVICES
from workers import noise
from workers.sampler import Sampled, Sampler, _draw_from_all
from workers.slots import PoolShape, SlotParameters, SlotTable

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 64
SLOTS = 8


@dataclass(frozen=True)
class Row:
    """One sampling row: its logits, its tokens so far, its parameters."""

    logits: npt.NDArray[np.float32]
    sampling: Sampling
    seed: int = 0
    tokens: tuple[int, ...] = (1, 2, 3)
    prompt_len: int = 3
    stop_ids: tuple[int, ...] = ()


def sample(rows: list[Row], device: str = "cpu", slots: list[int] | None = None) -> Sampled:
    """Sample these rows as one batch, in the slots given."""
    vocab = len(rows[0].logits)
    shape = PoolShape(
        num_blocks=8,
        block_size=16,
        max_slots=max(SLOTS, len(rows)),
        max_tokens_per_step=64,
        max_ids_per_row=1,
        vocab_size=vocab,
        context=64,
    )
    table = SlotTable(shape)
    where = np.array(slots or range(len(rows)), dtype=np.int32)
    for slot, row in zip(where, rows, strict=True):
        table.tokens[slot, : len(row.tokens)] = row.tokens
        table.length[slot], table.prompt_len[slot] = len(row.tokens), row.prompt_len
        table.parameters[slot] = SlotParameters(row.seed, row.sampling, np.array(row.stop_ids, dtype=np.int32))
    sampler = Sampler(shape.max_slots, vocab, torch.device(device))
    sampler.add(where, table)
    logits = torch.from_numpy(np.stack([row.logits for row in rows])).to(device)
    return sampler.sample(logits, where, table.length[where], table)


def draws(logits: npt.NDArray[np.float32], count: int, **parameters: Any) -> npt.NDArray[np.int64]:
    """How often each token comes over seeds 0 … count - 1, as [vocab]."""
    rows = [Row(logits, Sampling(**parameters), seed=seed) for seed in range(count)]
    return np.bincount(sample(rows).ids, minlength=len(logits))


def oracle_support(logits: npt.NDArray[np.float32], sampling: Sampling) -> set[int]:
    """Tokens that temperature, min_p, top_k and top_p leave, in float64 and plain steps."""
    scaled = logits.astype(np.float64) / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    p = np.where(p >= sampling.min_p * p.max(), p, 0.0)
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(p[token] for token in order)
    kept: set[int] = set()
    mass = 0.0
    for token in order:
        if p[token] > 0 and (not kept or mass < sampling.top_p * total or sampling.top_p == 1):
            kept.add(token)
        mass += p[token]
    return kept


def some_logits(seed: int = 0, vocab: int = VOCAB, spread: float = 2.0) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_temperature_zero_is_the_argmax_and_ties_go_to_the_lowest_id(device: str) -> None:
    logits = some_logits()
    logits[[9, 30, 50]] = 20.0
    result = sample([Row(logits, Sampling(temperature=0.0))], device)
    assert (result.ids.tolist(), result.status.tolist()) == ([9], [RowStatus.OK])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "parameters", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 30, "top_p": 0.8, "temperature": 1.3}]
)
def test_a_draw_depends_on_its_own_row_alone(parameters: dict[str, Any], device: str) -> None:
    rows = [Row(some_logits(seed), Sampling(**parameters), seed=seed) for seed in range(SLOTS)]
    together = sample(rows, device).ids
    assert len(set(together.tolist())) > 2
    assert sample(rows[::-1], device).ids.tolist() == together[::-1].tolist()
    for index, row in enumerate(rows):
        assert sample([row], device, slots=[SLOTS - 1 - index]).ids[0] == together[index]


def test_a_draw_depends_on_the_seed_and_on_the_position() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    by_seed = {int(sample([Row(logits, Sampling(), seed=seed)]).ids[0]) for seed in range(20)}
    by_position = {int(sample([Row(logits, Sampling(), tokens=(1,) * length)]).ids[0]) for length in range(3, 23)}
    assert len(by_seed) > 10 and len(by_position) > 10


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    levels=st.sampled_from([0, 4]),
)
def test_only_tokens_of_the_support_come(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, levels: int
) -> None:
    logits = some_logits(seed)
    if levels:  # many ties
        logits = np.round(logits * levels) / np.float32(levels)
    parameters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    support = oracle_support(logits, Sampling(**parameters))
    # A boundary that float32 cannot tell from one side or the other may fall on either.
    wider = oracle_support(logits, Sampling(**{**parameters, "top_p": min(1.0, top_p + 1e-5), "min_p": min_p * 0.9999}))
    counts = draws(logits, 100, **parameters)
    assert set(np.flatnonzero(counts).tolist()) <= support | wider


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
        {"top_k": 1},
        {"temperature": 1e-3},
    ],
)
def test_every_token_of_the_support_comes(parameters: dict[str, Any]) -> None:
    logits = some_logits(spread=1.0)
    counts = draws(logits, 4000, **parameters)
    assert set(np.flatnonzero(counts).tolist()) == oracle_support(logits, Sampling(**parameters)) or (
        parameters.get("temperature") == 1e-3 and set(np.flatnonzero(counts)) == {int(logits.argmax())}
    )


@pytest.mark.parametrize(
    "parameters", [{}, {"temperature": 0.7}, {"temperature": 2.0, "top_k": 10}, {"top_p": 0.7}, {"min_p": 0.1}]
)
def test_tokens_come_as_often_as_their_probability_says(parameters: dict[str, Any]) -> None:
    logits, count = some_logits(vocab=24, spread=1.0), 6000
    support = sorted(oracle_support(logits, Sampling(**parameters)))
    p = np.exp(logits[support].astype(np.float64) / parameters.get("temperature", 1.0))
    expected = p / p.sum() * count
    counts = draws(logits, count, **parameters)[support]
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = len(support) - 1
    assert counts.sum() == count
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)  # about one in ten thousand, and the seeds are fixed


def test_the_support_is_found_beyond_the_largest_thousand() -> None:
    logits = np.zeros(5000, dtype=np.float32)
    logits[::2] = 0.5
    for parameters in ({"top_p": 0.95}, {"top_k": 3000}, {"top_k": 3000, "top_p": 0.9}, {"top_k": 1024}):
        support = oracle_support(logits, Sampling(**parameters))
        found = set(np.flatnonzero(draws(logits, 60, **parameters)).tolist())
        assert found <= support
        assert len(found) > 40


def test_ties_of_the_rough_noise_are_decided_by_the_exact_one() -> None:
    tokens = torch.arange(4096, dtype=torch.int32)
    keys = torch.from_numpy(noise.keys(np.arange(6, dtype=np.uint64), np.arange(6)))
    exact = noise.gumbel(noise.uniform(keys, tokens))
    # Logits that undo the noise but for less than the roughness: more than the finalists are within it.
    jitter = torch.rand(exact.shape, generator=torch.Generator().manual_seed(0)) * noise.ROUGHNESS
    for logits in (jitter - exact, torch.zeros_like(exact)):
        assert torch.equal(_draw_from_all(logits, keys, tokens), (logits + exact).argmax(dim=-1))


def test_penalties_follow_openai_and_ctrl() -> None:
    logits = np.full(VOCAB, -5.0, dtype=np.float32)
    logits[[10, 11, 12, 13]] = 4.0, 3.9, 3.0, 2.5
    tokens = (10, 13, 11, 11, 12)  # prompt 10 13, output 11 11 12

    def best(**penalties: float) -> int:
        row = Row(logits, Sampling(temperature=0.0, **penalties), tokens=tokens, prompt_len=2)
        return int(sample([row]).ids[0])

    assert best() == 10
    assert best(presence_penalty=2.0, frequency_penalty=2.0) == 10  # the prompt is not penalised by these
    assert best(repetition_penalty=1.5) == 10  # 2.67, 2.6, 2.0, 1.67: all four alike
    assert best(repetition_penalty=100.0) == 10  # 0.04 is still above -5 and its neighbours
    assert best(presence_penalty=-0.2) == 11
    assert best(frequency_penalty=-0.06) == 11  # twice 0.06
    assert best(frequency_penalty=-1.1) == 11 and best(frequency_penalty=-0.04) == 10


def test_repetition_multiplies_what_is_negative() -> None:
    logits = np.full(VOCAB, -2.0, dtype=np.float32)
    logits[:4] = -1.0, -1.0, -1.0, -1.5
    row = Row(logits, Sampling(temperature=0.0, repetition_penalty=1.6), tokens=(0, 1, 2), prompt_len=3)
    assert sample([row]).ids.tolist() == [3]


def test_stop_ids_do_not_come_before_min_tokens() -> None:
    logits = some_logits()
    logits[7], logits[8] = 30.0, 29.0
    for output, expected in ((0, 8), (2, 8), (3, 7)):
        row = Row(
            logits,
            Sampling(temperature=0.0, min_tokens=3),
            tokens=(1, 2) + (5,) * output,
            prompt_len=2,
            stop_ids=(7, VOCAB + 5),
        )
        assert sample([row]).ids.tolist() == [expected]


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_that_cannot_be_sampled_fails_alone(device: str) -> None:
    broken, infinite, empty = some_logits(1), some_logits(2), np.full(VOCAB, -np.inf, dtype=np.float32)
    broken[40], infinite[3] = np.nan, np.inf
    good = Row(some_logits(3), Sampling(), seed=6)
    rows = [Row(broken, Sampling()), good, Row(empty, Sampling()), Row(infinite, Sampling(temperature=0.0))]
    result = sample(rows, device)
    assert result.status.tolist() == [RowStatus.NAN, RowStatus.OK, RowStatus.EMPTY_SUPPORT, RowStatus.NAN]
    assert result.ids[1] == sample([good], device).ids[0]


def test_suppressing_every_token_leaves_no_support() -> None:
    row = Row(some_logits(), Sampling(min_tokens=9), tokens=(1,), prompt_len=1, stop_ids=tuple(range(VOCAB)))
    assert sample([row]).status.tolist() == [RowStatus.EMPTY_SUPPORT]


def test_no_rows_give_no_ids() -> None:
    sampler = Sampler(SLOTS, VOCAB, torch.device("cpu"))
    nothing = np.zeros(0, dtype=np.int32)
    shape = PoolShape(1, 16, SLOTS, 8, 1, VOCAB, 16)
    assert not len(sampler.sample(torch.zeros(0, VOCAB), nothing, nothing, SlotTable(shape)).ids)

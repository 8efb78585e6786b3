"""Biases, allowed ids and bad words: what may come and what comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.logprobs import record_size, unpack_records
from protocol.packing import BIAS, pack_u32
from protocol.requests import Sampling
from protocol.worker import RowStatus
from tests.workers.model_rig import DEVICES
from tests.workers.test_sampler import SLOTS, VOCAB, Row, sample, some_logits
from workers.logit_control import LogitControl

pytestmark = pytest.mark.usefixtures("one_thread")


def control(
    bias: dict[int, float] | None = None,
    allowed: list[int] | None = None,
    bad: list[list[int]] | None = None,
    **more: Any,
) -> Sampling:
    return Sampling(
        logit_bias=np.array(list((bias or {}).items()), dtype=BIAS).tobytes(),
        allowed_ids=pack_u32(allowed or []),
        bad_words=tuple(pack_u32(word) for word in bad or []),
        **more,
    )


ids = st.integers(0, VOCAB - 1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    bias=st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=8),
    allowed=st.lists(ids, max_size=12),
    bad=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=8),
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    stops=st.lists(ids, max_size=3),
    presence=st.sampled_from([0.0, 1.5]),
)
def test_greedy_is_the_best_of_what_is_left(seed, bias, allowed, bad, tokens, stops, presence) -> None:
    logits = some_logits(seed)
    prompt_len = 1 + seed % len(tokens)
    expected = logits.copy()
    for token, value in bias.items():
        expected[token] += np.float32(value)
    for token in range(VOCAB):
        forbidden = any(word[-1] == token and ([*tokens, token])[-len(word) :] == word for word in bad)
        if (allowed and token not in allowed) or (token in stops) or forbidden:
            expected[token] = -np.inf
        if token in tokens[prompt_len:]:
            expected[token] -= np.float32(presence)
    row = Row(
        logits,
        control(bias, allowed, bad, temperature=0.0, min_tokens=50, presence_penalty=presence),
        tokens=tuple(tokens),
        prompt_len=prompt_len,
        stop_ids=tuple(stops),
    )
    result = sample([row])
    if np.isneginf(expected).all():
        assert result.status.tolist() == [RowStatus.EMPTY_SUPPORT]
    else:
        assert result.ids.tolist() == [int(expected.argmax())]
    company = [Row(some_logits(seed + 1), Sampling()), row, Row(some_logits(seed + 2), control({3: 50.0}))]
    together = sample(company)
    assert (together.ids[1], together.status[1]) == (result.ids[0], result.status[0]) or result.status[0]
    assert sample([company[0]]).ids[0] == together.ids[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parameters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 2.0}])
def test_draws_stay_within_what_is_allowed_and_not_bad(parameters: dict[str, Any], device: str) -> None:
    sampling = control({9: -100.0, 40: 2.0}, [3, 9, 22, 40], [[22], [1, 2, 3, 40]], **parameters)
    rows = [Row(some_logits(seed, spread=1.0), sampling, seed=seed) for seed in range(60)]
    result = sample(rows, device)
    assert (result.status == RowStatus.OK).all()
    assert set(result.ids.tolist()) == {3}, "9 is all but impossible, 22 bad, 40 would complete 1 2 3 40"
    rows = [Row(row.logits, row.sampling, row.seed, tokens=(2, 1, 3)) for row in rows]
    assert set(sample(rows, device).ids.tolist()) == {3, 40} or parameters


def test_a_bad_word_may_begin_in_the_prompt_and_its_start_alone_is_not_bad() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[8, 7, 6]] = 3.0, 2.0, 1.0

    def best(tokens: tuple[int, ...], prompt_len: int) -> int:
        sampling = control(bad=[[5, 8], [4, 5, 7]], temperature=0.0)
        return int(sample([Row(logits, sampling, 0, tokens, prompt_len)]).ids[0])

    assert best((1, 5), 2) == 7
    assert best((1, 5), 1) == 7
    assert best((4, 5), 1) == 6
    assert best((5,), 1) == 7
    assert best((4,), 1) == 8
    assert best((5, 1), 1) == 8


def test_a_slot_forgets_the_control_of_its_last_sequence() -> None:
    controls = LogitControl(SLOTS, VOCAB, torch.device("cpu"))
    controls.fill(2, control({1: 5.0}, [1, 2], [[3]]))
    controls.fill(2, Sampling())
    logits = torch.zeros(1, VOCAB)
    controls.bias_and_allow(logits, np.array([2], dtype=np.int32))
    assert not logits.any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_a_mask_hides_does_not_pass_for_sound(poison: float) -> None:
    logits = some_logits()
    logits[50] = poison
    rows = [Row(logits, control(allowed=[1, 2])), Row(some_logits(), control(allowed=[1, 2]))]
    assert sample(rows).status.tolist() == [RowStatus.NAN, RowStatus.OK]


def test_biases_that_overflow_fail_their_row_alone() -> None:
    logits = some_logits()
    logits[5] = 3e38
    rows = [Row(logits, control({5: 3e38})), Row(some_logits(), Sampling(), seed=4)]
    result = sample(rows)
    assert result.status.tolist() == [RowStatus.NAN, RowStatus.OK]
    assert result.ids[1] == sample(rows[1:]).ids[0]


@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_are_those_of_the_logits_before_anything_changes_them(device: str) -> None:
    logits = some_logits(spread=1.0)
    plain = Sampling(temperature=0.0, logprobs=20)
    changed = control(
        {7: 100.0}, [7, 8], temperature=0.0, logprobs=20, presence_penalty=1.0, repetition_penalty=1.3, min_tokens=9
    )
    rows = [Row(logits, plain), Row(logits, changed, stop_ids=(8,)), Row(logits, Sampling()), Row(logits, changed)]
    result = sample(rows, device)
    assert [len(each) for each in result.logprobs] == [record_size(20), record_size(20), 0, record_size(20)]
    raw, biased = (unpack_records(result.logprobs[row], 20)[0] for row in (0, 1))
    assert raw["pairs"][1:].tolist() == biased["pairs"][1:].tolist()
    assert (result.ids[1], biased["pairs"]["id"][0]) == (7, 7)
    exact = logits.astype(np.float64)
    assert biased["pairs"]["logprob"][0] == pytest.approx(exact[7] - np.log(np.exp(exact).sum()), abs=2e-6)
    assert biased["rank"] == 1 + (logits > logits[7]).sum()

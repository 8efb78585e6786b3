"""Made-up logprobs look like a model's, and are the same however a sequence is cut into steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.logprobs import pack_records
from protocol.packing import pack_u32
from protocol.worker import Plan
from tests.workers.hand_driven import slot_add
from workers.engine import Engine, EngineDescription
from workers.script import ScriptEntry, ScriptLine
from workers.scripted import ScriptedEngine
from workers.simulated import SimulatedEngine, StepTimes
from workers.slots import PoolShape, SlotTable
from workers.synthetic_logprobs import prompt_key_of, synthetic_record


@settings(max_examples=300, deadline=None)
@given(
    key=st.integers(0, 2**64 - 1),
    place=st.integers(0, 2**20),
    vocab=st.sampled_from([21, 22, 30, 260, 49152]),
    alternatives=st.integers(0, 20),
    data=st.data(),
)
def test_a_record_is_one_of_a_distribution(key, place, vocab, alternatives, data) -> None:
    token = data.draw(st.integers(0, vocab - 1))
    rank, (own, *top) = synthetic_record(key, place, token, alternatives, vocab)
    assert own[0] == token and len(top) == alternatives
    ids, values = [each for each, _ in top], [value for _, value in top]
    assert len(set(ids)) == len(ids) and all(0 <= each < vocab for each in ids)
    assert sorted(top, key=lambda pair: (-pair[1], pair[0] if math.isinf(pair[1]) else 0)) == top
    assert sum(math.exp(value) for value in values) < 1 and math.exp(own[1]) < 1
    if rank <= alternatives:
        assert top[rank - 1] == own
    else:
        assert token not in ids and (not top or own[1] <= values[-1])
    assert 1 <= rank <= vocab
    assert synthetic_record(key, place, token, 20, vocab)[1][1 : 1 + alternatives] == top, "more only adds to the end"


def test_minus_infinity_comes_now_and_then_for_alternatives_and_for_the_token() -> None:
    records = [synthetic_record(7, place, 5, 5, 260) for place in range(400)]
    assert 50 < sum(any(math.isinf(value) for _, value in pairs) for _, pairs in records) < 150
    own = [math.isinf(pairs[0][1]) for _, pairs in records]
    assert 10 < sum(own) < 60
    assert {rank for rank, _ in records} >= {1, 2, 3}
    assert any(20 < rank <= 40 for rank, pairs in records if not math.isinf(pairs[0][1]))
    for rank, pairs in records:
        if math.isinf(pairs[0][1]):
            finite = [each for each, value in pairs[1:] if not math.isinf(value)]
            assert rank == 1 + len(finite) + sum(each not in finite for each in range(5)), "ties by the lower id"


SHAPE = PoolShape(
    num_blocks=8, block_size=16, max_slots=2, max_tokens_per_step=64, max_ids_per_row=3, vocab_size=300, context=64
)
DESCRIPTION = EngineDescription(SHAPE, b"", b"", "")
ENTRY = ScriptEntry(ScriptLine(text="", step_sizes=[3, 1, 2]), [*range(40, 60)], 257)
SEED = 77


def scripted() -> tuple[Engine, int]:
    return ScriptedEngine(DESCRIPTION, (ENTRY,), str), ENTRY.logprob_key


def simulated() -> tuple[Engine, int]:
    vocabulary = np.arange(100, 150, dtype=np.int32)
    engine = SimulatedEngine(DESCRIPTION, StepTimes(c0=0, ids_per_row=3), vocabulary, sleep=lambda _: None)
    return engine, SEED


def expected(key: int, first: int, tokens: list[int], alternatives: int) -> bytes:
    made = [synthetic_record(key, first + n, token, alternatives, 300) for n, token in enumerate(tokens)]
    ids = np.array([[each for each, _ in pairs] for _, pairs in made], dtype=np.int64).reshape(-1, 1 + alternatives)
    values = np.array([[value for _, value in pairs] for _, pairs in made]).reshape(-1, 1 + alternatives)
    return pack_records(np.array([rank for rank, _ in made], dtype=np.int64), ids, values, alternatives)


@pytest.mark.parametrize("make", [scripted, simulated])
@pytest.mark.parametrize("chunks", [[9], [1, 8], [4, 4, 1], [3, 3, 3]])
@pytest.mark.parametrize("resumed", [0, 2])
def test_an_engines_records_do_not_depend_on_chunks_company_or_resume(make, chunks, resumed) -> None:
    engine, key = make()
    table = SlotTable(SHAPE)
    prompt = list(range(9 - resumed))
    tokens = [*prompt, *range(resumed)]
    prompt_logprobs, logprobs, ids = b"", b"", []
    mate = slot_add(1, [5, 6, 7], seed=3, logprobs=0, prompt_logprobs=0)
    for step, chunk in enumerate([*chunks, 0, 0, 0]):
        adds = (slot_add(0, tokens, len(prompt), SEED, logprobs=4, prompt_logprobs=2),) if step == 0 else ()
        adds += (mate,) if step == 1 else ()
        blocks = [(add.slot, add.slot * 4 + n) for add in adds for n in range(4)]
        pairs = [(0, chunk)] * (chunk > 0) + [(1, 3)] * (step == 1)
        plan = Plan(1, 1, step, adds=adds, blocks=pack_u32(np.array(blocks)), chunks=pack_u32(np.array(pairs)))
        batch = table.apply(plan)
        results = engine.execute(batch, table)
        table.commit(batch, results.counts, results.ids, np.ones(len(batch.slots), dtype=np.bool_))
        row = int(np.flatnonzero(batch.slots == 0)[0])
        mine, others = int(results.counts[row]), int(results.counts.sum()) - int(results.counts[row])
        before = int(results.counts[:row].sum())
        ids += results.ids[before : before + mine].tolist()
        size = len(expected(0, 0, [1], 4))
        skipped = len(expected(0, 0, [1], 0)) * before
        logprobs += results.logprobs[skipped : skipped + size * mine]
        assert len(results.logprobs) == size * mine + len(expected(0, 0, [1], 0)) * others
        of_mate = len(expected(0, 0, [1, 1], 0)) * (step == 1)  # its chunk is the last row
        prompt_logprobs += results.prompt_logprobs[: len(results.prompt_logprobs) - of_mate]
    assert logprobs == expected(key, resumed, ids, 4) and len(ids) > 3
    assert prompt_logprobs == expected(prompt_key_of(key), 1, prompt[1:], 2)

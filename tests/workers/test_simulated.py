"""A simulated engine takes the time its model says and returns ids that depend on seed and position alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.packing import pack_u32
from protocol.worker import Plan
from tests.workers.hand_driven import slot_add
from workers.engine import EngineDescription
from workers.script import ScriptError
from workers.simulated import SimulatedEngine, StepTimes, load_step_times, simulated_ids
from workers.slots import PoolShape, SlotTable

SHAPE = PoolShape(
    num_blocks=8, block_size=16, max_slots=2, max_tokens_per_step=64, max_ids_per_row=2, vocab_size=256, context=64
)
VOCABULARY = np.arange(100, 150, dtype=np.int32)


def test_a_step_takes_what_the_five_features_cost() -> None:
    slept: list[float] = []
    times = StepTimes(c0=1000, c1=100, c2=10, c3=1, c4=0.5, ids_per_row=2)
    engine = SimulatedEngine(EngineDescription(SHAPE, b"", b"", ""), times, VOCABULARY, sleep=slept.append)
    table = SlotTable(SHAPE)

    def step(**changes: object) -> list[int]:
        batch = table.apply(Plan(1, 1, 1, **changes))  # type: ignore[arg-type]
        results = engine.execute(batch, table)
        table.commit(batch, results.counts, results.ids, np.ones(len(batch.slots), dtype=np.bool_))
        return results.ids.tolist()

    adds = (slot_add(0, [1, 2, 3], seed=9),)
    first = step(adds=adds, blocks=pack_u32([0, 0]), chunks=pack_u32([0, 3]))
    assert len(first) == 2
    adds = (slot_add(1, [1, 2, 3, 4], seed=9),)
    step(adds=adds, blocks=pack_u32([1, 1]), chunks=pack_u32([1, 2]))
    assert slept == pytest.approx([(1000 + 100 * 3 + 0.5 * 9) / 1e6, (1000 + 100 * 2 + 10 * 1 + 1 * 5 + 0.5 * 4) / 1e6])


@given(st.integers(0, 2**64 - 1), st.integers(0, 10_000), st.integers(1, 8))
def test_ids_depend_on_seed_and_position_alone(seed, position, count) -> None:
    ids = simulated_ids(seed, position, count, VOCABULARY)
    assert np.isin(ids, VOCABULARY).all()
    for offset in range(count):
        assert simulated_ids(seed, position + offset, 1, VOCABULARY) == ids[offset]


def test_ids_differ_between_seeds() -> None:
    assert simulated_ids(1, 0, 100, VOCABULARY).tolist() != simulated_ids(2, 0, 100, VOCABULARY).tolist()


def test_coefficients_come_from_a_file(tmp_path) -> None:
    path = tmp_path / "times.json"
    path.write_text('{"c0": 5, "ids_per_row": 4}')
    assert load_step_times(str(path)) == StepTimes(c0=5.0, ids_per_row=4)
    path.write_text('{"c9": 5}')
    with pytest.raises(ScriptError, match="c9"):
        load_step_times(str(path))
    with pytest.raises(ScriptError, match="cannot read"):
        load_step_times(str(tmp_path / "absent"))

"""A simulated group keeps the tables a worker keeps, and a fit finds the coefficients that made a log."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.simulation import fit
from bench.simulation.group import SimulatedGroup
from bench.simulation.virtual import check_at_rest
from protocol.packing import unpack_u8, unpack_u32
from protocol.worker import Register, StepDone
from tests.bench.storms import Storm
from workers.simulated import StepTimes, load_step_times
from workers.slots import PoolShape, SlotTable, StepBatch
from workers.step_log import StepFeatures

PRESETS = Path(__file__).parents[2] / "bench" / "simulation" / "presets"


class Checked(SimulatedGroup):
    """Beside the worker's own tables, which refuse a plan that contradicts them."""

    def __init__(self, register: Register, times: StepTimes) -> None:
        super().__init__(register, times)
        shape = PoolShape(
            num_blocks=register.num_blocks,
            block_size=register.block_size,
            max_slots=register.max_slots,
            max_tokens_per_step=register.max_tokens_per_step,
            max_ids_per_row=register.max_ids_per_row,
            vocab_size=register.vocab_size,
            context=register.context,
        )
        self.table = SlotTable(shape)
        self.batch: StepBatch | None = None
        self.compared = 0

    def receive(self, message: object) -> None:
        super().receive(message)
        if not self.plans and not self.busy:
            self.table.reset()

    def begin(self) -> float:
        self.batch = self.table.apply(self.plans[0])
        seconds = super().begin()
        assert self.running is not None
        assert self.running.slots.tolist() == self.batch.slots.tolist()
        assert self.running.samples.tolist() == self.batch.samples.tolist()
        assert self.running.features == StepFeatures.of(self.batch, 0)
        return seconds

    def end(self) -> StepDone:
        done = super().end()
        assert self.batch is not None
        advanced = np.ones(len(self.batch.slots), dtype=np.bool_)
        self.table.commit(self.batch, unpack_u8(done.counts), unpack_u32(done.ids).astype(np.int32), advanced)
        self.compared += 1
        return done


def test_its_rows_are_those_of_a_workers_tables() -> None:
    groups: list[Checked] = []

    def make(register: Register, times: StepTimes) -> Checked:
        groups.append(Checked(register, times))
        return groups[-1]

    storm = Storm(0, requests=40, num_blocks=30, make_group=make)
    storm.run()
    check_at_rest([storm.site], storm.asked)
    assert sum(group.compared for group in groups) > 100


def log_of(times: StepTimes, steps: int, noise: float, path: Path) -> Path:
    """A step log as a worker with these step times would write it."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(steps):
        rows, prefill = int(rng.integers(0, 16)), int(rng.integers(0, 2) * rng.integers(1, 512))
        features = StepFeatures(
            0, prefill, rows, rows * int(rng.integers(1, 2000)), prefill * int(rng.integers(1, 2000))
        )
        took = times.step_us(features) * rng.lognormal(0.0, noise) + 1
        lines.append(json.dumps({"step_us": took, **{name: getattr(features, name) for name in fit.FEATURES}}))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.01), (0.05, 0.25)])
def test_a_fit_finds_what_made_the_log(tmp_path: Path, noise: float, tolerance: float) -> None:
    made = StepTimes(c0=9000.0, c1=180.0, c2=250.0, c3=2.3, c4=0.1)
    fitted = fit.fit(fit.read_log(log_of(made, 400, noise, tmp_path / "log")))
    for name in ("c0", "c1", "c2", "c3", "c4"):
        assert getattr(fitted.times, name) == pytest.approx(getattr(made, name), rel=tolerance)
    assert fitted.median_error < max(noise, 0.01)


def test_no_coefficient_is_negative_and_what_explains_nothing_is_zero(tmp_path: Path) -> None:
    made = StepTimes(c0=5000.0, c1=0.0, c2=100.0, c3=0.0, c4=0.0)
    fitted = fit.fit(fit.read_log(log_of(made, 400, 0.1, tmp_path / "log"))).times
    assert min(fitted.c0, fitted.c1, fitted.c2, fitted.c3, fitted.c4) >= 0
    assert fitted.c1 < 1 and fitted.c0 == pytest.approx(5000, rel=0.1)


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.json")), ids=lambda path: path.stem)
def test_every_preset_is_one_for_the_simulated_engine(path: Path) -> None:
    times = load_step_times(str(path))
    assert times.c0 > 0 and times.c1 > 0 and path.name in (PRESETS / "README.md").read_text()

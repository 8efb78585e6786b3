"""The simulation on real sockets: a scheduler process serves it, and every request gets its own ids."""

from __future__ import annotations

import pytest

from bench.simulation import processor_load


@pytest.mark.slow
def test_a_scheduler_process_serves_simulated_groups_and_frontends() -> None:
    load = processor_load.Load(3, streams=4, steps_a_second=100.0, prompt_tokens=20, output_tokens=6, frontends=2)
    result = processor_load.measure(load, seconds=1.0, warm_up=0.3)
    assert result.ids_a_second > 0 and result.requests_a_second > 0 and result.core_share > 0
    assert 0 < result.occupancy <= 1

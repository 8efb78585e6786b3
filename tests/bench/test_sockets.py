"""The simulation on real sockets: a scheduler serves it, and every request gets its own ids, whoever dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.simulation import processor_load
from bench.simulation.group import registration
from bench.simulation.sockets import SocketSimulation
from bench.simulation.workload import Prompts
from protocol.frontend import FinishReason
from tests.scheduler.live_loop import Bench
from workers.simulated import StepTimes


@pytest.mark.slow
def test_a_scheduler_process_serves_simulated_groups_and_frontends() -> None:
    load = processor_load.Load(3, streams=4, steps_a_second=100.0, prompt_tokens=20, output_tokens=6, frontends=2)
    result = processor_load.measure(load, seconds=1.0, warm_up=0.3)
    assert result.ids_a_second > 0 and result.requests_a_second > 0 and result.core_share > 0
    assert 0 < result.occupancy <= 1


@pytest.mark.slow
def test_groups_on_sockets_die_and_come_back_and_every_request_ends(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    prompts, times = Prompts(0), StepTimes(c0=1500.0, c1=1.0, c2=10.0, c3=0.0, c4=0.0)
    addresses = bench.loop.frontends.transport.address, bench.loop.workers.transport.address
    with SocketSimulation(frontend_address=addresses[0], worker_address=addresses[1]) as sim:
        frontend = sim.add_frontend(1)
        groups = [sim.add_group(registration(f"g{nth}", nth, nonce=nth, max_slots=8), times) for nth in (1, 2)]
        asked = [prompts.ask(prompts.ids(40), 60, 0.0) for _ in range(60)]
        sim.at(sim.clock() + 0.2, lambda: [frontend.ask(one) for one in asked] and None)
        sim.at(sim.clock() + 0.4, lambda: sim.kill(groups[0]))
        sim.at(sim.clock() + 0.6, lambda: sim.add_group(registration("g1", 3, nonce=3, max_slots=8), times) and None)
        limit = sim.clock() + 60
        while len(frontend.ended) < len(asked) and sim.clock() < limit:
            sim.run(sim.clock() + 0.05)
    bench.close()
    assert bench.loop.cell.statistics().group_losses
    assert {id(one) for one in frontend.ended} == {id(one) for one in asked}
    for one in asked:
        one.check(50_000)
        assert one.finish is not None and one.finish.reason is FinishReason.LENGTH

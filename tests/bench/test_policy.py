"""What one scheduler over all groups is worth against balancers, in small: virtual time, so the numbers are exact."""

from __future__ import annotations

import numpy as np
import pytest

from bench.simulation import policy
from bench.simulation.frontend import Asked
from bench.simulation.group import registration
from bench.simulation.workload import Prompts, Workload
from workers.simulated import StepTimes

pytestmark = pytest.mark.slow

TIMES = StepTimes(c0=4000.0, c1=20.0, c2=5.0, c3=0.03, c4=0.001)


def shared_prefixes(seed: int) -> list[Asked]:
    prompts = Prompts(seed)
    shared = [prompts.ids(2000) for _ in range(10)]
    return [
        prompts.ask(np.concatenate((shared[nth % 10], prompts.ids(40))), 20, at)
        for nth, at in enumerate(prompts.arrivals(60.0, 90))
    ]


def two_tenants(seed: int) -> list[Asked]:
    prompts = Prompts(seed)
    whose = prompts.rng.permutation(["greedy"] * 200 + ["modest"] * 40)
    return [prompts.ask(prompts.ids(100), 30, 0.0002 * nth, str(tenant)) for nth, tenant in enumerate(whose)]


def results(name: str, make: object, **shape: int) -> dict[str, policy.PolicyResult]:
    workload = Workload(name, make)  # type: ignore[arg-type]
    register = registration(**{"num_blocks": 512, "max_slots": 16, "max_tokens_per_step": 1024, **shape})
    return {one: policy.run(workload, one, TIMES, shape=register) for one in policy.POLICIES}


def test_prefixes_are_found_more_often_where_one_scheduler_knows_all_groups() -> None:
    found = results("prefixes", shared_prefixes)
    assert found["headrace"].hit_rate > 1.3 * max(found["round-robin"].hit_rate, found["least-loaded"].hit_rate)
    assert found["headrace"].ttft_p50 < min(found["round-robin"].ttft_p50, found["least-loaded"].ttft_p50)


def test_a_modest_tenant_gets_its_turns_beside_a_greedy_one() -> None:
    found = results("tenants", two_tenants, max_slots=4)
    fair, plain = found["headrace"], found["round-robin"]
    assert fair.fairness is not None and plain.fairness is not None
    assert fair.fairness > 0.85 > plain.fairness
    assert fair.modest_ttft_p99 is not None and plain.modest_ttft_p99 is not None
    assert fair.modest_ttft_p99 < 0.7 * plain.modest_ttft_p99

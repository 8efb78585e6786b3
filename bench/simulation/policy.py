"""One scheduler over all groups, against groups that stand alone behind a balancer: the same loads in virtual time.

The balancers are what stands before independent servers elsewhere: each group has a cell of its own, and a request is
bound to one when it arrives, in turn or by fewest open requests; nobody tells tenants apart. So the comparison needs
nothing in the scheduler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from bench.simulation.frontend import Asked, SimulatedFrontend
from bench.simulation.group import registration
from bench.simulation.virtual import Clock, Site, check_at_rest
from bench.simulation.workload import Workload
from protocol.worker import Register
from scheduler.settings import CellSettings
from workers.simulated import StepTimes

GROUPS = 8
POLICIES = ("headrace", "round-robin", "least-loaded")


@dataclass(frozen=True)
class PolicyResult:
    """One load under one policy. Seconds on the virtual clock."""

    workload: str
    policy: str
    requests: int
    rejected: int
    duration: float
    tokens_a_second: float
    """Output tokens."""
    ttft_p50: float
    ttft_p99: float
    itl_p99: float
    preemptions: int
    hit_rate: float
    """Of all prompt tokens: found computed."""
    fairness: float | None
    """Jain's index over the tenants of what each got while both had something waiting: 1 is even, 0.5 all to one."""
    modest_ttft_p99: float | None


def run(
    workload: Workload,
    policy: str,
    times: StepTimes,
    *,
    seed: int = 0,
    shape: Register | None = None,
    settings: CellSettings | None = None,
) -> PolicyResult:
    """One load, from its first arrival to its last answer."""
    clock = Clock()
    settings = settings or CellSettings(max_queue_requests=100_000, max_queue_tokens=1 << 31)
    sites = [Site(clock, settings, seed=seed + nth) for nth in range(1 if policy == "headrace" else GROUPS)]
    for nth in range(GROUPS):
        register = shape or registration(num_blocks=workload.num_blocks, max_slots=64, max_tokens_per_step=2048)
        sites[nth % len(sites)].launch(_named(register, f"g{nth}"), times)
    frontends = [site.add_frontend() for site in sites]
    choose = _chooser(policy, frontends)
    asked: list[Asked] = []
    expected = 0

    def arrive(one: Asked) -> None:
        one.at = clock.now
        asked.append(one)
        one.on_end = ended
        one.tells_tenant = policy == "headrace"
        choose().ask(one)

    def ended(one: Asked) -> None:
        nonlocal expected
        following = workload.follow(one) if workload.follow is not None else None
        if following is not None:
            expected += 1
            clock.after(following.at, lambda: arrive(following))

    for one in workload.make(seed):
        expected += 1
        clock.at(one.at, functools.partial(arrive, one))
    clock.run(until=lambda: sum(len(f.ended) for f in frontends) == expected, most=100_000.0)
    check_at_rest(sites, asked)
    return _result(workload.name, policy, asked, sites)


def _chooser(policy: str, frontends: list[SimulatedFrontend]) -> Callable[[], SimulatedFrontend]:
    """Where the next request goes."""
    turns = 0

    def in_turn() -> SimulatedFrontend:
        nonlocal turns
        turns += 1
        return frontends[turns % len(frontends)]

    return (lambda: min(frontends, key=lambda one: len(one.open))) if policy == "least-loaded" else in_turn


def _named(register: Register, name: str) -> Register:
    return replace(register, group=name)


def _result(workload: str, policy: str, asked: list[Asked], sites: list[Site]) -> PolicyResult:
    served = [one for one in asked if one.reject is None]
    ttft = np.array([one.first_id_at - one.at for one in served])
    gaps = np.concatenate([np.frombuffer(one.gaps, dtype=np.float32) for one in served])
    duration = max(one.ended_at for one in served) - min(one.at for one in asked)
    groups = [group for site in sites for group in site.cell.load(site.clock.now).groups]
    slots = sum(running.group.register.max_slots for site in sites for running in site.running.values())
    modest = [one.first_id_at - one.at for one in served if one.tenant == "modest"]
    return PolicyResult(
        workload=workload,
        policy=policy,
        requests=len(asked),
        rejected=len(asked) - len(served),
        duration=duration,
        tokens_a_second=sum(len(one.ids) for one in served) / duration,
        ttft_p50=float(np.percentile(ttft, 50)),
        ttft_p99=float(np.percentile(ttft, 99)),
        itl_p99=float(np.percentile(gaps, 99)),
        preemptions=sum(group.preemptions for group in groups),
        hit_rate=sum(group.cached_tokens for group in groups) / max(1, sum(group.prompt_tokens for group in groups)),
        fairness=_fairness(served, slots) if modest else None,
        modest_ttft_p99=float(np.percentile(modest, 99)) if modest else None,
    )


def _fairness(served: list[Asked], at_once: int) -> float:
    """Jain's index of what both tenants were given from when all slots were taken to the modest one's last start.

    Their requests are alike, so starts are counted.
    """
    starts = [one.tenant for one in sorted(served, key=lambda one: one.first_id_at)][at_once:]
    last = len(starts) - starts[::-1].index("modest")
    given = [starts[:last].count(tenant) for tenant in ("greedy", "modest")]
    return sum(given) ** 2 / (2 * sum(count**2 for count in given))

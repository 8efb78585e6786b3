"""A few groups, a few hundred requests, and everything that can go wrong: the same storm for the same seed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import numpy as np
from msgspec.structs import replace

from bench.simulation.frontend import Asked
from bench.simulation.group import SimulatedGroup, registration
from bench.simulation.virtual import Clock, Running, Site
from bench.simulation.workload import Prompts
from protocol.ids import Epoch
from protocol.worker import Register
from scheduler.cell import Cell
from scheduler.settings import CellSettings
from workers.simulated import StepTimes

TIMES = StepTimes(c0=2000.0, c1=20.0, c2=50.0, c3=0.05, c4=0.0)
GROUPS = 4


class Storm:
    """One site and its requests."""

    def __init__(
        self,
        seed: int,
        *,
        requests: int = 80,
        a_second: float = 60.0,
        num_blocks: int = 60,
        max_queue_requests: int = 10_000,
        make_cell: Callable[[CellSettings, Epoch], Cell] = Cell,
        make_group: Callable[[Register, StepTimes], SimulatedGroup] = SimulatedGroup,
    ) -> None:
        self.clock = Clock()
        settings = CellSettings(max_queue_requests=max_queue_requests, max_queue_tokens=1 << 31)
        self.site = Site(self.clock, settings, seed=seed, make_cell=make_cell, make_group=make_group)
        self.asked: list[Asked] = []
        self.rng = random.Random(seed)
        self.shape = registration(num_blocks=num_blocks, max_slots=8, max_tokens_per_step=128, max_ids_per_row=2)
        for nth in range(GROUPS):
            self.site.launch(self.named(nth), TIMES)
        self.frontends = [self.site.add_frontend() for _ in range(2)]
        prompts = Prompts(seed)
        families = [prompts.ids(160) for _ in range(3)]
        for nth, at in enumerate(prompts.arrivals(a_second, requests)):
            shared = families[nth % 3][: 16 * self.rng.randrange(10)]
            ids = np.concatenate((shared, prompts.ids(self.rng.randint(1, 120))))
            one = prompts.ask(ids, self.rng.randint(1, 90), at, tenant=f"t{nth % 4}")
            one.priority = self.rng.choice([0, 0, 0, -1, 5])
            self.asked.append(one)
            self.clock.at(at, functools.partial(self.arrive, one))

    def named(self, nth: int) -> Register:
        return replace(self.shape, group=f"g{nth}")

    def arrive(self, one: Asked) -> None:
        one.at = self.clock.now
        self.rng.choice(self.frontends).ask(one)

    def some_group(self, what: Callable[[Running], None]) -> Callable[[], None]:
        """Do it to one of the groups that are there then."""
        return lambda: what(self.rng.choice(running)) if (running := list(self.site.running.values())) else None

    def strike(self, *, deaths: int = 0, hangs: int = 0, slow: int = 0) -> None:
        """Faults at random times while requests arrive."""
        for _ in range(deaths):
            self.clock.at(self.rng.uniform(0.2, 1.5), self.some_group(self.site.die))
        for _ in range(hangs):
            self.clock.at(self.rng.uniform(0.1, 1.5), self.some_group(self.site.hang))
        for _ in range(slow):
            self.clock.at(self.rng.uniform(0.1, 1.5), self.some_group(lambda one: self.site.slow(one, 3.0, 1.0)))

    @property
    def ended(self) -> int:
        return sum(len(frontend.ended) for frontend in self.frontends)

    def run(self) -> None:
        """Until every request has its end."""
        self.clock.run(until=lambda: self.ended == len(self.asked), most=600.0)

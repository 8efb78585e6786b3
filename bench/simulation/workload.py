"""What clients ask for, and when: a few shapes of load, each a pure function of its seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.simulation.frontend import Asked
from protocol.block_hashes import pack_hashes, root_hash
from protocol.packing import pack_u32

BLOCK = 16


class Prompts:
    """Makes requests whose prompts begin alike, or not."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def ids(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Fresh ids that nobody else has."""
        return self.rng.integers(300, 40_000, count)

    def ask(self, ids: np.ndarray[tuple[int], np.dtype[np.int64]], output: int, at: float, tenant: str = "") -> Asked:
        """A request for a prompt."""
        prompt = pack_u32(ids)
        return Asked(
            prompt,
            max(1, output),
            seed=int(self.rng.integers(1 << 62)),
            tenant=tenant,
            at=at,
            block_hashes=pack_hashes(root_hash(), prompt, BLOCK),
            block_size=BLOCK,
        )

    def lengths(self, mean: float, count: int, least: int = 4) -> list[int]:
        """Log-normal lengths with this mean."""
        drawn = self.rng.lognormal(np.log(mean) - 0.5, 1.0, count)
        return [max(least, int(length)) for length in drawn]

    def arrivals(self, rate: float, count: int) -> list[float]:
        """Poisson arrivals, seconds."""
        return np.cumsum(self.rng.exponential(1 / rate, count)).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Workload:
    """A named load: requests by arrival, and those that follow an answer."""

    name: str
    make: Callable[[int], list[Asked]]
    follow: Callable[[Asked], Asked | None] | None = None
    """Given an answered request: what its client asks next, ``at`` seconds later."""
    num_blocks: int = 4096
    """KV blocks of each group, 16 tokens each."""


def prefix_heavy(seed: int) -> list[Asked]:
    """Sixteen prompts of 6,000 tokens, each shared by many requests with questions of their own."""
    prompts = Prompts(seed)
    shared = [prompts.ids(6000) for _ in range(16)]
    count = 500
    popular = prompts.rng.zipf(1.2, count) % len(shared)
    rows = zip(prompts.arrivals(50.0, count), popular.tolist(), prompts.lengths(100, count), strict=True)
    return [prompts.ask(np.concatenate((shared[which], prompts.ids(64))), output, at) for at, which, output in rows]


TURNS = 4


def conversations(seed: int) -> list[Asked]:
    """The first turns of conversations; see ``next_turn``."""
    prompts = Prompts(seed)
    count = 150
    rows = zip(prompts.arrivals(50.0, count), prompts.lengths(600, count), prompts.lengths(120, count), strict=True)
    return [prompts.ask(prompts.ids(min(length, 3000)), output, at) for at, length, output in rows]


def next_turn(asked: Asked) -> Asked | None:
    """The client has read the answer and says more: the prompt is the whole conversation."""
    if asked.turn + 1 >= TURNS or asked.reject is not None:
        return None
    prompts = Prompts(asked.seed)  # what is said next depends on the conversation alone, whenever it goes on
    before = np.concatenate((np.frombuffer(asked.prompt, dtype="<u4"), np.array(asked.ids, dtype="<u4")))
    pause = float(prompts.rng.exponential(1.0))
    following = prompts.ask(np.concatenate((before, prompts.ids(60))), prompts.lengths(120, 1)[0], pause)
    following.turn = asked.turn + 1
    return following


def burst(seed: int) -> list[Asked]:
    """A steady load, and six hundred requests at once in the middle of it."""
    prompts = Prompts(seed)
    steady = zip(prompts.arrivals(100.0, 400), prompts.lengths(400, 400), prompts.lengths(120, 400), strict=True)
    asked = [prompts.ask(prompts.ids(min(length, 4000)), output, at) for at, length, output in steady]
    return asked + [prompts.ask(prompts.ids(300), 100, 2.0) for _ in range(600)]


def mixed(seed: int) -> list[Asked]:
    """Short chats beside documents of 4,000 tokens and more, short answers beside long ones."""
    prompts = Prompts(seed)
    asked = []
    for nth, at in enumerate(prompts.arrivals(200.0, 800)):
        long_prompt, long_output = nth % 7 == 0, nth % 5 == 0
        length = int(prompts.rng.integers(4000, 7000) if long_prompt else prompts.rng.integers(20, 500))
        output = int(prompts.rng.integers(300, 800) if long_output else prompts.rng.integers(10, 120))
        asked.append(prompts.ask(prompts.ids(length), output, at))
    return asked


def greedy_and_modest(seed: int) -> list[Asked]:
    """Two tenants with more than can be served at once, one with five times as much as the other."""
    prompts = Prompts(seed)
    whose = prompts.rng.permutation(["greedy"] * 1500 + ["modest"] * 300)
    return [prompts.ask(prompts.ids(200), 100, 0.0002 * nth, str(tenant)) for nth, tenant in enumerate(whose)]


WORKLOADS = (
    Workload("prefix-heavy", prefix_heavy),
    Workload("multi-turn", conversations, next_turn),
    Workload("burst", burst),
    Workload("mixed lengths", mixed, num_blocks=1024),  # too few for the slots: some must give way
    Workload("greedy and modest", greedy_and_modest),
)

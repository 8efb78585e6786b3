"""How much of a core one scheduler process takes under a steady load, and whether it holds it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from bench.simulation.frontend import Asked, SimulatedFrontend
from bench.simulation.group import registration
from bench.simulation.sockets import SocketSimulation
from protocol.packing import pack_u32
from scheduler.settings import SchedulerSettings
from workers.simulated import StepTimes

ROOT = Path(__file__).parents[2]
PROCESS = """
import sys, msgspec
from scheduler.main import run
from scheduler.settings import SchedulerSettings
sys.exit(run(msgspec.json.decode(sys.argv[1], type=SchedulerSettings)))
"""
VOCABULARY = 50_000
HELD = 0.97
"""Of the steps that were due, at least this share was done."""


@dataclass(frozen=True)
class Load:
    """Every slot of every group always has a request: a new one is asked for when one ends."""

    groups: int
    streams: int = 64
    steps_a_second: float = 25.0
    prompt_tokens: int = 256
    output_tokens: int = 128
    frontends: int = 4


@dataclass(frozen=True)
class LoadResult:
    """What was measured over ``seconds``."""

    load: Load
    seconds: float
    core_share: float
    """CPU time of the scheduler process over time, all its threads."""
    loop_share: float
    """The same of its one loop; the rest is ZMQ's thread, which sends and receives."""
    simulation_share: float
    """The same of this process; near 1 it is the limit, not the scheduler."""
    steps_done: float
    """Of the steps that were due, the share that was done."""
    stood_still: float
    """Share of the steps after which the next plan was not there."""
    ids_a_second: float
    requests_a_second: float
    occupancy: float
    """Rows a step, over streams."""

    @property
    def held(self) -> bool:
        """The scheduler kept up."""
        return self.steps_done >= HELD

    @property
    def us_per_step(self) -> float:
        """CPU of the scheduler for one step of one group, everything included."""
        steps = self.load.groups * self.load.steps_a_second * self.steps_done
        return 1e6 * self.core_share / steps


def measure(load: Load, *, seconds: float = 6.0, warm_up: float = 3.0) -> LoadResult:
    """Run a scheduler process under this load."""
    with tempfile.TemporaryDirectory(prefix="hr-") as directory, _scheduler(directory, load) as process:
        sockets = SocketSimulation(frontend_address=f"ipc://{directory}/f", worker_address=f"ipc://{directory}/w")
        with sockets as sim:
            _fill(sim, load)
            sim.run(sim.clock() + warm_up)
            return _observe(sim, load, process.pid, seconds)


def _observe(sim: SocketSimulation, load: Load, scheduler: int, seconds: float) -> LoadResult:
    """Let time pass and say what happened meanwhile."""
    steps, waited, ids, ended = sim.turnaround.steps, sim.turnaround.waited, _ids(sim), _ended(sim)
    began, cpu, loop = time.perf_counter(), _cpu_seconds(scheduler), _loop_seconds(scheduler)
    own = time.process_time()
    sim.run(sim.clock() + seconds)
    took = time.perf_counter() - began
    steps, waited = sim.turnaround.steps - steps, sim.turnaround.waited - waited
    ids = _ids(sim) - ids
    for frontend in sim.frontends:
        for asked in frontend.ended[-20:]:
            asked.check(VOCABULARY)
    return LoadResult(
        load=load,
        seconds=took,
        core_share=(_cpu_seconds(scheduler) - cpu) / took,
        loop_share=(_loop_seconds(scheduler) - loop) / took,
        simulation_share=(time.process_time() - own) / took,
        steps_done=steps / (load.groups * load.steps_a_second * took),
        stood_still=waited / max(steps, 1),
        ids_a_second=ids / took,
        requests_a_second=(_ended(sim) - ended) / took,
        occupancy=ids / max(steps, 1) / load.streams,
    )


def largest_held(*, first: int, most: int = 256, seconds: float = 6.0) -> LoadResult | None:
    """Groups are doubled until the load is not held, then halved in between, to a sixteenth."""
    held: LoadResult | None = None
    low, high = first, first
    while high <= most:
        result = measure(Load(high), seconds=seconds)
        if not result.held:
            break
        held, low, high = result, high, high * 2
    while held is not None and high - low > max(1, low // 16):
        middle = (low + high) // 2
        result = measure(Load(middle), seconds=seconds)
        if result.held:
            held, low = result, middle
        else:
            high = middle
    return held


def _fill(sim: SocketSimulation, load: Load) -> None:
    """Groups register, and requests come spread over an output's life, so that they end spread over it too."""
    blocks = load.streams * (-(-(load.prompt_tokens + load.output_tokens) // 16) + 2)
    times = StepTimes(c0=1e6 / load.steps_a_second, c1=0.0, c2=0.0, c3=0.0, c4=0.0)
    for number in range(load.groups):
        shape = registration(
            f"g{number}",
            nonce=number + 1,
            num_blocks=blocks * 2,
            max_slots=load.streams,
            max_tokens_per_step=2048,
            vocab_size=VOCABULARY,
        )
        sim.add_group(shape, times)
    frontends = [sim.add_frontend(number + 1) for number in range(load.frontends)]
    rng = np.random.default_rng(0)

    def ask(frontend: SimulatedFrontend, output: int) -> None:
        prompt = pack_u32(rng.integers(300, 40_000, load.prompt_tokens))
        asked = Asked(prompt, output, seed=int(rng.integers(1 << 62)), at=sim.clock())
        asked.on_end = lambda asked: ask(frontend, load.output_tokens)
        frontend.ask(asked)

    for number in range(load.groups * load.streams):
        ask(frontends[number % load.frontends], int(rng.integers(1, load.output_tokens + 1)))


def _ids(sim: SocketSimulation) -> int:
    return sum(frontend.deliveries for frontend in sim.frontends)


def _ended(sim: SocketSimulation) -> int:
    return sum(len(frontend.ended) for frontend in sim.frontends)


@contextmanager
def _scheduler(directory: str, load: Load) -> Iterator[subprocess.Popen[bytes]]:
    settings = SchedulerSettings(
        frontend_bind=f"ipc://{directory}/f",
        worker_bind=f"ipc://{directory}/w",
        max_queue_requests=2 * load.groups * load.streams,
        max_queue_tokens=1 << 31,
    )
    command = [sys.executable, "-c", PROCESS, msgspec.json.encode(settings).decode()]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(Path(directory) / "w", process)
            yield process
        finally:
            process.kill()


def _wait_for(socket: Path, process: subprocess.Popen[bytes]) -> None:
    while not socket.exists():
        if process.poll() is not None:
            raise RuntimeError(f"the scheduler ended with {process.returncode}")
        time.sleep(0.02)


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads."""
    return _seconds(Path(f"/proc/{pid}/stat"))


def _loop_seconds(pid: int) -> float:
    """The same of its main thread."""
    return _seconds(Path(f"/proc/{pid}/task/{pid}/stat"))


def _seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

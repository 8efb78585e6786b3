"""How many cores a rank may use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")

SPIN_COUNT = "10000"
"""How long GNU OpenMP's threads spin at a barrier before they sleep.

Its default, 300,000, burns whole time slices whenever another process holds a core: on two busy cores a decode step of
eight rows took 1,580 ms, and 216 ms with this (2026-12-01).
"""


def usable_cpus(cpu_max: Path = CPU_MAX) -> int:
    """Cores this process may run on: its affinity, bounded by a cgroup v2 quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, _, period = cpu_max.read_text().strip().partition(" ")
    except OSError:
        return cores
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return cores
    return max(1, min(cores, int(quota) // int(period)))


def threads_for_rank(requested: int, ranks_on_host: int) -> int:
    """Threads of one rank: as asked, else its share of the host, so that ranks do not fight for cores."""
    return requested or max(1, usable_cpus() // max(1, ranks_on_host))


def limit_threads(threads: int) -> None:
    """Set OMP_NUM_THREADS, which is read when the OpenMP runtime loads: call before torch is imported.

    Whatever was there is replaced: Ray sets 1 for an actor without CPUs.
    """
    os.environ.update(limited_environment(os.environ, threads))


def limited_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """The environment of a process that may use so many threads; a waiting policy that is set stays."""
    chosen = "GOMP_SPINCOUNT" in environment or "OMP_WAIT_POLICY" in environment
    waiting = {} if chosen else {"GOMP_SPINCOUNT": SPIN_COUNT}
    return {**environment, **waiting, "OMP_NUM_THREADS": str(threads)}

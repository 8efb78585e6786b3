"""The scheduler by itself: what a step costs, what load one core carries, and what its policy is worth.

    python bench/scheduler.py [drive] [load] [policy] [--json PATH] [--preset FILE]

``drive``   microseconds from a StepDone to the next Plan, at 16, 64 and 256 running requests, without sockets
``load``    the scheduler process on its real sockets: CPU share of one core at 1, 8 and 64 groups × 64 streams × 25
            steps/s with churn (256-token prompts, 128-token outputs, 4 frontends), and the largest load held
``policy``  the same loads in virtual time under this scheduler and under groups behind a balancer

The first two are timings: run them on a machine with nothing else to do. The third does not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # not this file's folder: there `scheduler` would be this file

import msgspec  # noqa: E402

from bench.simulation import drive, policy, processor_load  # noqa: E402
from bench.simulation.workload import WORKLOADS  # noqa: E402
from workers.simulated import StepTimes  # noqa: E402

PRESETS = Path(__file__).parent / "simulation" / "presets"


def run_drive(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The drive path."""
    print("running   ids/row   drive p50   p99 us   whole turn p50   p99 us   us/request")
    results = []
    for ids in (1, 4):
        for running in (16, 64, 256):
            one = drive.measure(running, ids_per_row=ids, steps=given.steps)
            print(
                f"{running:7d}   {ids:7d}   {one.drive_p50:9.0f}   {one.drive_p99:6.0f}   {one.turn_p50:14.0f}"
                f"   {one.turn_p99:6.0f}   {one.turn_per_request:10.2f}"
            )
            results.append({**asdict(one), "turn_per_request": one.turn_per_request})
    return results


def run_load(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A scheduler process under load."""
    print("groups   core   its loop   us/step   steps done   stood still   ids/s   requests/s   simulation's core")
    results = []

    def show(one: processor_load.LoadResult) -> None:
        print(
            f"{one.load.groups:6d}   {one.core_share:4.0%}   {one.loop_share:8.0%}   {one.us_per_step:7.0f}"
            f"   {one.steps_done:10.1%}   {one.stood_still:11.1%}   {one.ids_a_second:5.0f}"
            f"   {one.requests_a_second:10.0f}   {one.simulation_share:17.0%}"
        )
        results.append({**asdict(one), "us_per_step": one.us_per_step, "held": one.held})

    for groups in given.groups:
        show(processor_load.measure(processor_load.Load(groups), seconds=given.seconds))
    if given.largest:
        print("the largest load held:")
        held = processor_load.largest_held(first=given.groups[-1], seconds=given.seconds)
        if held is not None:
            show(held)
        else:
            print(f"  less than {given.groups[-1]} groups")
    return results


def run_policy(given: argparse.Namespace) -> list[dict[str, Any]]:
    """What the order of things is worth."""
    times = msgspec.json.decode(given.preset.read_bytes(), type=StepTimes)
    print(f"step times of {given.preset.stem}; {policy.GROUPS} groups; seconds in virtual time")
    print(
        "load                policy         tokens/s   TTFT p50     p99   ITL p99   preempted   hits   Jain"
        "   modest p99"
    )
    results = []
    for workload in [one for one in WORKLOADS if not given.only or one.name in given.only]:
        for name in policy.POLICIES:
            one = policy.run(workload, name, times, seed=given.seed)
            jain = "" if one.fairness is None else f"{one.fairness:.2f}"
            modest = "" if one.modest_ttft_p99 is None else f"{one.modest_ttft_p99:.3f}"
            print(
                f"{one.workload:<18}  {one.policy:<13}{one.tokens_a_second:10.0f}   {one.ttft_p50:8.3f}"
                f"  {one.ttft_p99:6.3f}   {one.itl_p99:7.4f}   {one.preemptions:9d}  {one.hit_rate:5.0%}"
                f"  {jain:>5}   {modest:>10}",
                flush=True,
            )
            results.append(asdict(one))
    return results


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "drive": run_drive,
    "load": run_load,
    "policy": run_policy,
}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all three unless named")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--steps", type=int, default=2000, help="of each drive measurement (2000)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load measurement (6)")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--no-largest", dest="largest", action="store_false", help="do not look for the largest load")
    parser.add_argument("--preset", type=Path, default=PRESETS / "h200_llama_8b.json")
    parser.add_argument("--only", nargs="+", metavar="LOAD", help="loads of `policy`, such as burst")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    print(", ".join(f"{name} {value}" for name, value in results.items()))
    for name in given.parts or PARTS:
        results[name] = PARTS[name](given)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Time from the `headrace serve` command to the first streamed token, local launcher and Ray side by side, and memory.

Usage: python bench/start.py [--runs N] [--launchers local ray] [--json PATH] [-- flags of headrace serve …]

The request is sent when the ready line appears. Runs alternate between launchers, so that a noisy machine is noisy
for both; the table shows each one's median and the ratio of the medians, beside the budgets. Memory is that of all
processes of a local run after its first token, with a KV pool of 512 MiB counted whole: its pages are taken as they
are first written.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

from bench.servers import usage_of  # noqa: E402

LAUNCHERS = ("local", "ray")
START_BUDGETS = {"local": 5.0, "ray": 9.0}
"""Seconds to the first token: weights on a local disk, a warm install, a CPU."""
MEMORY_BUDGET = 1.3 * 2**30
"""All processes, with bfloat16 weights of SmolLM2-135M and 512 MiB of KV."""
ROLES = ("frontend", "scheduler", "workers", "worker-rank")
READY_LINE = re.compile(r"serves (\S+) at http://([^/:]+):(\d+)/v1")
QUESTION = "What is the capital of France?"
KV_POOL = 512 * 2**20


@dataclass(frozen=True)
class Start:
    """One start. Seconds since the command."""

    ready: float
    first_token: float
    stop: float
    """From SIGTERM to the end of the last process."""
    resident: dict[str, int] = field(default_factory=dict)
    """Bytes by role after the first token."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Time from `headrace serve` to the first streamed token.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--launchers", nargs="*", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="flags of headrace serve, after --")
    options = parser.parse_args()
    starts: dict[str, list[Start]] = {launcher: [] for launcher in options.launchers}
    for turn in range(options.runs):
        for launcher in options.launchers:
            start = measure(launcher, options.flags)
            starts[launcher].append(start)
            print(f"run {turn + 1}, {launcher}: ready {start.ready:.2f} s, first token {start.first_token:.2f} s")
    print_table(starts)
    print_memory(starts)
    if options.json:
        options.json.write_text(json.dumps({name: [asdict(one) for one in runs] for name, runs in starts.items()}))
    return 0


def measure(launcher: str, flags: list[str]) -> Start:
    """Start a server, ask it one thing, see what memory it holds, stop it."""
    command = [sys.executable, "-m", "headrace", "serve", "--launcher", launcher, "--port", "0", *flags]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            ready = next((match for line in server.stdout if (match := READY_LINE.search(line))), None)
            if ready is None:
                raise SystemExit(f"{' '.join(command)} ended before it was ready")
            ready_at = time.monotonic()
            first_token(*ready.groups())
            token_at = time.monotonic()
            resident = dict(usage_of(server.pid, ROLES).resident)
        finally:
            stopping = time.monotonic()
            server.send_signal(signal.SIGTERM)
            server.wait()
    return Start(ready_at - began, token_at - began, time.monotonic() - stopping, resident)


def first_token(model: str, host: str, port: str) -> None:
    """Return once a streamed answer has text."""
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    body = {"model": model, "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": QUESTION}]}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    for line in response:
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            connection.close()
            return
    raise SystemExit(f"no token came: {response.status}")


def print_table(starts: dict[str, list[Start]]) -> None:
    medians = {launcher: statistics.median(start.first_token for start in runs) for launcher, runs in starts.items()}
    print(f"\n{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {platform.machine()}\n")
    print("| launcher | ready, median | first token, median | first token, best | budget | stop, median |")
    print("|---|---|---|---|---|---|")
    for launcher, runs in starts.items():
        ready = statistics.median(start.ready for start in runs)
        best = min(start.first_token for start in runs)
        stop = statistics.median(start.stop for start in runs)
        times = f"{ready:.2f} s | {medians[launcher]:.2f} s | {best:.2f} s"
        print(f"| {launcher} | {times} | {START_BUDGETS[launcher]:.0f} s | {stop:.2f} s |")
    if len(medians) > 1:
        print(f"\nRay takes {medians['ray'] / medians['local']:.2f} times as long as the local launcher.")


def print_memory(starts: dict[str, list[Start]]) -> None:
    if not starts.get("local"):
        return
    resident = starts["local"][-1].resident
    parts = ", ".join(f"{role} {size / 2**20:.0f} MiB" for role, size in sorted(resident.items()))
    total = (sum(resident.values()) + KV_POOL) / 2**30
    print(f"\nMemory: {total:.2f} GiB of {MEMORY_BUDGET / 2**30:.1f} GiB, of which KV 512 MiB, {parts}.")


if __name__ == "__main__":
    sys.exit(main())

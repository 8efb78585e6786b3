"""Time from the `headrace serve` command to the first streamed token, local launcher and Ray side by side.

Usage: python bench/start.py [--runs N] [-- flags of headrace serve …]

The request is sent when the ready line appears. Runs alternate between launchers, so that a noisy machine is noisy
for both; the table shows each one's median and the ratio of the medians.
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
from dataclasses import dataclass

LAUNCHERS = ("local", "ray")
READY_LINE = re.compile(r"serves (\S+) at http://([^/:]+):(\d+)/v1")
QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class Start:
    """One start. Seconds since the command."""

    ready: float
    first_token: float
    stop: float
    """From SIGTERM to the end of the last process."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Time from `headrace serve` to the first streamed token.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="flags of headrace serve, after --")
    options = parser.parse_args()
    starts: dict[str, list[Start]] = {launcher: [] for launcher in LAUNCHERS}
    for run in range(options.runs):
        for launcher in LAUNCHERS:
            start = measure(launcher, options.flags)
            starts[launcher].append(start)
            print(f"run {run + 1}, {launcher}: ready {start.ready:.2f} s, first token {start.first_token:.2f} s")
    print_table(starts)
    return 0


def measure(launcher: str, flags: list[str]) -> Start:
    """Start a server, ask it one thing, stop it."""
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
        finally:
            stopping = time.monotonic()
            server.send_signal(signal.SIGTERM)
            server.wait()
    return Start(ready_at - began, token_at - began, time.monotonic() - stopping)


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
    print("| launcher | ready, median | first token, median | first token, best | stop, median |")
    print("|---|---|---|---|---|")
    for launcher, runs in starts.items():
        ready = statistics.median(start.ready for start in runs)
        best = min(start.first_token for start in runs)
        stop = statistics.median(start.stop for start in runs)
        print(f"| {launcher} | {ready:.2f} s | {medians[launcher]:.2f} s | {best:.2f} s | {stop:.2f} s |")
    print(f"\nRay takes {medians['ray'] / medians['local']:.2f} times as long as the local launcher.")


if __name__ == "__main__":
    sys.exit(main())

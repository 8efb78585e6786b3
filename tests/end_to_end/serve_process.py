"""A real ``headrace serve`` with all its processes, and what is left of it afterwards."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import openai

READY_SECONDS = 90.0
STOP_SECONDS = 40.0


def free_port() -> int:
    """A port that nobody holds now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def processes_mentioning(text: str) -> dict[int, str]:
    """Pid → command line of live processes whose command line or environment holds the text; zombies excepted."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (entry / "environ").read_bytes().decode(errors="replace")
            if command and text in command + environment:
                found[int(entry.name)] = command
    return found


def shared_memory() -> set[str]:
    """Names of what lies in the machine's shared memory."""
    return {entry.name for entry in Path("/dev/shm").iterdir()}


class Gauges(dict[str, float]):
    """One scrape of /metrics: ``name{labels}`` → value."""

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that carry these labels; an absent metric is an error."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        samples = [v for k, v in self.items() if k.partition("{")[0] == name and all(w in k for w in wanted)]
        assert samples, f"no {name} with {labels} in /metrics"
        return sum(samples)

    def used_blocks(self) -> list[float]:
        """Used KV blocks of every group; empty while a frontend that has just started knows of none."""
        return [
            value for name, value in self.items() if name.startswith("headrace_kv_blocks{") and 'state="used"' in name
        ]


class RunningServer:
    """What can be asked of a server from outside: its API, its metrics, its processes."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.marker = f"headrace-test-{port}-{os.getpid()}"
        """In the environment of every process of this server."""

    def pids(self, pattern: str) -> list[int]:
        """Pids of this server's processes whose command line matches."""
        return sorted(pid for pid, command in processes_mentioning(self.marker).items() if re.search(pattern, command))

    def client(self, **options: object) -> openai.OpenAI:
        """The official client, with strict validation of every response unless an option says otherwise."""
        defaults = {"api_key": "none", "_strict_response_validation": True, "max_retries": 0, "timeout": 120}
        return openai.OpenAI(base_url=f"{self.url}/v1", **{**defaults, **options})  # type: ignore[arg-type]

    def gauges(self) -> Gauges:
        """One scrape of /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return Gauges({name: float(value) for name, _, value in samples})

    def wait_for_gauges(self, condition: Callable[[Gauges], object], what: str, seconds: float = 30.0) -> Gauges:
        """Scrape until the condition holds."""
        deadline = time.monotonic() + seconds
        while True:
            gauges = self.gauges()
            if condition(gauges):
                return gauges
            assert time.monotonic() < deadline, f"never {what}: {gauges}"
            threading.Event().wait(0.05)

    def wait_until_it_answers(self, seconds: float = READY_SECONDS) -> None:
        """The API is up."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < deadline, f"{self.url} does not answer"
                time.sleep(0.05)

    def wait_for_groups(self, count: int) -> None:
        """So many groups are registered and serve."""
        self.wait_for_gauges(
            lambda gauges: sum(up for name, up in gauges.items() if name.startswith("headrace_worker_up{")) == count,
            f"{count} groups",
            READY_SECONDS,
        )

    def wait_until_no_blocks_are_used(self) -> None:
        """Every KV block is back in the pool."""
        self.wait_for_gauges(
            lambda gauges: gauges.used_blocks() and not any(gauges.used_blocks()), "zero used KV blocks"
        )


class ServeProcess(RunningServer):
    """Context manager: starts ``headrace serve`` with the arguments and waits for its ready line."""

    def __init__(self, *arguments: str, port: int | None = None, environment: dict[str, str] | None = None) -> None:
        super().__init__(port or free_port())
        self._command = [sys.executable, "-m", "headrace", "serve", *arguments, "--port", str(self.port)]
        self._environment = {**os.environ, "HEADRACE_TEST_MARKER": self.marker, **(environment or {})}
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.process: subprocess.Popen[str] | None = None
        self.shared_memory_before: set[str] = set()

    def __enter__(self) -> ServeProcess:
        self.start()
        self.wait_for_line(r"http://127\.0\.0\.1:\d+", READY_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the command; does not wait."""
        self.shared_memory_before = shared_memory()
        self.process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._queue.put(line)
        self._queue.put(None)

    def stop_reading(self) -> None:
        """From now on nobody reads what the server says: after one more line it meets a broken pipe."""
        assert self.process is not None and self.process.stdout is not None
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, self.process.stdout.fileno())
        os.close(nothing)

    def wait_for_line(self, pattern: str, seconds: float) -> str:
        """The next output line that matches; fails with the whole output when the process ends or time is up."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                raise AssertionError(f"no line matching {pattern!r}:\n{self.output}")
            if re.search(pattern, line):
                return line

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """The exit status."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s:\n{self.output}") from None

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Signal, wait, and check that nothing is left; returns the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.wait()
        finally:
            left = processes_mentioning(self.marker)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert not left, f"left behind: {left}\n{self.output}"

    def shared_memory_left(self) -> set[str]:
        """Entries of shared memory that were not there before."""
        return shared_memory() - self.shared_memory_before

    @property
    def output(self) -> str:
        return "\n".join(self.lines)


@contextlib.contextmanager
def serving(*arguments: str, **options: object) -> Iterator[ServeProcess]:
    """``with serving("--launcher", "local") as server``."""
    with ServeProcess(*arguments, **options) as server:  # type: ignore[arg-type]
        yield server

"""Servers to measure: started, waited for, their processes' CPU and memory read, and stopped. Linux only."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """Of a server's processes at one moment."""

    cpu: Mapping[str, float]
    """Seconds by role."""
    resident: Mapping[str, int]
    """Bytes by role, shared pages counted once each (PSS)."""


class Server:
    """A running server. ``roles`` name its processes by a word of their command lines; others are "other"."""

    def __init__(
        self, name: str, model: str, port: int, process: subprocess.Popen[bytes], roles: Sequence[str]
    ) -> None:
        self.name, self.model, self.host, self.port = name, model, "127.0.0.1", port
        self._process, self._roles = process, roles

    def usage(self) -> Usage:
        """CPU seconds and memory so far."""
        return usage_of(self._process.pid, self._roles)

    def wait(self, seconds: float) -> float:
        """Wait until it answers; returns how long that took. Raises SystemExit when it ends or takes longer."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if self._process.poll() is not None:
                raise SystemExit(f"{self.name} ended with {self._process.returncode} before it was ready")
            if self._answers():
                return time.monotonic() - began
            time.sleep(0.1)
        raise SystemExit(f"{self.name} was not ready after {seconds:.0f} s")

    def _answers(self) -> bool:
        try:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def usage_of(pid: int, roles: Sequence[str]) -> Usage:
    """Of a process and all below it, by the role whose word is in its command line; others are "other"."""
    cpu: dict[str, float] = {}
    resident: dict[str, int] = {}
    for each in _family(pid):
        try:
            words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            memory = _pss(each)
        except OSError:
            continue  # it ended
        role = next((role for role in roles if role.encode() in words), "other")
        cpu[role] = cpu.get(role, 0.0) + (int(fields[11]) + int(fields[12])) / _TICKS
        resident[role] = resident.get(role, 0) + memory
    return Usage(cpu, resident)


@contextmanager
def started(
    name: str,
    model: str,
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    roles: Sequence[str] = (),
    seconds: float = 600,
) -> Iterator[Server]:
    """A server from its command, in which ``{port}`` stands for a free port; it is gone afterwards."""
    port = _free_port()
    words = [word.replace("{port}", str(port)) for word in command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            server = Server(name, model, port, process, roles)
            took = server.wait(seconds)
            print(f"{name}: ready after {took:.1f} s")
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    waiting = [pid]
    while waiting:
        yield (one := waiting.pop())
        waiting += children.get(one, [])


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

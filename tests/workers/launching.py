"""A launcher process under test, the lease its ranks hold, and waiting for processes to be gone."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from workers.launchers.settings import LauncherSettings

WAIT = 30.0

MAIN = """
import logging, sys, msgspec
from workers.launchers.main import run
from workers.launchers.settings import LauncherSettings
logging.basicConfig(level=logging.INFO)
sys.exit(run(msgspec.json.decode(sys.argv[1], type=LauncherSettings)))
"""


@dataclass(frozen=True)
class Told:
    """A line a child said on its lease; ``{}`` is its end of file."""

    role: str
    name: str
    pid: int
    line: dict[str, Any]


class HeldLease:
    """The supervisor's socket: takes every child and keeps what they say, beats excepted."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def next_of(self, role: str, **fields: object) -> Told:
        """The next line of a role that has these fields."""
        while True:
            told = self.told.get(timeout=WAIT)
            if told.role == role and told.line.items() >= fields.items():
                return told

    def close(self) -> None:
        """Every child loses its lease."""
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            hello: dict[str, Any] = {}
            with contextlib.suppress(OSError):
                for raw in lines:
                    line = msgspec.json.decode(raw)
                    hello = hello or line
                    if "beat" not in line:
                        self.told.put(Told(hello["role"], hello["name"], hello["pid"], line))
            if hello:
                self.told.put(Told(hello["role"], hello["name"], hello["pid"], {}))


class LauncherProcess:
    """``workers.launchers.main`` as a process of its own."""

    def __init__(self, settings: LauncherSettings, environment: Mapping[str, str] | None = None) -> None:
        # A file, not a pipe: ranks that outlive their launcher hold it open.
        with tempfile.NamedTemporaryFile(prefix="launcher-", suffix=".log", delete=False) as errors:
            self._errors = Path(errors.name)
            self.process = subprocess.Popen(
                [sys.executable, "-c", MAIN, msgspec.json.encode(settings).decode()],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def signal(self, how: signal.Signals) -> None:
        self.process.send_signal(how)

    def wait(self) -> tuple[int, str]:
        """Exit status and what was written to stderr."""
        status = self.process.wait(WAIT)
        return status, self._errors.read_text()

    def end(self) -> None:
        """Whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT)
        self._errors.unlink(missing_ok=True)


class Pid:
    """A process that is not our child: safe to signal and to wait for, whatever becomes of its number."""

    def __init__(self, pid: int) -> None:
        self.number = pid
        self._descriptor = os.pidfd_open(pid)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, how)

    def wait_gone(self) -> bool:
        """Whether it ended in time."""
        return bool(select.select([self._descriptor], [], [], WAIT)[0])

    def alive(self) -> bool:
        return not select.select([self._descriptor], [], [], 0)[0]

"""The roles on encrypted TCP, as on several hosts, with a proxy on each of the two links."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from headrace.commands.keys import main as make_keys
from tests.end_to_end.serve_process import RunningServer, free_port, processes_mentioning
from tests.faults.proxy import Proxy

PEER_TIMEOUT = 2.0
"""Seconds; short, so that a test can outlast it."""


class NetworkedServer(RunningServer):
    """A scheduler, a frontend and a launcher with two groups, each started alone."""

    def __init__(self, directory: Path, script: Path) -> None:
        super().__init__(free_port())
        self._keys = directory / "keys"
        assert make_keys([str(self._keys)]) == 0
        self._frontend_port, self._worker_port = free_port(), free_port()
        self.frontend_link, self.worker_link = Proxy(self._frontend_port), Proxy(self._worker_port)
        self._script = script
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> NetworkedServer:
        scripted = ("--engine", "scripted", "--engine-script", str(self._script), "--launcher", "local")
        self._start(
            "scheduler",
            *("--frontend-bind", f"tcp://127.0.0.1:{self._frontend_port}"),
            *("--worker-bind", f"tcp://127.0.0.1:{self._worker_port}"),
        )
        model = ("--tokenizer", "byte", "--served-model-name", "networked")
        self._start(
            "frontend",
            *(*model, "--port", str(self.port)),
            *("--scheduler", f"tcp://127.0.0.1:{self.frontend_link.port}"),
        )
        self._start(
            "workers",
            *(*model, *scripted, "--groups", "2", "--max-num-seqs", "12"),
            *("--scheduler", f"tcp://127.0.0.1:{self.worker_link.port}"),
        )
        self.wait_until_it_answers()
        self.wait_for_groups(2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self.frontend_link.close()
        self.worker_link.close()
        left = processes_mentioning(self.marker)
        assert not left, f"left behind: {left}"

    def _start(self, role: str, *arguments: str) -> None:
        common = ("--keys", str(self._keys), "--peer-timeout", str(PEER_TIMEOUT))
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", role, *arguments, *common],
            env={**os.environ, "HEADRACE_TEST_MARKER": self.marker},
            stdin=subprocess.DEVNULL,
        )
        self._stack.callback(process.wait, 60)
        self._stack.callback(process.send_signal, signal.SIGTERM)

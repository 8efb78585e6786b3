"""A private Ray head on this host, and the guard process that owns it.

The launcher must not own Ray: it may die and come back. The supervisor must not be the only one who can end Ray: it may
be killed. So ``headrace ray-head`` starts ``ray start --head``, adopts whatever Ray's processes leave behind, and
ends them all when it is told to stop, when its lease is lost, or when Ray fails.

Knows nothing of actors or models.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headrace.lease import LeaseClient
from headrace.supervision.processes import become_subreaper, end_descendants

logger = logging.getLogger(__name__)

SLOT_RESOURCE = "headrace_slot"
"""What a rank on CPU asks Ray for, instead of CPUs: threads are counted by us."""
SLOTS = 1_000
OBJECT_STORE_BYTES = 100 * 1024 * 1024
TEMP_DIR_LIMIT = 40
"""Ray adds about 70 bytes of its own to make a socket path, and the kernel takes 107."""
LAST_WORDS_SECONDS = 2.0
"""How long the output of a Ray that has ended is waited for."""

TURN_SECONDS = 1.0


class RayHeadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the guard is told."""

    directory: str
    """Absolute and private; the guard makes it and removes it. Holds the token and Ray's temporary directory."""
    lease: str = ""
    name: str = "ray-head"
    num_cpus: int = 1
    """How many worker processes Ray keeps warm."""


def ray_environment(directory: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment in which Ray's own processes and its clients agree on the token; other clusters are forgotten."""
    kept = {key: value for key, value in environment.items() if key not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    return {
        **kept,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(Path(directory) / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def start_command(temp_dir: Path, num_cpus: int) -> list[str]:
    """``ray start`` for a head that serves one host: no dashboard, autoscaler or log collector."""
    return [
        *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        "--port=0",
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--no-monitor",
        "--disable-usage-stats",
        f"--num-cpus={num_cpus}",
        f'--resources={{"{SLOT_RESOURCE}": {SLOTS}}}',
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--temp-dir={temp_dir}",
    ]


def run(settings: RayHeadSettings) -> int:
    """Guard a head until it ends or is told to end; returns the exit status."""
    return _Guard(settings).run()


class _Guard:
    def __init__(self, settings: RayHeadSettings) -> None:
        self._directory = Path(settings.directory)
        self._settings = settings
        self._ends: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Reasons to end; its ``put`` may be called in a signal handler."""
        self._last_lines: deque[str] = deque(maxlen=20)
        self._turns = 0

    def run(self) -> int:
        become_subreaper()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: self._ends.put("stopped"))
        lease = LeaseClient(
            self._settings.lease,
            role="ray-head",
            name=self._settings.name,
            on_lost=lambda: self._ends.put("stopped"),
            progress=lambda: self._turns,
        )
        try:
            lease.report("starting")
            reason = self._guard(lease)
            if reason != "stopped":
                lease.report("failed", message=reason)
                logger.error("%s", reason)
            return 0 if reason == "stopped" else 1
        finally:
            lease.close()

    def _guard(self, lease: LeaseClient) -> str:
        try:
            self._write_token()
            process = subprocess.Popen(
                start_command(self._directory / "ray", self._settings.num_cpus),
                cwd=self._directory,
                env=ray_environment(str(self._directory), os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            reader = threading.Thread(target=self._read, args=(process, lease), daemon=True)
            reader.start()
            threading.Thread(target=self._wait, args=(process, reader), daemon=True).start()
            return self._next_end()
        except OSError as error:
            return f"cannot start Ray: {error}"
        finally:
            end_descendants()  # at once: on SIGTERM Ray would drain its node for 30 s
            shutil.rmtree(self._directory, ignore_errors=True)

    def _next_end(self) -> str:
        while True:
            self._turns += 1
            with contextlib.suppress(queue.Empty):
                return self._ends.get(timeout=TURN_SECONDS)

    def _write_token(self) -> None:
        if len(os.fsencode(self._directory / "ray")) > TEMP_DIR_LIMIT:
            raise OSError(f"{self._directory}/ray is longer than the {TEMP_DIR_LIMIT} bytes Ray allows")
        self._directory.mkdir(mode=0o700)
        descriptor = os.open(self._directory / "token", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))

    def _read(self, process: subprocess.Popen[str], lease: LeaseClient) -> None:
        """Drain Ray's output; the address file is there before the lines that praise the new cluster."""
        assert process.stdout is not None
        address = ""
        for line in process.stdout:
            self._last_lines.append(line.strip())
            logger.debug("%s", line.rstrip())
            if not address and (address := self._address()):
                lease.report("ready", address=address)

    def _address(self) -> str:
        try:
            return (self._directory / "ray" / "ray_current_cluster").read_text().strip()
        except FileNotFoundError:
            return ""

    def _wait(self, process: subprocess.Popen[str], reader: threading.Thread) -> None:
        status = process.wait()
        reader.join(LAST_WORDS_SECONDS)  # not for ever: a daemon that it left behind may hold the pipe open
        last = next((line for line in reversed(self._last_lines) if line), "it said nothing")
        self._ends.put(f"Ray ended with status {status}: {last}")

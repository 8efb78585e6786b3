"""Ranks as subprocesses of this host.

A rank lives by its own lease, so it survives this launcher. The next launcher finds it again in a small state file and
watches it like a child of its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from protocol.ids import GroupId, Incarnation
from workers.launchers.base import Deliver, Launch, LaunchError, RankEnded
from workers.options import WorkerOptions
from workers.rank import OPTIONS_VARIABLE
from workers.threads import limited_environment, threads_for_rank

COMMAND = (sys.executable, "-P", "-m", "headrace", "worker-rank")
"""-P: the folder one happens to stand in must not shadow our packages."""


class RankRecord(msgspec.Struct, frozen=True):
    """One running rank, as the state file has it."""

    group: str
    incarnation: int
    tp: int
    rank: int
    pid: int
    started: int
    """Clock ticks since boot at the process's start: a pid alone may come to name another process."""


@dataclass
class _Rank:
    record: RankRecord
    process: subprocess.Popen[bytes] | None
    """None for a rank that an earlier launcher started."""

    def signal(self, how: signal.Signals) -> None:
        """Signal the process unless it is gone; never another one that was given its pid."""
        if self.process is not None:
            self.process.send_signal(how)  # does nothing once the process was waited for
        elif started_at(self.record.pid) == self.record.started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.record.pid, how)


class LocalLauncher:
    """Subprocesses, each watched by a thread of its own.

    ``ranks_on_host`` is how many ranks share this machine's cores. An empty ``state_file`` keeps no state.
    """

    def __init__(
        self,
        deliver: Deliver,
        *,
        ranks_on_host: int,
        state_file: str = "",
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._deliver = deliver
        self._ranks_on_host = ranks_on_host
        self._state_file = Path(state_file) if state_file else None
        self._command = tuple(command)
        self._ranks: dict[tuple[int, int], _Rank] = {}
        """(incarnation, rank) → a rank whose end was not told yet."""
        self._lock = threading.Lock()
        self._timers: list[threading.Timer] = []

    def adopt(self) -> list[Launch]:
        """Complete launches of the state file; what is left of incomplete ones is killed."""
        living = [record for record in self._read_state() if started_at(record.pid) == record.started]
        launches = []
        for launch in dict.fromkeys(_launch_of(record) for record in living):
            records = [record for record in living if _launch_of(record) == launch]
            if len(records) == launch.tp:
                launches.append(launch)
            for record in records:
                self._watch(_Rank(record, None))
            if launch not in launches:
                self._signal_launch(launch, signal.SIGKILL)
        return launches

    def launch(self, ranks: Sequence[WorkerOptions]) -> None:
        """Start every rank, or none."""
        started: list[_Rank] = []
        for options in ranks:
            try:
                process = self._start(options)
            except OSError as error:
                for rank in started:
                    assert rank.process is not None
                    rank.process.kill()
                    rank.process.wait()
                raise LaunchError(f"cannot start a worker process: {error}") from error
            record = RankRecord(
                options.group, options.incarnation, options.tp, options.rank, process.pid, started_at(process.pid)
            )
            started.append(_Rank(record, process))
        for rank in started:
            self._watch(rank)

    def end(self, launch: Launch, grace: float) -> None:
        """Signal the ranks that are left; a timer kills them after the grace."""
        self._signal_launch(launch, signal.SIGTERM if grace > 0 else signal.SIGKILL)
        if grace > 0:
            timer = threading.Timer(grace, self._signal_launch, (launch, signal.SIGKILL))
            timer.daemon = True
            timer.start()
            self._timers.append(timer)

    def close(self) -> None:
        """Forget the timers; the threads that watch are daemons."""
        for timer in self._timers:
            timer.cancel()

    def _start(self, options: WorkerOptions) -> subprocess.Popen[bytes]:
        threads = threads_for_rank(options.threads, self._ranks_on_host)
        encoded = msgspec.json.encode(msgspec.structs.replace(options, threads=threads)).decode()
        # A session of its own: a signal to the launcher's terminal or group is not the ranks'.
        return subprocess.Popen(
            self._command,
            env={**limited_environment(os.environ, threads), OPTIONS_VARIABLE: encoded},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _watch(self, rank: _Rank) -> None:
        with self._lock:
            self._ranks[rank.record.incarnation, rank.record.rank] = rank
            self._write_state()
        threading.Thread(target=self._wait, args=(rank,), name="headrace-sentinel", daemon=True).start()

    def _wait(self, rank: _Rank) -> None:
        """A rank's sentinel: returns when the process is gone, and tells."""
        record = rank.record
        status: int | None = None
        if rank.process is None:
            _wait_for_pid(record.pid)
            cause = f"rank {record.rank} ended"
        else:
            status = rank.process.wait()
            cause = f"rank {record.rank} {_describe(status)}"
        with self._lock:
            del self._ranks[record.incarnation, record.rank]
            self._write_state()
        self._deliver(RankEnded(GroupId(record.group), Incarnation(record.incarnation), record.rank, cause, status))

    def _signal_launch(self, launch: Launch, how: signal.Signals) -> None:
        with self._lock:
            for rank in self._ranks.values():
                if rank.record.incarnation == launch.incarnation:
                    rank.signal(how)

    def _read_state(self) -> list[RankRecord]:
        if self._state_file is None:
            return []
        try:
            return msgspec.json.decode(self._state_file.read_bytes(), type=list[RankRecord])
        except (FileNotFoundError, msgspec.DecodeError):
            return []

    def _write_state(self) -> None:
        if self._state_file is None:
            return
        records = [rank.record for rank in self._ranks.values()]
        new = self._state_file.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(records))
        new.replace(self._state_file)


def started_at(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 when it is gone, a zombie, or the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return int(fields[19]) if fields[0] not in "ZX" else -1


def _launch_of(record: RankRecord) -> Launch:
    return Launch(GroupId(record.group), Incarnation(record.incarnation), record.tp)


def _wait_for_pid(pid: int) -> None:
    """Wait for a process that is not our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)


def _describe(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    names = {int(number): number.name for number in signal.Signals}
    return f"was killed by {names.get(-status, f'signal {-status}')}"

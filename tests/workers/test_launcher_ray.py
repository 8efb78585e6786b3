"""Ranks as real Ray actors on a private head: never skipped."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from headrace.supervision.ray_head import RayHeadSettings, ray_environment
from protocol.worker import GroupDown, GroupUp, KillGroup
from tests.end_to_end.serve_process import processes_mentioning, shared_memory
from tests.workers.hand_driven import HandDrivenScheduler
from tests.workers.launching import WAIT, HeldLease, LauncherProcess, Pid
from workers.launchers.settings import LauncherSettings

pytestmark = pytest.mark.slow

NAMESPACE = "headrace-test"

HEAD = """
import sys, msgspec
from headrace.supervision.ray_head import RayHeadSettings, run
sys.exit(run(msgspec.json.decode(sys.argv[1], type=RayHeadSettings)))
"""

REAP = """
import json, sys
import ray
from ray.util import list_named_actors, placement_group_table
from workers.launchers.ray_launcher import connect, reap
connect(sys.argv[1], sys.argv[2])
before = list_named_actors()
reaped = reap(sys.argv[2])
states = [entry["state"] for entry in placement_group_table().values()]
print(json.dumps([before, reaped, list_named_actors(), states]))
"""


@dataclass
class Head:
    """A running private head."""

    directory: Path
    address: str
    lease: HeldLease
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        return ray_environment(str(self.directory), {})

    def run(self, code: str, *arguments: str) -> str:
        """Run a Ray driver to its end; returns what it printed."""
        finished = subprocess.run(
            [sys.executable, "-c", code, self.address, *arguments],
            env={**self.environment, "PATH": ""},
            capture_output=True,
            text=True,
            timeout=WAIT,
        )
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    def stop(self) -> None:
        """End it the way a supervisor does."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WAIT) == 0


@pytest.fixture
def head() -> Iterator[Head]:
    directory = Path(tempfile.mkdtemp(prefix="hrt-", dir="/tmp"))
    lease = HeldLease(directory / "lease")
    settings = RayHeadSettings(directory=str(directory / "h"), lease=lease.path)
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD, msgspec.json.encode(settings).decode()], stdin=subprocess.DEVNULL
    )
    try:
        address = lease.next_of("ray-head", state="ready").line["address"]
        yield Head(directory / "h", address, lease, process)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(WAIT)
        lease.close()
        shutil.rmtree(directory, ignore_errors=True)


def test_a_group_of_ray_actors_serves_dies_is_adopted_and_leaves_nothing(head: Head, tmp_path: Path) -> None:
    before = shared_memory()
    tmp_path.chmod(0o700)
    scheduler = HandDrivenScheduler(f"ipc://{tmp_path}/workers")
    lease = HeldLease(tmp_path / "lease")
    settings = LauncherSettings(
        kind="ray",
        model="none",
        served_model_name="org/m",
        engine="scripted",
        tokenizer="byte",
        scheduler=f"ipc://{tmp_path}/workers",
        lease=lease.path,
        ray_address=head.address,
        ray_namespace=NAMESPACE,
    )

    # It serves.
    launcher = LauncherProcess(settings, head.environment)
    peer = scheduler.open_launcher()
    up = scheduler.next_of(GroupUp)[1]
    group = scheduler.open_group()
    assert group.register.incarnation == up.incarnation
    group.add(0, list(b"prompt"))
    assert group.done()[2] == [ord("T")]
    rank = Pid(lease.next_of("rank", state="ready").pid)

    # A killed actor is announced and replaced, and so is one that the scheduler gives up.
    rank.kill()
    down = scheduler.next_of(GroupDown)[1]
    assert (down.incarnation, down.cause.startswith("rank 0 died: ")) == (up.incarnation, True)
    group = scheduler.open_group()
    assert group.register.incarnation != up.incarnation
    scheduler.send(peer, KillGroup("g0", group.incarnation, "overdue"))
    assert scheduler.next_of(GroupDown)[1].cause == "killed: overdue"
    lease.next_of("rank", state="ready")
    group = scheduler.open_group()
    rank = Pid(lease.next_of("rank", state="ready").pid)

    # It outlives its launcher, and the next launcher takes it over.
    launcher.signal(signal.SIGKILL)
    launcher.wait()
    launcher.end()
    group.add(0, list(b"prompt"))
    assert group.done()[2] == [ord("T")]
    launcher = LauncherProcess(settings, head.environment)
    scheduler.open_launcher()
    assert scheduler.next_of(GroupUp)[1].incarnation == group.incarnation
    assert rank.alive()
    rank.kill()
    assert scheduler.next_of(GroupDown)[1].incarnation == group.incarnation
    group = scheduler.open_group()

    # Told to stop, a launcher ends its ranks; a killed one leaves them to the reaper.
    rank = Pid(lease.next_of("rank", state="ready").pid)
    launcher.signal(signal.SIGTERM)
    status, errors = launcher.wait()
    launcher.end()
    assert status == 0 and rank.wait_gone(), errors
    launcher = LauncherProcess(settings, head.environment)
    group = scheduler.open_group()
    rank = Pid(lease.next_of("rank", state="ready").pid)
    launcher.signal(signal.SIGKILL)
    launcher.wait()
    launcher.end()
    names, reaped, left, placements = json.loads(head.run(REAP, NAMESPACE))
    assert names == [f"org%2Fm/g0/{group.incarnation}/0"]
    assert (reaped, left, set(placements)) == (1, [], {"REMOVED"})
    assert rank.wait_gone()

    head.stop()
    lease.close()
    scheduler.close()
    assert not processes_mentioning(str(head.directory))
    assert not head.directory.exists()
    assert shared_memory() <= before

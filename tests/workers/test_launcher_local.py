"""Ranks as subprocesses: started, started again after a death, taken over, and never left behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol.worker import GroupDown, GroupUp, KillGroup, Register, SetGroups, Stop
from tests.workers.hand_driven import HandDrivenScheduler
from tests.workers.launching import HeldLease, LauncherProcess, Pid
from workers.launchers.settings import LauncherSettings
from workers.rank import EXIT_UNUSABLE

pytestmark = pytest.mark.slow

START = [*b"prompt"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def scheduler(directory: Path) -> Iterator[HandDrivenScheduler]:
    scheduler = HandDrivenScheduler(f"ipc://{directory}/workers")
    yield scheduler
    scheduler.close()


@pytest.fixture
def lease(directory: Path) -> Iterator[HeldLease]:
    lease = HeldLease(directory / "lease")
    yield lease
    lease.close()


@pytest.fixture
def start(directory: Path, lease: HeldLease) -> Iterator[Callable[..., LauncherProcess]]:
    """Start a launcher; at the end of the test every rank that ever was must be gone."""
    processes: list[LauncherProcess] = []
    script = directory / "script.jsonl"
    script.write_text(json.dumps({"text": "ok", "fault": {"at_index": 1, "kind": "hang"}}) + "\n")

    def start(**changes: object) -> LauncherProcess:
        settings = LauncherSettings(
            kind="local",
            model="none",
            served_model_name="org/m",
            engine="scripted",
            engine_script=str(script),
            tokenizer="byte",
            scheduler=f"ipc://{directory}/workers",
            lease=lease.path,
        )
        fields = {**{name: getattr(settings, name) for name in settings.__struct_fields__}, **changes}
        processes.append(LauncherProcess(LauncherSettings(**fields)))  # type: ignore[arg-type]
        return processes[-1]

    yield start
    for process in processes:
        process.end()


def rank_pid(lease: HeldLease) -> Pid:
    return Pid(lease.next_of("rank", state="ready").pid)


def test_a_rank_that_dies_is_announced_and_launched_again(scheduler, lease, start) -> None:
    start()
    scheduler.open_launcher()
    up = scheduler.next_of(GroupUp)[1]
    assert (up.group, up.model) == ("g0", "org/m")
    group = scheduler.open_group()
    assert group.register.incarnation == up.incarnation
    group.add(0, START)
    assert group.done()[2] == [ord("o")]

    first = rank_pid(lease)
    first.kill()
    down = scheduler.next_of(GroupDown)[1]
    assert (down.group, down.incarnation) == ("g0", up.incarnation)
    assert down.cause == "rank 0 was killed by SIGKILL"
    again = scheduler.next_of(GroupUp)[1]
    assert again.group == "g0" and again.incarnation != up.incarnation
    assert scheduler.open_group().register.incarnation == again.incarnation


def test_a_hanging_rank_goes_when_the_scheduler_gives_it_up(scheduler, lease, start) -> None:
    start()
    launcher = scheduler.open_launcher()
    group = scheduler.open_group()
    rank = rank_pid(lease)
    group.add(0, START)
    group.done()
    group.plan()
    scheduler.send(launcher, KillGroup("g0", group.incarnation, "step 2 is overdue"))
    assert scheduler.next_of(GroupDown)[1].cause == "killed: step 2 is overdue"
    assert rank.wait_gone()
    assert scheduler.next_of(GroupUp)[1].incarnation != group.incarnation


def test_the_number_of_groups_follows_the_scheduler(scheduler, lease, start) -> None:
    start()
    launcher = scheduler.open_launcher()
    scheduler.open_group(where=lambda register: register.group == "g0")
    scheduler.send(launcher, SetGroups("org/m", 2))
    scheduler.open_group(where=lambda register: register.group == "g1")
    scheduler.send(launcher, SetGroups("org/m", 1))
    down = scheduler.next_of(GroupDown)[1]
    assert (down.group, down.cause) == ("g1", "stopped")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_is_told_to_stop_ends_its_ranks(scheduler, lease, start, how) -> None:
    process = start(groups=2)
    scheduler.open_launcher()
    scheduler.open_group(), scheduler.open_group()
    ranks = [rank_pid(lease) for _ in range(2)]
    process.signal(how)
    assert process.wait()[0] == 0
    assert all(rank.wait_gone() for rank in ranks)
    assert {scheduler.next_of(GroupDown)[1].group for _ in range(2)} == {"g0", "g1"}


def test_the_schedulers_stop_ends_launcher_and_ranks(scheduler, lease, start) -> None:
    process = start()
    launcher = scheduler.open_launcher()
    group = scheduler.open_group()
    rank = rank_pid(lease)
    group.send(Stop("unloaded"))
    assert rank.wait_gone()
    assert scheduler.next_of(GroupDown)[1].cause == "rank 0 exited with status 0"
    scheduler.send(launcher, Stop())
    assert process.wait()[0] == 0


def test_ranks_outlive_their_launcher_and_the_next_one_takes_them_over(scheduler, lease, start) -> None:
    process = start()
    scheduler.open_launcher()
    group = scheduler.open_group()
    rank = rank_pid(lease)
    process.signal(signal.SIGKILL)
    process.wait()
    group.add(0, START)
    assert group.done()[2] == [ord("o")], "it serves without a launcher"

    second = start()
    scheduler.open_launcher()
    up = scheduler.next_of(GroupUp)[1]
    assert up.incarnation == group.incarnation and rank.alive()
    rank.kill()
    assert scheduler.next_of(GroupDown)[1].cause == "rank 0 ended"
    assert scheduler.next_of(GroupUp)[1].incarnation != group.incarnation
    scheduler.open_group()
    last = rank_pid(lease)
    second.signal(signal.SIGTERM)
    assert second.wait()[0] == 0 and last.wait_gone()


def test_nothing_outlives_the_lease(scheduler, lease, start) -> None:
    process = start()
    scheduler.open_launcher()
    scheduler.open_group()
    rank = rank_pid(lease)
    lease.close()
    assert rank.wait_gone()
    assert process.wait()[0] == 0


def test_what_can_never_work_ends_the_launcher_with_one_line(scheduler, lease, start, directory) -> None:
    process = start(engine_script=str(directory / "absent"))
    told = lease.next_of("rank", state="failed")
    assert told.line["message"] == f"cannot read the engine script {directory}/absent: No such file or directory"
    status, errors = process.wait()
    assert status == EXIT_UNUSABLE
    assert "Traceback" not in errors


def test_a_tensor_parallel_group_is_refused_for_now(lease, start) -> None:
    process = start(tp=2)
    message = lease.next_of("rank", state="failed").line["message"]
    assert message == "tensor parallel groups are not supported yet: tp is 2, use 1"
    assert process.wait()[0] == EXIT_UNUSABLE


def test_a_scheduler_that_comes_late_hears_of_every_group(scheduler, lease, start) -> None:
    start()
    lease.next_of("rank", state="loading", stage="registering")
    launcher = scheduler.open_launcher()
    assert scheduler.next_of(GroupUp)[0] == launcher
    assert isinstance(scheduler.expect(Register), Register)

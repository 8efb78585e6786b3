"""Parent and child notice each other's end, whoever goes first and however."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.lease import (
    LINE_LIMIT,
    OUTBOX_LIMIT,
    LeaseClient,
    LeaseEvent,
    LeaseEventKind,
    LeaseServer,
    StallWatch,
)

WAIT = 10.0


class Supervisor:
    def __init__(self, path: str) -> None:
        self.path = path
        self.events: asyncio.Queue[LeaseEvent] = asyncio.Queue()
        self.server = LeaseServer(self.events.put_nowait)

    async def next_of(self, *kinds: LeaseEventKind) -> LeaseEvent:
        while True:
            event = await asyncio.wait_for(self.events.get(), WAIT)
            if event.kind in kinds:
                return event


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(str(tmp_path / "lease"))
    await supervisor.server.start(supervisor.path)
    yield supervisor
    await supervisor.server.close()


class Child:
    """A client in this process."""

    def __init__(self, path: str, beat_seconds: float = 1.0) -> None:
        self.lost = threading.Event()
        self.turns = 7
        self.client = LeaseClient(
            path,
            role="rank",
            name="m/g0/1/0",
            on_lost=self.lost.set,
            progress=lambda: self.turns,
            beat_seconds=beat_seconds,
        )

    async def wait_lost(self) -> bool:
        return await asyncio.get_running_loop().run_in_executor(None, self.lost.wait, WAIT)


async def test_a_child_says_who_it_is_and_what_it_does(supervisor: Supervisor) -> None:
    child = Child(supervisor.path)
    child.client.report("loading", stage="loading weights", fraction=0.5)
    hello = await supervisor.next_of(LeaseEventKind.HELLO)
    assert (hello.role, hello.name, hello.pid) == ("rank", "m/g0/1/0", os.getpid())
    state = await supervisor.next_of(LeaseEventKind.STATE)
    assert state.details == {"state": "loading", "stage": "loading weights", "fraction": 0.5}
    child.client.close()
    assert (await supervisor.next_of(LeaseEventKind.GONE)).name == "m/g0/1/0"
    assert not child.lost.is_set()


async def test_beats_carry_the_main_loops_counter(supervisor: Supervisor) -> None:
    child = Child(supervisor.path, beat_seconds=0.01)
    assert (await supervisor.next_of(LeaseEventKind.BEAT)).details == {"beat": 7}
    child.turns = 8
    while (await supervisor.next_of(LeaseEventKind.BEAT)).details != {"beat": 8}:
        pass
    child.client.close()


async def test_the_last_report_leaves_before_the_end(supervisor: Supervisor) -> None:
    child = Child(supervisor.path)
    child.client.report("failed", message="the model is missing")
    await asyncio.get_running_loop().run_in_executor(None, child.client.close)
    state = await supervisor.next_of(LeaseEventKind.STATE, LeaseEventKind.GONE)
    assert state.details == {"state": "failed", "message": "the model is missing"}


async def test_a_supervisor_that_closes_ends_its_children(supervisor: Supervisor) -> None:
    child = Child(supervisor.path)
    await supervisor.next_of(LeaseEventKind.HELLO)
    await supervisor.server.close()
    assert await child.wait_lost()
    assert not Path(supervisor.path).exists()


async def test_a_supervisor_that_was_never_there_is_a_lost_lease(tmp_path: Path) -> None:
    assert await Child(str(tmp_path / "nobody")).wait_lost()


def test_an_empty_path_is_a_lease_that_does_nothing() -> None:
    child = Child("")
    child.client.report("ready")
    child.client.close()
    assert not child.lost.is_set()


async def test_a_killed_child_is_seen_and_named_by_the_pid_the_kernel_knows(supervisor: Supervisor) -> None:
    code = (
        "import sys, threading\n"
        "from headrace.lease import LeaseClient\n"
        "LeaseClient(sys.argv[1], role='frontend', name='f0', on_lost=lambda: None, progress=lambda: 0)\n"
        "threading.Event().wait()\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, supervisor.path)
    hello = await supervisor.next_of(LeaseEventKind.HELLO)
    assert hello.pid == process.pid
    process.send_signal(signal.SIGKILL)
    assert (await supervisor.next_of(LeaseEventKind.GONE)).pid == process.pid
    await process.wait()


async def test_junk_has_no_effect_but_is_counted(supervisor: Supervisor) -> None:
    junk = [b"\n", b"{}\n", b"[1]\n", b"\xff\xfe\n", b"[" * 5000 + b"\n", b'{"state":"ready"}\n', b'{"role":1}\n']
    reader, writer = await asyncio.open_unix_connection(supervisor.path)
    writer.writelines([*junk, b"x" * (3 * LINE_LIMIT) + b"\n"])
    writer.write(b'{"role":"rank","name":"n","pid":1}\n{"beat":"soon"}\n{"state":"ready"}\n')
    assert (await supervisor.next_of(LeaseEventKind.HELLO)).pid == os.getpid()
    assert (await supervisor.next_of(LeaseEventKind.STATE)).details == {"state": "ready"}
    assert supervisor.server.statistics().junk >= len(junk) + 2
    writer.close()
    await supervisor.next_of(LeaseEventKind.GONE)
    assert supervisor.server.statistics().children == 0
    assert not await reader.read()


def test_a_supervisor_that_does_not_read_costs_bounded_memory_and_never_blocks(tmp_path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "lease"))
        listener.listen()
        child = Child(str(tmp_path / "lease"), beat_seconds=0.001)
        for _ in range(10_000):
            child.client.report("loading", message="x" * 10_000)
        assert len(child.client._outbox) <= OUTBOX_LIMIT
        assert not child.lost.is_set()
        listener.accept()[0].close()
        assert child.lost.wait(WAIT)


def event(kind: LeaseEventKind, pid: int = 5, **details: object) -> LeaseEvent:
    return LeaseEvent("frontend", "f0", pid, kind, dict(details))


def test_a_loop_that_stands_still_is_stalled() -> None:
    watch = StallWatch(10.0)
    watch.observe(event(LeaseEventKind.STATE, state="ready"), 0.0)
    for second in range(30):
        watch.observe(event(LeaseEventKind.BEAT, beat=min(second, 15)), float(second))
        assert watch.stalled(float(second)) == ([5] if second > 25 else [])
    watch.observe(event(LeaseEventKind.GONE), 30.0)
    assert watch.stalled(60.0) == []


def test_a_loading_process_may_be_busy_for_long() -> None:
    watch = StallWatch(10.0)
    watch.observe(event(LeaseEventKind.STATE, state="loading"), 0.0)
    watch.observe(event(LeaseEventKind.BEAT, beat=0), 1.0)
    assert watch.stalled(100.0) == []
    watch.observe(event(LeaseEventKind.STATE, state="ready"), 100.0)
    watch.observe(event(LeaseEventKind.BEAT, beat=0), 101.0)
    assert watch.stalled(105.0) == []
    assert watch.stalled(112.0) == [5]


def test_a_ranks_long_step_is_left_to_the_scheduler() -> None:
    watch = StallWatch(10.0)
    for kind, details in ((LeaseEventKind.STATE, {"state": "ready"}), (LeaseEventKind.BEAT, {"beat": 0})):
        watch.observe(LeaseEvent("rank", "m/g0/1/0", 5, kind, details), 0.0)
    assert watch.stalled(100.0) == []


def test_a_pause_of_the_watcher_is_nobodys_stall() -> None:
    watch = StallWatch(10.0)
    watch.observe(event(LeaseEventKind.STATE, state="ready"), 0.0)
    watch.observe(event(LeaseEventKind.BEAT, beat=0), 0.0)
    watch.paused(300.0)
    assert watch.stalled(301.0) == []
    assert watch.stalled(311.0) == [5]

"""The scheduler as a process: what it imports, what it says, and how it ends."""

from __future__ import annotations

import asyncio
import queue
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from headrace.commands.trace import main as trace_command
from headrace.lease import LeaseEvent, LeaseServer
from protocol import codec
from protocol.base import Wire
from protocol.codec import Decoder
from protocol.frontend import Drain, Hello, Inquire, Phase, Told, Welcome
from protocol.keys import NullSecurity
from protocol.link import Opened, PeerLink, Received
from protocol.versions import NEWEST, OLDEST
from protocol.worker import Plan, Reset
from scheduler.loop import SchedulerLoop
from scheduler.main import run
from scheduler.metrics import metrics_server
from scheduler.outbox import ToLeader
from scheduler.settings import SchedulerSettings
from scheduler.trace import read_trace, replay
from tests.scheduler.fake_worker import register
from tests.scheduler.rig import submit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WAIT = 30
PROCESS = """
import sys, msgspec
from scheduler.main import run
from scheduler.settings import SchedulerSettings
status = run(msgspec.json.decode(sys.argv[1], type=SchedulerSettings))
heavy = {"torch", "ray", "transformers", "tokenizers", "fastapi", "uvicorn"} & sys.modules.keys()
sys.exit(f"imported {heavy}" if heavy else status)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def settings(directory: Path, **fields: Any) -> SchedulerSettings:
    return SchedulerSettings(frontend_bind=f"ipc://{directory}/f", worker_bind=f"ipc://{directory}/w", **fields)


def command(settings: SchedulerSettings) -> list[str]:
    return [sys.executable, "-c", PROCESS, msgspec.json.encode(settings).decode()]


@pytest.fixture
def process(directory: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command(settings(directory)), stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        yield process
        process.kill()


class Linked:
    """The real link of a peer, and what came over it."""

    def __init__(self, address: str, decoder: Decoder[Any], greet: Callable[[int], Wire]) -> None:
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.link = PeerLink(
            address,
            security=NullSecurity,
            decoder=decoder,
            greet=greet,
            deliver=lambda batch: [self.events.put(event) for event in batch] and None,
            progress=lambda: 0,
        )
        self.link.start()

    def opened(self) -> Opened:
        event = self.events.get(timeout=WAIT)
        assert isinstance(event, Opened)
        return event

    def next_of(self, kind: type) -> Any:
        while True:
            event = self.events.get(timeout=WAIT)
            if isinstance(event, Received) and isinstance(event.message, kind):
                return event.message


@pytest.fixture
def frontend(directory: Path) -> Iterator[Linked]:
    linked = Linked(f"ipc://{directory}/f", codec.scheduler_to_frontend, lambda nonce: Hello(nonce, 5, OLDEST, NEWEST))
    yield linked
    linked.link.close()


@pytest.fixture
def leader(directory: Path) -> Iterator[Linked]:
    linked = Linked(f"ipc://{directory}/w", codec.scheduler_to_leader, lambda nonce: replace(register(), nonce=nonce))
    yield linked
    linked.link.close()


def test_it_serves_without_heavy_imports_and_sigterm_drains_to_status_zero(process, frontend: Linked) -> None:
    assert isinstance(frontend.opened().welcome, Welcome)
    process.send_signal(signal.SIGTERM)
    assert frontend.next_of(Drain).remaining_ms == 30_000
    assert process.wait(WAIT) == 0, process.stderr.read()


def test_sigusr1_writes_a_trace_that_replays(directory: Path, frontend: Linked, leader: Linked) -> None:
    made = command(settings(directory, trace_dir=str(directory)))
    with subprocess.Popen(made, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        session = frontend.opened().session
        leader.opened()
        leader.next_of(Reset)
        assert frontend.link.send(submit(1), session)
        leader.next_of(Plan)
        process.send_signal(signal.SIGUSR1)
        assert frontend.link.send(Inquire(9, (1, 2)), session)
        (timeline,) = frontend.next_of(Told).timelines
        assert (timeline.rid, timeline.phase, timeline.prompt_tokens) == (1, Phase.PREFILL, 5)
        process.kill()
    (path,) = directory.glob("*.trace")
    header, entries = read_trace(path)
    assert any(
        isinstance(outgoing, ToLeader) and isinstance(outgoing.message, Plan) for outgoing in replay(header, entries)
    )
    assert trace_command([str(path), "--steps"]) == trace_command([str(path), "--replay"]) == 0


def test_a_second_signal_ends_at_once(process, frontend: Linked, leader: Linked) -> None:
    """The first waits for a request that nobody will finish."""
    session = frontend.opened().session
    leader.opened()
    leader.next_of(Reset)
    assert frontend.link.send(submit(1), session)
    leader.next_of(Plan)
    process.send_signal(signal.SIGTERM)
    frontend.next_of(Drain)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT) == 0


def test_a_busy_address_is_one_line_and_a_status(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert run(replace(settings(directory), worker_bind=address)) == 1
    error = capsys.readouterr().err
    assert address in error and error.count("\n") == 1


def test_an_open_network_needs_a_word(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(replace(settings(directory), frontend_bind="tcp://0.0.0.0:0")) == 1
    assert "--insecure-sockets" in capsys.readouterr().err


async def test_the_supervisor_hears_of_bound_sockets_and_its_end_is_the_schedulers(directory: Path) -> None:
    events: asyncio.Queue[LeaseEvent] = asyncio.Queue()
    server = LeaseServer(events.put_nowait)
    await server.start(directory / "lease")
    with_lease = settings(directory, lease=str(directory / "lease"), name="the-scheduler")
    process = await asyncio.create_subprocess_exec(*command(with_lease), cwd=ROOT)
    try:
        while (event := await asyncio.wait_for(events.get(), WAIT)).details.get("state") != "bound":
            pass
        assert (event.role, event.name) == ("scheduler", "the-scheduler")
        assert event.details["frontends"] == f"ipc://{directory}/f"
        await server.close()
        assert await asyncio.wait_for(process.wait(), WAIT) == 0
    finally:
        if process.returncode is None:
            process.kill()


def test_metrics_of_its_own(directory: Path) -> None:
    loop = SchedulerLoop(settings(directory))
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        text = ""
        with metrics_server("127.0.0.1", port, loop.published):
            while "headrace_requests_running 0.0" not in text:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT) as response:
                    text = response.read().decode()
    finally:
        loop.stop()
        thread.join(WAIT)
    assert "headrace_requests_waiting 0.0" in text and not thread.is_alive()

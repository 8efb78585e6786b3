"""A private Ray head tells its address, keeps strangers out, and leaves nothing behind however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from headrace.lease import LeaseEvent, LeaseEventKind, LeaseServer
from headrace.supervision.keeper import SETTINGS_VARIABLE, role_command
from headrace.supervision.ray_head import TEMP_DIR_LIMIT, RayHeadSettings, ray_environment, start_command
from headrace.supervision.run_directory import RunDirectory

DRIVER = """
import os, sys, ray
ray.init(address=sys.argv[1], namespace="headrace-test", log_to_driver=False, logging_level="ERROR")
actor = ray.remote(type("A", (), {"pid": lambda self: os.getpid()}))
actor = actor.options(name="a", lifetime="detached", num_cpus=0, resources={"headrace_slot": 1}).remote()
print(ray.get(actor.pid.remote()))
"""

STRANGER = """
import sys, ray
try:
    ray._raylet.GcsClient(address=sys.argv[1])  # a driver would try for half a minute
except ray.exceptions.AuthenticationError:
    print("refused")
"""


STRAYING_RAY = """
import os, signal, sys
directory = next(word for word in sys.argv if word.startswith("--temp-dir=")).partition("=")[2]
os.mkdir(directory)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    signal.pause()
with open(f"{directory}/ray_current_cluster", "w") as file:
    file.write("10.1.2.3:4567")
print("praise", flush=True)
signal.pause()
"""


def fake_ray(directory: Path, program: str) -> str:
    """A directory to import Ray's command from, which is this program."""
    package = directory / "ray" / "scripts"
    package.mkdir(parents=True)
    for name in ("__init__.py", "../__init__.py"):
        (package / name).touch()
    (package / "scripts.py").write_text(program)
    return str(directory)


class Head:
    """A guard process, and what it said on its lease."""

    def __init__(self, run: RunDirectory) -> None:
        self.directory = run.path / "ray"
        self.lease_path = run.path / "lease"
        self.leases = LeaseServer(self._on_event)
        self.states: dict[str, LeaseEvent] = {}
        self._changed = asyncio.Event()
        self.process: asyncio.subprocess.Process

    async def start(self, **environment: str) -> None:
        await self.leases.start(self.lease_path)
        settings = RayHeadSettings(directory=str(self.directory), lease=str(self.lease_path))
        self.process = await asyncio.create_subprocess_exec(
            *role_command("ray-head"),
            env={**os.environ, **environment, SETTINGS_VARIABLE: msgspec.json.encode(settings).decode()},
            process_group=0,
        )

    async def state(self, state: str) -> LeaseEvent:
        """What was reported with this state; waits for it."""
        while state not in self.states:
            self._changed.clear()
            await self._changed.wait()
        return self.states[state]

    async def ended(self) -> int:
        """Exit status, once nothing of the head is left."""
        status = await self.process.wait()
        assert not mentioning(str(self.directory))
        assert not self.directory.exists()
        return status

    def _on_event(self, event: LeaseEvent) -> None:
        if event.kind is LeaseEventKind.STATE:
            self.states[event.details["state"]] = event
            self._changed.set()


@asynccontextmanager
async def head(**environment: str) -> AsyncIterator[Head]:
    with RunDirectory() as run:
        head = Head(run)
        await head.start(**environment)
        try:
            yield head
        finally:
            with suppress(ProcessLookupError):
                head.process.terminate()
            await head.process.wait()
            await head.leases.close()


def mentioning(text: str) -> list[str]:
    """Command lines of live processes that hold the text there or in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if command and text.encode() in command + (entry / "environ").read_bytes():
                    found.append(command.replace(b"\0", b" ").decode())
    return found


async def connect(head: Head, program: str, environment: dict[str, str]) -> tuple[int, str]:
    """Run a client of the cluster; its exit status and what it printed."""
    address = (await head.state("ready")).details["address"]
    driver = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, address),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    out, _ = await driver.communicate()
    assert driver.returncode is not None
    return driver.returncode, out.decode().strip()


@pytest.mark.slow
async def test_a_head_serves_holders_of_its_token_and_ends_with_all_actors() -> None:
    shared_memory = set(os.listdir("/dev/shm"))  # noqa: PTH208
    async with head(RAY_ADDRESS="10.255.255.1:1") as ours:
        await ours.state("ready")
        token = ours.directory / "token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert stat.S_IMODE(ours.directory.stat().st_mode) == 0o700
        status, pid = await connect(ours, DRIVER, ray_environment(str(ours.directory), os.environ))
        assert status == 0 and Path(f"/proc/{pid}").exists()
        wrong = {**ray_environment(str(ours.directory), os.environ), "RAY_AUTH_TOKEN": "0" * 64}
        assert await connect(ours, STRANGER, wrong) == (0, "refused")
        ours.process.send_signal(signal.SIGTERM)
        assert await ours.ended() == 0
        assert not Path(f"/proc/{pid}").exists()
    assert set(os.listdir("/dev/shm")) <= shared_memory  # noqa: PTH208


@pytest.mark.slow
async def test_a_head_whose_supervisor_is_gone_ends() -> None:
    async with head() as ours:
        await ours.state("ready")
        await ours.leases.close()
        assert await ours.ended() == 0


async def test_whatever_ray_leaves_running_is_ended_with_it(tmp_path: Path) -> None:
    async with head(PYTHONPATH=fake_ray(tmp_path, STRAYING_RAY)) as ours:
        assert (await ours.state("ready")).details["address"] == "10.1.2.3:4567"
        ours.process.send_signal(signal.SIGTERM)
        assert await ours.ended() == 0


async def test_a_ray_that_fails_is_reported_in_its_own_words(tmp_path: Path) -> None:
    async with head(PYTHONPATH=fake_ray(tmp_path, "print('no room'); raise SystemExit(3)")) as ours:
        failed = await ours.state("failed")
        assert failed.details["message"] == "Ray ended with status 3: no room"
        assert await ours.ended() == 1


def test_rays_own_directory_fits_its_sockets() -> None:
    with RunDirectory() as run:
        assert len(os.fsencode(run.path / "ray" / "ray")) <= TEMP_DIR_LIMIT


def test_the_command_starts_no_dashboard_and_takes_free_ports() -> None:
    command = start_command(Path("/tmp/x"), 1)
    for flag in ("--block", "--port=0", "--include-dashboard=false", "--disable-usage-stats"):
        assert flag in command
    assert "--temp-dir=/tmp/x" in command


def test_the_environment_forgets_other_clusters() -> None:
    environment = ray_environment("/d", {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_TOKEN": "other", "HOME": "/h"})
    assert environment["RAY_AUTH_TOKEN_PATH"] == "/d/token"
    assert environment["HOME"] == "/h"
    assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN"} & set(environment)

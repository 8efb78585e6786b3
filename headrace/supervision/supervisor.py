"""Single-host supervision: starts every process of a server, keeps them running, and leaves nothing behind.

    run directory, listening port ─► scheduler · frontends · Ray head ─► launcher ─► ready ─► … ─► ended in order

Knows when processes start and end and what they say on the lease; knows nothing of requests or models.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import shutil
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

from headrace.command_line.flag_table import FLAG_VARIABLES
from headrace.command_line.roles import frontend_values, scheduler_values, workers_values
from headrace.command_line.serve_settings import ServeSettings, served_names
from headrace.lease import LeaseEvent, LeaseEventKind, LeaseServer, StallWatch
from headrace.model_files.artefact_error import ArtefactError
from headrace.supervision.announcer import Announcer
from headrace.supervision.keeper import Keeper, Launch, child_environment, role_command
from headrace.supervision.processes import become_subreaper, descendants, end_descendants, kill, reap_orphans
from headrace.supervision.ray_head import ray_environment
from headrace.supervision.readiness import RANK, Readiness
from headrace.supervision.run_directory import RunDirectory

T = TypeVar("T")

TURN_SECONDS = 1.0
PAUSE_SECONDS = 5.0
"""A turn that came this late means that we stood still, not our children."""
LAUNCHER_GRACE = 12.0
"""Longer than what a launcher gives its ranks."""
SCHEDULER_GRACE = 5.0
RAY_GRACE = 10.0
FRONTEND_MARGIN = 5.0
"""Seconds beyond the drain limit before a frontend is killed."""
START_ATTEMPTS = 3
"""How often a process may fail before the server has ever been ready."""


class ServeError(RuntimeError):
    """A server that cannot start; one line for people."""


async def serve(settings: ServeSettings, announcer: Announcer) -> None:
    """Serve until a signal says stop; raises ServeError when it cannot be done."""
    with RunDirectory() as run, listening(settings.host, settings.port) as listener:
        if not settings.asks_for_keys and not is_loopback(listener.getsockname()[0]):
            announcer.say(f"{settings.host} is open to the network and this server asks for no key")
        await Supervisor(settings, run, listener, announcer).run()


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """The one API socket, which all frontends accept on."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        why = "the port is in use; choose another with --port" if in_use else str(error.strerror).partition(" (")[0]
        raise ServeError(f"cannot listen on {host}:{port}: {why}") from None
    with listener:
        yield listener


def is_loopback(host: str) -> bool:
    """Whether only this host reaches an address."""
    return ipaddress.ip_address(host).is_loopback


class Supervisor:
    """One server's processes from start to end."""

    def __init__(
        self, settings: ServeSettings, run: RunDirectory, listener: socket.socket, announcer: Announcer
    ) -> None:
        self._settings = settings
        self._run_directory = run
        self._listener = listener
        self._announcer = announcer
        self._environment = child_environment(FLAG_VARIABLES)
        self._leases = LeaseServer(self._on_lease)
        self._lease_path = str(run.path / "lease")
        self._stalls = StallWatch()
        self._readiness = Readiness(frozenset(f"frontend-{index}" for index in range(settings.frontends)))
        self._was_ready = False
        self._rank_failures = 0
        self._last_message = ""
        self._stop = asyncio.Event()
        self._hurried = False
        self._failure = ""
        self._names = Latch[tuple[str, ...]]()
        self._ray_address = Latch[str]()
        self._ray_directory = str(run.path / "ray")
        self._telling: asyncio.Task[None] | None = None
        self._scheduler = self._keeper("scheduler", self._scheduler_launch)
        self._frontends = [
            self._keeper(name, partial(self._frontend_launch, name)) for name in sorted(self._readiness.frontends)
        ]
        self._launcher = self._keeper("launcher", self._launcher_launch)
        self._ray_head = self._keeper("ray-head", self._ray_head_launch) if settings.private_ray else None

    async def run(self) -> None:
        """The whole life. Raises ServeError when the server failed."""
        become_subreaper()
        await self._leases.start(self._lease_path)
        try:
            with self._signals():
                await self._supervise()
        finally:
            end_descendants()
        if self._failure:
            raise ServeError(self._failure)

    async def _supervise(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            helpers = [tasks.create_task(self._learn_names()), tasks.create_task(self._watch())]
            # Everything at once: a child waits only for what it cannot do without, in its own launch method.
            for keeper in self._keepers():
                tasks.create_task(keeper.run())
            await self._stop.wait()
            await self._shut_down()
            for helper in [*helpers, self._telling]:
                if helper is not None:
                    helper.cancel()

    # What is started, and how

    async def _learn_names(self) -> None:
        """The model's name is on every wire; finding it also finds out early that there is no such model."""
        try:
            self._names.set(await asyncio.to_thread(served_names, self._settings.given))
        except ArtefactError as error:
            self._fail(str(error))

    async def _scheduler_launch(self) -> Launch:
        values = scheduler_values(self._settings.given)
        # Frontends relay the scheduler's numbers.
        values = {key: value for key, value in values.items() if key not in ("metrics_port", "metrics_host")}
        sockets = {"frontend_bind": self._socket("frontends"), "worker_bind": self._socket("workers")}
        return Launch(role_command("scheduler"), {**values, **sockets, "lease": self._lease_path})

    async def _frontend_launch(self, name: str) -> Launch:
        names = await self._names.get()
        values = {
            **frontend_values(self._settings.given),
            "model": self._settings.model,
            "served_model_names": names,
            "scheduler": self._socket("frontends"),
            **self._metrics_port(name),
            "fd": self._listener.fileno(),
            "name": name,
            "lease": self._lease_path,
        }
        return Launch(role_command("frontend"), values, fds=(self._listener.fileno(),))

    def _metrics_port(self, frontend: str) -> dict[str, int]:
        """Each frontend has numbers of its own, and so a port of its own."""
        first = self._settings.given.get("metrics_port")
        return {} if first is None else {"metrics_port": first + int(frontend.rpartition("-")[2]) if first else 0}

    async def _ray_head_launch(self) -> Launch:
        shutil.rmtree(self._ray_directory, ignore_errors=True)
        values = {"directory": self._ray_directory, "lease": self._lease_path, "num_cpus": 1}
        return Launch(role_command("ray-head"), values)

    async def _launcher_launch(self) -> Launch:
        names = await self._names.get()
        values = {
            **workers_values(self._settings.given),
            "model": self._settings.model,
            "served_model_name": names[0],
            "kind": self._settings.launcher,
            "groups": self._settings.groups,
            "scheduler": self._socket("workers"),
            "lease": self._lease_path,
            "ray_address": self._settings.ray_address,
            # Our own name: on a shared cluster no other server's ranks are taken for ours.
            "ray_namespace": f"headrace-{self._run_directory.path.name}",
        }
        if self._ray_head is None:
            return Launch(role_command("workers"), values)
        # Ray's client takes as long to import as Ray to start: the launcher imports it and reads the address here.
        reader, writer = os.pipe()
        self._telling = asyncio.create_task(self._tell_ray_address(writer))
        return Launch(
            role_command("workers"),
            {**values, "ray_address": f"fd:{reader}"},
            fds=(reader,),
            handed_over=(reader,),
            environment=ray_environment(self._ray_directory, {}),
        )

    async def _tell_ray_address(self, writer: int) -> None:
        with open(writer, "wb", buffering=0) as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write((await self._ray_address.get()).encode())

    # What happens while it runs

    def _on_lease(self, event: LeaseEvent) -> None:
        self._stalls.observe(event, asyncio.get_running_loop().time())
        self._readiness.observe(event)
        if event.kind is LeaseEventKind.GONE and event.role == RANK:
            self._rank_gone(event)
        elif event.kind is LeaseEventKind.STATE:
            self._on_state(event)
        if not self._stop.is_set():
            self._announce()

    def _on_state(self, event: LeaseEvent) -> None:
        state, message = event.details["state"], str(event.details.get("message", ""))
        if event.role == "ray-head" and state == "ready":
            self._ray_address.set(str(event.details["address"]))
        if state != "failed" or self._stop.is_set():
            return
        if not self._was_ready and (event.role != RANK or event.details.get("unusable")):
            self._fail(message or f"{event.name} failed")
        else:
            self._last_message = message

    def _rank_gone(self, event: LeaseEvent) -> None:
        if self._was_ready or self._stop.is_set():
            return
        self._rank_failures += 1
        if self._rank_failures >= START_ATTEMPTS:
            why = self._last_message or "it said nothing; see the lines above"
            self._fail(f"a worker ended {self._rank_failures} times while it started: {why}")

    def _child_ended(self, keeper: Keeper, status: int) -> None:
        """A child ended without being asked to."""
        if keeper.backoff.failures >= START_ATTEMPTS and not self._was_ready:
            self._fail(f"{keeper.name} ended {keeper.backoff.failures} times while it started, with {_ending(status)}")
            return
        self._announcer.say(f"{keeper.name} ended with {_ending(status)}; starting it again")
        if keeper is self._ray_head:
            # Without its head a cluster is lost: end what the guard could not, and let the launcher begin afresh.
            self._ray_address.clear()
            kill(self._strays())
            self._launcher.kill()

    def _announce(self) -> None:
        if self._was_ready:
            return
        if not self._readiness.ready:
            self._announcer.progress(self._readiness.waiting_for())
            return
        self._was_ready = True
        host, port = self._listener.getsockname()[:2]
        groups = self._settings.groups
        detail = f"{_count(self._settings.frontends, 'frontend')}, {_count(groups, 'group')}, {self._settings.launcher}"
        url = f"{self._settings.scheme}://{_reachable(host)}:{port}"
        self._announcer.ready(self._names.value[0], url, detail, asks_for_keys=self._settings.asks_for_keys)

    async def _watch(self) -> None:
        """Once a second: kill children that stand still, collect orphans, show time passing."""
        clock = asyncio.get_running_loop().time
        turned = clock()
        while True:
            await asyncio.sleep(TURN_SECONDS)
            now = clock()
            if now - turned > PAUSE_SECONDS:
                self._stalls.paused(now)
            turned = now
            for pid in self._stalls.stalled(now):
                self._announcer.say(f"process {pid} stands still; killing it")
                kill({pid})
            if not any(keeper.spawning for keeper in self._keepers()):
                reap_orphans(self._kept())
            if not self._stop.is_set():
                self._announce()

    # How it ends

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._announcer.say("ending; once more to end at once")
            return
        self._hurried = True
        kill(descendants(os.getpid()))

    def _fail(self, why: str) -> None:
        if not self._failure:
            self._failure = why
        # Nobody is served yet: there is nothing to drain.
        self._hurried = self._hurried or not self._was_ready
        self._stop.set()

    async def _shut_down(self) -> None:
        """Frontends first: what is in flight still needs everything else. Ray last, when no rank needs it any more."""
        await self._end(self._settings.drain_timeout + FRONTEND_MARGIN, *self._frontends)
        await self._launcher.stop(self._launcher_grace())  # ends its ranks
        await self._end(SCHEDULER_GRACE, self._scheduler)
        await self._leases.close()  # ranks that no launcher ended do so now
        if self._ray_head is not None:
            await self._ray_head.stop(RAY_GRACE)

    def _launcher_grace(self) -> float:
        """On a cluster that is not ours the launcher must give its placements back, whatever the hurry."""
        owns_all = self._settings.launcher == "local" or self._settings.private_ray
        return 0.0 if self._hurried and owns_all else LAUNCHER_GRACE

    async def _end(self, grace: float, *keepers: Keeper) -> None:
        await asyncio.gather(*(keeper.stop(0.0 if self._hurried else grace) for keeper in keepers))

    # Small things

    def _keeper(self, name: str, prepare: Callable[[], Awaitable[Launch]]) -> Keeper:
        return Keeper(name, prepare, self._child_ended, self._environment)

    def _keepers(self) -> list[Keeper]:
        ray_head = [self._ray_head] if self._ray_head else []
        return [self._scheduler, *ray_head, *self._frontends, self._launcher]

    def _kept(self) -> set[int]:
        return {keeper.pid for keeper in self._keepers() if keeper.pid is not None}

    def _strays(self) -> set[int]:
        """Our descendants that are not below a child we keep."""
        kept = self._kept()
        return descendants(os.getpid()) - kept.union(*(descendants(pid) for pid in kept))

    def _socket(self, name: str) -> str:
        return f"ipc://{self._run_directory.path / name}"


class Latch(Generic[T]):
    """A value that is not there yet, and may go away again."""

    def __init__(self) -> None:
        self._there = asyncio.Event()
        self._values: list[T] = []

    def set(self, value: T) -> None:
        self._values = [value]
        self._there.set()

    def clear(self) -> None:
        self._values = []
        self._there.clear()

    async def get(self) -> T:
        """Waits for it."""
        await self._there.wait()
        return self.value

    @property
    def value(self) -> T:
        return self._values[0]


def _ending(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _reachable(host: str) -> str:
    """Where a listener on ``host`` is reached from here."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host

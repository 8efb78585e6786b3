"""The launcher process: keeps the wanted groups running and tells the scheduler of every launch's begin and end.

Serving does not need it: when it dies, ranks go on, and the next launcher takes them over. When it is told to stop it
ends its groups first.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from headrace.lease import LeaseClient
from protocol import codec
from protocol.ids import random_u64
from protocol.keys import KeysError
from protocol.link import LinkEvent, Opened, PeerLink, Received, Refused
from protocol.transport import AddressError
from protocol.versions import NEWEST, OLDEST
from protocol.worker import GroupDown, GroupUp, KillGroup, LauncherHello, SetGroups, Stop
from workers.launchers.base import Launcher, LauncherFailed, LaunchError, RankEnded
from workers.launchers.groups import STOP_GRACE, Action, Down, End, Groups, RestartPolicy, Start, Up
from workers.launchers.settings import LauncherSettings
from workers.rank import EXIT_FAILED, EXIT_LEASE_LOST, EXIT_STOPPED, EXIT_UNUSABLE

logger = logging.getLogger(__name__)

TURN_SECONDS = 1.0
END_SECONDS = STOP_GRACE + 5.0
"""How long a stopping launcher waits for its ranks; they are killed well before."""
LOST_SECONDS = 3.0
"""How long a launcher whose supervisor is gone may still tidy up; its ranks end by their own leases."""
KEPT_DOWNS = 256
"""Ends of launches remembered while there is no session."""


@dataclass(frozen=True)
class _StopRequest:
    reason: str
    grace: float = STOP_GRACE


def run(settings: LauncherSettings) -> int:
    """Run a launcher until it is told to stop; returns its exit status."""
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    process: list[_LauncherProcess] = []
    lease = LeaseClient(
        settings.lease,
        role="launcher",
        name=settings.name or "launcher",
        on_lost=lambda: _lease_lost(inbox),
        progress=lambda: process[0].turns if process else 0,
    )
    with closing(lease):
        try:
            process.append(_LauncherProcess(settings, inbox, lease))
            status, message = process[0].run()
        except (LaunchError, AddressError, KeysError) as error:
            status, message = EXIT_FAILED, str(error)
        if status != EXIT_STOPPED:
            logger.error("%s", message)
            lease.report("failed", message=message)
        return status


def _lease_lost(inbox: queue.SimpleQueue[object]) -> None:
    """Stop, and do not wait for a Ray that may be going the same way: its client blocks for a minute without a head."""
    inbox.put(_StopRequest("the supervisor is gone", 0.0))
    timer = threading.Timer(LOST_SECONDS, os._exit, (EXIT_LEASE_LOST,))
    timer.daemon = True
    timer.start()


class _LauncherProcess:
    def __init__(self, settings: LauncherSettings, inbox: queue.SimpleQueue[object], lease: LeaseClient) -> None:
        self._settings = settings
        self._inbox = inbox
        self._lease = lease
        self._groups = Groups(settings.group_prefix, settings.tp, policy=RestartPolicy())
        self._launcher = self._make_launcher()
        self._instance = random_u64()
        self._session = 0
        self._untold: deque[Down] = deque(maxlen=KEPT_DOWNS)
        self._stopping: tuple[int, str] | None = None
        self._deadline = float("inf")
        self.turns = 0
        self._link = PeerLink(
            settings.scheduler,
            security=settings.scheduler_security,
            decoder=codec.scheduler_to_launcher,
            greet=lambda nonce: LauncherHello(nonce, OLDEST, NEWEST, self._instance),
            deliver=inbox.put,
            progress=lambda: self.turns,
        )

    def run(self) -> tuple[int, str]:
        """The life of a launcher; returns exit status and, unless that is 0, what went wrong."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: self._inbox.put(_StopRequest(signal.Signals(number).name)))
        self._link.start()
        with closing(self._launcher), closing(self._link):
            self._do(self._groups.want(self._settings.groups, time.monotonic()))
            self._do(self._groups.adopt(self._launcher.adopt(), time.monotonic()))
            self._lease.report("ready")
            while not self._over():
                self.turns += 1
                if self._stopping is None:
                    self._do(self._groups.turn(time.monotonic()))
                self._take(self._next_event())
            assert self._stopping is not None
            return self._stopping

    def _make_launcher(self) -> Launcher:
        settings = self._settings
        ranks = settings.groups * settings.tp
        if settings.kind == "local":
            from workers.launchers.local import LocalLauncher

            # The state lies beside the lease, in the run directory, and goes with it.
            state = Path(settings.lease).parent / f"{settings.name or 'launcher'}.ranks" if settings.lease else ""
            return LocalLauncher(self._inbox.put, ranks_on_host=ranks, state_file=str(state))
        self._lease.report("starting", stage="connecting to Ray")
        try:
            from workers.launchers.ray_launcher import RayLauncher, connect
        except ImportError as error:
            raise LaunchError("Ray is not installed: pip install 'headrace[ray]', or use --launcher local") from error
        connect(_read_address(settings.ray_address), settings.ray_namespace)
        return RayLauncher(
            self._inbox.put,
            model=settings.served_model_name,
            tp=settings.tp,
            ranks=ranks,
            owns=self._groups.owns,
            notice=self._notice,
        )

    def _next_event(self) -> object:
        due = self._groups.next_due()
        wait = TURN_SECONDS if due is None else max(0.0, min(TURN_SECONDS, due - time.monotonic()))
        try:
            return self._inbox.get(timeout=wait)
        except queue.Empty:
            return None

    def _take(self, event: object) -> None:
        now = time.monotonic()
        if isinstance(event, RankEnded):
            self._do(self._groups.ended(event, now))
            if self._groups.unusable:
                self._stop(EXIT_UNUSABLE, self._groups.unusable, 0.0)
        elif isinstance(event, LauncherFailed):
            raise LaunchError(event.cause)  # ranks go on without this process
        elif isinstance(event, _StopRequest):
            # A second request ends what the first one still waits for.
            self._stop(EXIT_STOPPED, event.reason, event.grace if self._stopping is None else 0.0)
        elif isinstance(event, list):
            for link_event in event:
                self._hear(link_event, now)

    def _hear(self, event: LinkEvent, now: float) -> None:
        if isinstance(event, Opened):
            self._session = event.session
            untold, self._untold = self._untold, deque(maxlen=KEPT_DOWNS)
            self._do([*untold, *self._groups.announced()])
        elif isinstance(event, Refused):
            self._stop(EXIT_FAILED, f"the scheduler refused this launcher: {event.reason}", STOP_GRACE)
        elif isinstance(event, Received):
            self._obey(event.message, now)

    def _obey(self, message: object, now: float) -> None:
        if isinstance(message, KillGroup) and self._groups.owns(message.group):
            self._do(self._groups.kill(message.group, message.incarnation, message.reason))
        elif isinstance(message, SetGroups) and message.model == self._settings.served_model_name:
            self._do(self._groups.want(message.groups, now))
        elif isinstance(message, Stop):
            self._stop(EXIT_STOPPED, message.reason or "the scheduler said stop", STOP_GRACE)

    def _stop(self, status: int, reason: str, grace: float) -> None:
        if self._stopping is None:
            logger.info("stopping: %s", reason)
            self._stopping = (status, reason)
            self._deadline = time.monotonic() + END_SECONDS
            self._lease.report("draining")
        self._do(self._groups.stop(grace))

    def _over(self) -> bool:
        if self._stopping is None or (self._groups.running() and time.monotonic() < self._deadline):
            return False
        for launch in self._groups.running():
            logger.error("group %s did not end in time", launch.group)
        return True

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(action)
            elif isinstance(action, End):
                self._launcher.end(action.launch, action.grace)
            elif isinstance(action, Up):
                model = self._settings.served_model_name
                self._link.send(GroupUp(action.launch.group, action.launch.incarnation, model), self._session)
            else:
                self._tell_down(action)

    def _start(self, action: Start) -> None:
        launch = action.launch
        logger.info("launching group %s, incarnation %d", launch.group, launch.incarnation)
        try:
            self._launcher.launch(self._settings.rank_options(launch.group, launch.incarnation))
        except LaunchError as error:
            self._do(self._groups.failed_to_start(launch, str(error), time.monotonic()))

    def _tell_down(self, down: Down) -> None:
        level = logging.INFO if self._stopping is not None else logging.WARNING
        logger.log(
            level, "group %s, incarnation %d, is down: %s", down.launch.group, down.launch.incarnation, down.cause
        )
        message = GroupDown(down.launch.group, down.launch.incarnation, down.cause[:4096])
        if not self._link.send(message, self._session):
            self._untold.append(down)

    def _notice(self, text: str) -> None:
        logger.warning("%s", text)
        self._lease.report("ready", stage=text)


def _read_address(address: str) -> str:
    """A Ray address as given, or from a descriptor that tells it when it is known."""
    kind, _, number = address.partition(":")
    if kind != "fd" or not number.isdigit():
        return address
    with os.fdopen(int(number), "rb") as pipe:
        told = pipe.read().decode(errors="replace").strip()
    if not told:
        raise LaunchError("the Ray head ended before it told its address")
    return told

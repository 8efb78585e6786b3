"""The scheduler's one thread: wait, read, let the cell act, send. Nothing here decides anything about requests.

::

    poll ─► frontends' messages ─► workers' messages ─► cell.advance ─► send ─► poll …
                                        └ each StepDone's plan leaves before the next message is read;
                                          its frames wait for those of the turn's other steps
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import tempfile
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

import zmq

from protocol.frontend import Frame, Load
from protocol.ids import Epoch, random_u64
from protocol.keys import PeerRole, listener_security
from protocol.transport import Transport, TransportOptions
from scheduler.cell import CellStatistics
from scheduler.doors import DoorStatistics, FrontendDoor, WorkerDoor
from scheduler.frames import StepFrames
from scheduler.gatekeeper import Gatekeeper
from scheduler.outbox import EndLeader, Outgoing, ToFrontend, ToFrontends, ToLaunchers, ToLeader
from scheduler.sessions import Kind
from scheduler.settings import SchedulerSettings
from scheduler.trace import Trace, TracedCell
from scheduler.watched_cell import WatchedCell

logger = logging.getLogger(__name__)

LONGEST_SLEEP = 0.25
"""Seconds: Loads, overdue steps and silent peers are looked at this often when nothing else happens."""

BACKLOG_SLEEP = 0.005
"""Seconds, while a peer does not take its frames: a ROUTER cannot say which peer has become writable."""


LONGEST_HOLD = 0.004
"""Seconds that a frame may wait, in a turn with many steps, for others that go to the same frontend."""

MESSAGES_A_TURN = 256
"""Most messages read from one socket before the other has its turn."""


FAREWELL = 0.25
"""Seconds between the last frame of a drain and the end: a DEALER drops what it has not read when its peer closes."""


@dataclass(frozen=True)
class SchedulerStatistics:
    """One frozen picture of the whole process."""

    turns: int
    cell: CellStatistics
    load: Load
    frontends: DoorStatistics
    workers: DoorStatistics


class SchedulerLoop:
    """Owns both sockets and the cell. Everything but ``wake``, ``drain`` and ``stop`` belongs to the running thread."""

    def __init__(self, settings: SchedulerSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Bind both sockets. Raises AddressError, and KeysError when a key file cannot be used."""
        self._settings = settings
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.cell = _new_cell(settings, clock)
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.term)
            self._gatekeeper = Gatekeeper(self._context, settings.keys) if settings.keys else None
            if self._gatekeeper is not None:
                undo.callback(self._gatekeeper.stop)
            frontends = self._listen(settings.frontend_bind, PeerRole.FRONTEND)
            undo.callback(frontends.close)
            workers = self._listen(settings.worker_bind, PeerRole.WORKER)
            undo.pop_all()
        self.frontends = FrontendDoor(frontends, self.cell, settings.peer_timeout)
        self.workers = WorkerDoor(workers, self.cell, settings.peer_timeout)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._turns = 0
        self._last_turn = clock()
        self._drain_asked = self._stop_asked = self._dump_asked = False
        self._drain_ends: float | None = None
        self._idle_since = 0.0
        self._checked = True
        self._published: SchedulerStatistics | None = None
        self._next_publication = clock()

    def _listen(self, address: str, role: PeerRole) -> Transport:
        return Transport.listen(
            address,
            security=listener_security(self._settings.keys, role, insecure_sockets=self._settings.insecure_sockets),
            context=self._context,
            options=TransportOptions(heartbeat_timeout=self._settings.peer_timeout),
            clock=self._clock,
        )

    def run(self) -> None:
        """Turn until stopped, or until drained; closes the sockets."""
        poller = zmq.Poller()
        for readable in (self.frontends.transport.socket, self.workers.transport.socket, self._wake_reader):
            poller.register(readable, zmq.POLLIN)
        try:
            while not self._ended():
                ready = {readable for readable, _ in poller.poll(math.ceil(1000 * self._sleep(self._clock())))}
                if self._wake_reader.fileno() in ready:
                    self._wake_reader.recv(4096)
                self._turn(self._clock(), ready)
        finally:
            self._close()

    def drain(self) -> None:
        """Take nothing new and end when everything has finished, at the latest after the drain limit. Any thread."""
        self._drain_asked = True
        self.wake()

    def stop(self) -> None:
        """End now. Any thread and signal handlers."""
        self._stop_asked = True
        self.wake()

    def dump_trace(self) -> None:
        """Write the last steps to a file, soon. Any thread and signal handlers."""
        self._dump_asked = True
        self.wake()

    def wake(self) -> None:
        """Let a sleeping loop turn at once."""
        # A full pipe means that a wake-up is already waiting.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_writer.send(b"\0")

    @property
    def wake_fd(self) -> int:
        """For ``signal.set_wakeup_fd``."""
        return self._wake_writer.fileno()

    @property
    def turns(self) -> int:
        """Rises while the loop is alive."""
        return self._turns

    def published(self) -> SchedulerStatistics | None:
        """The statistics as of the last turn that made some: at most a quarter of a second old. Any thread."""
        return self._published

    # ----------------------------------------------------------------------------------------------------- a turn

    def _turn(self, now: float, ready: Container[object]) -> None:
        """``ready`` holds the sockets that have something to read."""
        self._turns += 1
        self._restart_timers_after_a_pause(now)
        if self._drain_asked and self._drain_ends is None:
            self._start_draining(now)
        if self._dump_asked:
            self._dump_trace()
        for _ in range(MESSAGES_A_TURN):
            if not self.frontends.receive(now):
                break
        release_at = now + LONGEST_HOLD
        for _ in range(MESSAGES_A_TURN):
            if not self.workers.receive(now):
                break
            self._deliver(now)
            if (later := self._clock()) >= release_at:
                self.frontends.release(later)
                release_at = later + LONGEST_HOLD
        self.frontends.housekeep(now)
        self.workers.housekeep(now)
        self.cell.frames_dropped = self.frontends.frames_dropped + self.workers.frames_dropped
        self.cell.advance(now)
        self._deliver(now)
        self.frontends.release(now)
        if now >= self._next_publication:
            self._next_publication = now + LONGEST_SLEEP
            self._published = self.statistics()
            self._check_at_rest()

    def _dump_trace(self) -> None:
        self._dump_asked = False
        if not isinstance(self.cell, TracedCell):
            logger.warning("no trace is kept; --trace-memory would keep one")
            return
        name = f"headrace-{self._settings.name}-{time.strftime('%Y%m%d-%H%M%S')}-{random_u64():016x}.trace"
        path = Path(self._settings.trace_dir or tempfile.gettempdir()) / name
        try:
            self.cell.trace.dump(path, self.cell.epoch, self._settings.cell())
        except OSError as error:
            logger.error("the trace could not be written to %s: %s", path, error.strerror)
        else:
            logger.info("the trace is in %s; `headrace trace` reads it", path)

    def _check_at_rest(self) -> None:
        """Once each time everything has finished. Accounts that do not add up end the process: frontends resume."""
        if not self.cell.idle:
            self._checked = False
        elif not self._checked:
            self.cell.check_integrity()
            self._checked = True

    def _restart_timers_after_a_pause(self, now: float) -> None:
        """If this loop did not turn for half a peer timeout, silence says nothing about the others."""
        if now - self._last_turn > self._settings.peer_timeout / 2:
            logger.warning("this process did not run for %.1f s; all timers restart", now - self._last_turn)
            self.frontends.sessions.restart_timers(now)
            self.workers.sessions.restart_timers(now)
            self.cell.restart_timers(now)
        self._last_turn = now

    def _deliver(self, now: float) -> None:
        """Send what the cell wants sent; a peer that turns out to be gone may make it want more."""
        while outbox := self.cell.take_outbox():
            for outgoing in outbox:
                self._send(outgoing, now)

    def _send(self, outgoing: Outgoing, now: float) -> None:
        if isinstance(outgoing, ToLeader):
            self.workers.send(outgoing.session, outgoing.message, now)
        elif isinstance(outgoing, StepFrames):
            for session_id, frame in outgoing.build():
                self.frontends.hold(session_id, frame, now)
        elif isinstance(outgoing, ToFrontend) and isinstance(outgoing.message, Frame):
            self.frontends.hold(outgoing.session, outgoing.message, now)
        elif isinstance(outgoing, ToFrontend):
            self.frontends.release(now)
            self.frontends.send(outgoing.session, outgoing.message, now)
        elif isinstance(outgoing, ToFrontends):
            self.frontends.release(now)
            self.frontends.broadcast(Kind.FRONTEND, outgoing.message, now)
        elif isinstance(outgoing, ToLaunchers):
            self.workers.broadcast(Kind.LAUNCHER, outgoing.message, now)
        elif isinstance(outgoing, EndLeader):
            session = self.workers.sessions.get(outgoing.session)
            if session is not None:
                self.workers.end(session, outgoing.reason, now)

    def _sleep(self, now: float) -> float:
        if self.frontends.transport.backlogged or self.workers.transport.backlogged:
            return BACKLOG_SLEEP
        deadline = self.cell.next_deadline()
        return LONGEST_SLEEP if deadline is None else min(max(deadline - now, 0.0), LONGEST_SLEEP)

    # --------------------------------------------------------------------------------------------------- the end

    def _start_draining(self, now: float) -> None:
        self._drain_ends, self._idle_since = now + self._settings.drain_timeout, now
        self.cell.start_draining()
        self.frontends.start_draining(self._drain_ends, now)
        logger.info("draining: nothing new is taken")

    def _ended(self) -> bool:
        """Stopped, drained, or out of time: then frontends keep what is unfinished and resume it elsewhere."""
        if self._stop_asked:
            return True
        if self._drain_ends is None:
            return False
        now = self._clock()
        if not self.cell.idle or self.frontends.transport.backlogged:
            self._idle_since = now
        return now >= min(self._idle_since + FAREWELL, self._drain_ends)

    def _close(self) -> None:
        self.frontends.transport.close()
        self.workers.transport.close()
        if self._gatekeeper is not None:
            self._gatekeeper.stop()
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()

    def statistics(self) -> SchedulerStatistics:
        """A frozen picture; only on the running thread."""
        return SchedulerStatistics(
            turns=self._turns,
            cell=self.cell.statistics(),
            load=self.cell.load(self._clock()),
            frontends=self.frontends.statistics(),
            workers=self.workers.statistics(),
        )


def _new_cell(settings: SchedulerSettings, clock: Callable[[], float]) -> WatchedCell:
    epoch = Epoch(random_u64())
    if not settings.trace_memory:
        return WatchedCell(settings.cell(), epoch, clock)
    return TracedCell(settings.cell(), epoch, clock, Trace(settings.trace_memory))

"""The two sockets of a scheduler: greetings, sessions, pings, and the messages that pass on to the cell.

A door knows connections and sessions; what a message means is the cell's business.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from protocol import codec
from protocol.base import Wire
from protocol.codec import Decoder, FrameError, encode
from protocol.frontend import Abort, Drain, Frame, Frames, FrontendToScheduler, Hello, Inquire, Submit, Welcome
from protocol.ids import SessionId
from protocol.session import Ping, Pong, Unwelcome
from protocol.transport import Sent, Transport, TransportStatistics
from protocol.versions import negotiate, refusal
from protocol.worker import (
    DrainGroup,
    GroupDown,
    GroupUp,
    LauncherHello,
    Register,
    StepDone,
    StepFailed,
    WorkerSideToScheduler,
    WorkerWelcome,
)
from scheduler.sessions import Identity, Kind, Session, SessionTable
from scheduler.watched_cell import WatchedCell

logger = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")


@dataclass(frozen=True)
class DoorStatistics:
    """Sessions now and counters since start."""

    sessions: int
    frames_dropped: int
    """Frames that were no message, and messages that this kind of peer does not send."""
    transport: TransportStatistics


class Door(ABC, Generic[MessageT]):
    """One ROUTER and the sessions on it."""

    def __init__(self, transport: Transport, decoder: Decoder[Any], cell: WatchedCell, peer_timeout: float) -> None:
        self.transport = transport
        self.sessions = SessionTable(peer_timeout)
        self.frames_dropped = 0
        self._decoder = decoder
        self._cell = cell

    @abstractmethod
    def _greeted(self, peer: bytes, message: MessageT, now: float) -> bool:
        """Handle a message that is legal without a session; False when this is none."""

    @abstractmethod
    def _handle(self, session: Session, message: MessageT, now: float) -> bool:
        """Handle a message of a session; False when this kind of peer does not send it."""

    @abstractmethod
    def _lost(self, session: Session, reason: str, now: float) -> None:
        """Tell the cell that a session is over."""

    def receive(self, now: float) -> bool:
        """Read one frame; False when none waits. A frame that is no message is dropped, and nothing else happens."""
        received = self.transport.receive()
        if received is None:
            return False
        peer, frame = received
        try:
            message = self._decoder.decode(frame)
        except FrameError:
            self.frames_dropped += 1
            return True
        if self._greeted(peer, message, now):
            return True
        session = self.sessions.of(peer)
        if session is None:
            self._unwelcome(peer, "no session on this connection", now)
            return True
        session.last_heard = now
        if isinstance(message, Ping):
            self.send_to(session, Pong(self._cell.epoch, message.progress), now)
        elif not self._handle(session, message, now):
            self.frames_dropped += 1
        return True

    def send(self, session_id: SessionId, message: Wire, now: float) -> None:
        """Send to a session, unless it is over by now."""
        session = self.sessions.get(session_id)
        if session is not None:
            self.send_to(session, message, now)

    def send_to(self, session: Session, message: Wire, now: float) -> None:
        """Send; a peer that is gone or takes nothing loses its session."""
        self._send_frame(session, encode(message), now)

    def broadcast(self, kind: Kind, message: Wire, now: float) -> None:
        """Send to every session of a kind; encoded once."""
        frame = encode(message)
        for session in self.sessions.all(kind):
            self._send_frame(session, frame, now)

    def end(self, session: Session, reason: str, now: float, *, tell: bool = True) -> None:
        """Close a session; whoever is there is told that it is over."""
        if self.sessions.get(session.id) is None:
            return
        self.sessions.close(session)
        self.transport.forget(session.peer)
        logger.info("session %d of %s %s ended: %s", session.id, session.kind.value, session.identity[1], reason)
        self._lost(session, reason, now)
        if tell:
            self._unwelcome(session.peer, reason, now)

    def housekeep(self, now: float) -> None:
        """Flush backlogs; end the sessions of peers that are gone or silent."""
        for peer in self.transport.flush() if self.transport.backlogged else ():
            session = self.sessions.of(peer)
            if session is not None:
                self.end(session, "took nothing for too long", now, tell=False)
        for session in self.sessions.silent(now):
            self.end(session, "nothing heard for too long", now)

    def statistics(self) -> DoorStatistics:
        """A frozen view."""
        return DoorStatistics(len(self.sessions), self.frames_dropped, self.transport.statistics())

    def _open(self, peer: bytes, identity: Identity, version: int, now: float) -> Session:
        for older in self.sessions.older(peer, identity):
            self.end(older, "a newer session took its place", now, tell=False)
        session = self.sessions.open(peer, identity, version, now)
        logger.info("session %d: %s %s", session.id, identity[0].value, identity[1])
        return session

    def _version(self, peer: bytes, oldest: int, newest: int) -> int | None:
        """The version to speak; a peer with a disjoint range is refused for good."""
        version = negotiate(oldest, newest)
        if version is None:
            self._refuse(peer, refusal(oldest, newest), final=True)
        return version

    def _refuse(self, peer: bytes, reason: str, *, final: bool) -> None:
        logger.warning("a peer was refused: %s", reason)
        self.transport.send(encode(Unwelcome(self._cell.epoch, reason[:4096], final)), peer)

    def _unwelcome(self, peer: bytes, reason: str, now: float) -> None:
        if self.sessions.may_unwelcome(peer, now):
            self.transport.send(encode(Unwelcome(self._cell.epoch, reason[:4096])), peer)

    def _send_frame(self, session: Session, frame: bytes, now: float) -> None:
        if self.transport.send(frame, session.peer) is Sent.GONE:
            self.end(session, "the connection is gone or takes nothing", now, tell=False)


class FrontendDoor(Door[FrontendToScheduler]):
    """Frontends come in here."""

    def __init__(self, transport: Transport, cell: WatchedCell, peer_timeout: float) -> None:
        super().__init__(transport, codec.frontend_to_scheduler, cell, peer_timeout)
        self._drain_ends: float | None = None
        self._held: dict[SessionId, list[Frame]] = {}

    def hold(self, session: SessionId, frame: Frame, now: float) -> None:
        """Send a frame soon, together with what else comes for the same frontend until then.

        One with logprobs, which may be large, goes at once: a message has a limit.
        """
        self._held.setdefault(session, []).append(frame)
        if frame.logprobs or frame.prompt_logprobs:
            self.release(now)

    def release(self, now: float) -> None:
        """Send what was held, as one message a frontend: each send wakes up a thread here and a process there."""
        held, self._held = self._held, {}
        for session, frames in held.items():
            self.send(session, frames[0] if len(frames) == 1 else Frames(tuple(frames)), now)

    def start_draining(self, ends: float, now: float) -> None:
        """Tell every frontend, and those that come later, that nothing new is taken."""
        self._drain_ends = ends
        self.broadcast(Kind.FRONTEND, self._drain(ends, now), now)

    def _drain(self, ends: float, now: float) -> Drain:
        return Drain(max(int(1000 * (ends - now)), 0))

    def _greeted(self, peer: bytes, message: FrontendToScheduler, now: float) -> bool:
        if not isinstance(message, Hello):
            return False
        version = self._version(peer, message.oldest_version, message.newest_version)
        if version is not None:
            session = self._open(peer, (Kind.FRONTEND, message.instance), version, now)
            self._cell.frontend_joined(session.id)
            self.send_to(session, self._welcome(message, session, now), now)
            if self._drain_ends is not None:
                self.send(session.id, self._drain(self._drain_ends, now), now)
        return True

    def _welcome(self, hello: Hello, session: Session, now: float) -> Welcome:
        return Welcome(
            nonce=hello.nonce,
            epoch=self._cell.epoch,
            session=session.id,
            version=session.version,
            models=self._cell.models(),
            limits=self._cell.limits(),
            credit=self._cell.credit(session.id, now),
        )

    def _handle(self, session: Session, message: FrontendToScheduler, now: float) -> bool:
        if isinstance(message, Submit):
            self._cell.submit(session.id, message, now)
        elif isinstance(message, Abort):
            self._cell.abort(session.id, message)
        elif isinstance(message, Inquire):
            self.send_to(session, self._cell.timelines(session.id, message), now)
        else:
            return False
        return True

    def _lost(self, session: Session, reason: str, now: float) -> None:
        self._cell.frontend_lost(session.id)


class WorkerDoor(Door[WorkerSideToScheduler]):
    """Leaders and launchers come in here."""

    def __init__(self, transport: Transport, cell: WatchedCell, peer_timeout: float) -> None:
        super().__init__(transport, codec.worker_side_to_scheduler, cell, peer_timeout)

    def _greeted(self, peer: bytes, message: WorkerSideToScheduler, now: float) -> bool:
        if isinstance(message, Register):
            self._register(peer, message, now)
        elif isinstance(message, LauncherHello):
            self._launcher(peer, message, now)
        else:
            return False
        return True

    def _register(self, peer: bytes, register: Register, now: float) -> None:
        version = self._version(peer, register.oldest_version, register.newest_version)
        if version is None:
            return
        refused = self._cell.refusal(register)
        if refused is not None:
            self._refuse(peer, refused.reason, final=refused.final)
            return
        session = self._open(peer, (Kind.LEADER, register.group), version, now)
        self.send_to(session, WorkerWelcome(register.nonce, self._cell.epoch, session.id, version), now)
        if self.sessions.get(session.id) is not None:
            self._cell.group_joined(session.id, register, now)

    def _launcher(self, peer: bytes, hello: LauncherHello, now: float) -> None:
        version = self._version(peer, hello.oldest_version, hello.newest_version)
        if version is None:
            return
        session = self._open(peer, (Kind.LAUNCHER, hello.instance), version, now)
        self.send_to(session, WorkerWelcome(hello.nonce, self._cell.epoch, session.id, version), now)
        for kill in self._cell.given_up():
            self.send(session.id, kill, now)

    def _handle(self, session: Session, message: WorkerSideToScheduler, now: float) -> bool:
        if session.kind is Kind.LEADER and isinstance(message, StepDone):
            self._cell.step_done(session.id, message, now)
        elif session.kind is Kind.LEADER and isinstance(message, StepFailed):
            self._cell.step_failed(session.id, message, now)
        elif session.kind is Kind.LAUNCHER and isinstance(message, GroupDown):
            self._cell.group_down(message, now)
        elif isinstance(message, DrainGroup) and self._may_drain(session, message):
            self._cell.drain_group(message, now)
        elif session.kind is Kind.LAUNCHER and isinstance(message, GroupUp):
            logger.info("group %s of %s was launched", message.group, message.model)
        else:
            return False
        return True

    def _may_drain(self, session: Session, drain: DrainGroup) -> bool:
        """A launcher any group, a leader its own."""
        return session.kind is Kind.LAUNCHER or session.identity == (Kind.LEADER, drain.group)

    def _lost(self, session: Session, reason: str, now: float) -> None:
        if session.kind is Kind.LEADER:
            self._cell.group_lost(session.id, reason, now)

"""A peer's end of a session: greet, ping, notice a loss, greet again.

``SessionKeeper`` decides, without sockets and with the clock passed in; ``PeerLink`` runs it on an I/O thread that owns
the DEALER. Frontends, worker leaders and launchers all use this link; it knows none of their messages but Welcome,
Unwelcome, Ping and Pong.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import zmq

from protocol.base import Wire
from protocol.codec import Decoder, FrameError, encode
from protocol.frontend import Welcome
from protocol.ids import Nonce, random_u64
from protocol.keys import ConnectorSecurity, KeysError
from protocol.session import Ping, Pong, Unwelcome
from protocol.transport import AddressError, Sent, Transport, TransportOptions
from protocol.worker import WorkerWelcome

logger = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")


@dataclass(frozen=True)
class LinkTimes:
    """Seconds."""

    ping: float = 1.0
    greet: float = 1.0
    """Between two greetings while there is no session."""
    reconnect: float = 5.0
    """Without a session, after which the connection is made anew, with keys and name looked up again: ZMQ itself gives
    up for good where a handshake fails."""
    peer_timeout: float = 10.0


@dataclass(frozen=True)
class Opened:
    """A session began. Everything of an earlier one is void: re-submit, or drop all slots."""

    session: int
    """This link's own counter of sessions; ``send`` takes it, so that nothing slips from one session into the next."""
    welcome: Welcome | WorkerWelcome


@dataclass(frozen=True)
class Closed:
    """The session ended; the link is already trying for the next one."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """The other side will never take this peer (disjoint versions); the link has stopped greeting."""

    reason: str


@dataclass(frozen=True)
class Received(Generic[MessageT]):
    """A message of the current session."""

    session: int
    message: MessageT


LinkEvent = Opened | Closed | Refused | Received[Any]


@dataclass(frozen=True)
class LinkStatistics:
    """Counters since start, and the state now."""

    session: int
    """Current session, 0 when there is none."""
    sessions_opened: int
    frames_dropped: int
    """Frames that did not decode, and messages that came outside a session."""
    messages_received: int
    messages_sent: int
    bytes_queued: int
    seconds_out_of_session: float


class Act(Enum):
    """What the keeper wants done."""

    RECONNECT = "reconnect"
    GREET = "greet"
    PING = "ping"
    LOST = "lost"


class SessionKeeper:
    """When to greet, when to ping, when a session is lost. Pure: every method takes the time."""

    def __init__(self, times: LinkTimes, now: float) -> None:
        self._times = times
        self.nonce = Nonce(0)
        self.session = 0
        self.sessions_opened = 0
        self.refused = False
        self.loss_reason = ""
        self._last_turn = now
        self._last_heard = now
        self._next_greet = now
        self._next_ping = now
        self._next_reconnect = now + times.reconnect
        self.out_since: float | None = now

    def turn(self, now: float) -> list[Act]:
        """Call at every turn of the loop; returns what is due."""
        if now - self._last_turn > self._times.peer_timeout / 2:
            # This process was paused: silence proves nothing about the other side.
            self._last_heard = now
        self._last_turn = now
        if self.refused:
            return []
        if not self.session:
            if now < self._next_greet:
                return []
            self._next_greet = now + self._times.greet
            self.nonce = Nonce(random_u64())
            if now < self._next_reconnect:
                return [Act.GREET]
            self._next_reconnect = now + self._times.reconnect
            return [Act.RECONNECT, Act.GREET]
        if now - self._last_heard > self._times.peer_timeout:
            self.lose(now, f"nothing heard for {self._times.peer_timeout:g} s")
            return [Act.LOST]
        if now >= self._next_ping:
            self._next_ping = now + self._times.ping
            return [Act.PING]
        return []

    def wait(self, now: float) -> float:
        """Seconds until the next turn is due."""
        due = self._next_ping if self.session else self._next_greet
        return max(0.0, min(due - now, self._times.ping))

    def heard(self, now: float) -> None:
        """Any message of the session arrived."""
        self._last_heard = now

    def welcomed(self, nonce: int, now: float) -> bool:
        """Open the session if this Welcome answers the latest greeting; a late one answers an older and is void."""
        if self.session or nonce != self.nonce:
            return False
        self.sessions_opened += 1
        self.session = self.sessions_opened
        self.out_since = None
        self._last_heard = now
        self._next_ping = now
        return True

    def unwelcome(self, reason: str, final: bool, now: float) -> bool:
        """The other side knows no session; returns True when one was open."""
        if final:
            self.refused = True
        was_open = bool(self.session)
        self.lose(now, reason)
        return was_open

    def lose(self, now: float, reason: str) -> None:
        """The session is over for whatever reason; greet again at once if it had lived, else at the usual pace."""
        if self.session:
            self._next_greet = now
            self._next_reconnect = now + self._times.reconnect
            self.out_since = now
        self.session = 0
        self.loss_reason = reason


class PeerLink:
    """A session with the scheduler, kept by a thread of its own.

    ``security`` is asked at every new connection; it may raise KeysError, from the constructor too.
    ``deliver`` is called on that thread with the events of one turn, in order; it must be quick and not raise
    (put them on a queue, or hand them to an event loop).
    """

    def __init__(
        self,
        address: str,
        *,
        security: Callable[[], ConnectorSecurity],
        decoder: Decoder[Any],
        greet: Callable[[Nonce], Wire],
        deliver: Callable[[list[LinkEvent]], None],
        progress: Callable[[], int],
        times: LinkTimes | None = None,
        options: TransportOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decoder = decoder
        self._greet = greet
        self._deliver = deliver
        self._progress = progress
        self._clock = clock
        self._options = options or TransportOptions()
        self._keeper = SessionKeeper(times or LinkTimes(), clock())
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._outbox_lock = threading.Lock()
        self._greeting: bytes | None = None
        self._events: list[LinkEvent] = []
        self._dropped = self._messages_received = self._messages_sent = 0
        self._closing = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._address = address
        self._security = security
        self._transport = self._connect()
        self._thread = threading.Thread(target=self._run, name="headrace-link", daemon=True)

    def _connect(self) -> Transport:
        return Transport.connect(
            self._address, security=self._security(), context=self._context, options=self._options, clock=self._clock
        )

    def start(self) -> None:
        """Start the I/O thread, which greets at once."""
        self._thread.start()

    def send(self, message: Wire, session: int) -> bool:
        """Queue a message for the session it belongs to; False when that session is already over. Any thread."""
        if not session or session != self._keeper.session or self._closing:
            return False
        self._queue(session, encode(message))
        self._wake()
        return True

    def close(self) -> None:
        """End the session and the thread; queued frames get a bounded time to leave."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._transport.close()
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()

    def statistics(self) -> LinkStatistics:
        """A frozen view of counters and state."""
        out_since = self._keeper.out_since
        return LinkStatistics(
            session=self._keeper.session,
            sessions_opened=self._keeper.sessions_opened,
            frames_dropped=self._dropped,
            messages_received=self._messages_received,
            messages_sent=self._messages_sent,
            bytes_queued=self._queued_bytes,
            seconds_out_of_session=0.0 if out_since is None else self._clock() - out_since,
        )

    def _queue(self, session: int, frame: bytes) -> None:
        with self._outbox_lock:
            self._outbox.append((session, frame))
            self._queued_bytes += len(frame)

    def _wake(self) -> None:
        # A full pipe means that a wake-up is already waiting.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_writer.send(b"\0")

    def _run(self) -> None:
        poller, polled = self._poller(), self._transport
        while not self._closing:
            for act in self._keeper.turn(self._clock()):
                self._do(act)
            if polled is not self._transport:
                poller, polled = self._poller(), self._transport
            self._flush()
            pending = self._greeting is not None or bool(self._outbox)
            poller.register(self._transport.socket, zmq.POLLIN | (zmq.POLLOUT if pending else 0))
            poller.poll(int(self._keeper.wait(self._clock()) * 1000) + 1)
            with contextlib.suppress(BlockingIOError):
                self._wake_reader.recv(4096)
            self._receive()
            if self._events:
                events, self._events = self._events, []
                self._deliver(events)
        self._flush()

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        return poller

    def _do(self, act: Act) -> None:
        if act is Act.RECONNECT:
            self._reconnect()
        elif act is Act.GREET:
            self._greeting = encode(self._greet(self._keeper.nonce))
        elif act is Act.PING:
            self._queue(self._keeper.session, encode(Ping(self._progress())))
        else:
            self._lost()

    def _reconnect(self) -> None:
        try:
            fresh = self._connect()
        except (AddressError, KeysError) as error:
            logger.warning("the connection to %s stays as it is: %s", self._address, error)
            return
        self._transport.close()
        self._transport = fresh

    def _lost(self) -> None:
        self._events.append(Closed(self._keeper.loss_reason))
        self._greeting = None

    def _flush(self) -> None:
        """Hand queued frames to ZMQ until it would block; frames of an earlier session are dropped."""
        if self._greeting is not None and self._send(self._greeting):
            self._greeting = None
        while self._outbox:
            session, frame = self._outbox[0]
            if session == self._keeper.session:
                if not self._send(frame):
                    break
                self._messages_sent += 1
            with self._outbox_lock:
                self._outbox.popleft()
                self._queued_bytes -= len(frame)
        if self._queued_bytes > self._options.backlog_bytes:
            self._keeper.lose(self._clock(), "the scheduler took nothing for too long")
            self._lost()

    def _send(self, frame: bytes) -> bool:
        sent = self._transport.send(frame)
        if sent is Sent.BACKLOGGED:
            self._transport.forget(b"")  # the outbox is the backlog here: it knows which session a frame is for
        return sent is Sent.SENT

    def _receive(self) -> None:
        for _ in range(256):
            received = self._transport.receive()
            if received is None:
                return
            try:
                message = self._decoder.decode(received[1])
            except FrameError:
                self._dropped += 1
                continue
            self._accept(message)

    def _accept(self, message: Any) -> None:
        now = self._clock()
        if isinstance(message, Welcome | WorkerWelcome):
            if self._keeper.welcomed(message.nonce, now):
                self._greeting = None
                self._events.append(Opened(self._keeper.session, message))
            else:
                self._dropped += 1
        elif isinstance(message, Unwelcome):
            if self._keeper.unwelcome(message.reason, message.final, now):
                self._lost()
            if message.final:
                self._events.append(Refused(message.reason))
        elif not self._keeper.session:
            self._dropped += 1
        else:
            self._keeper.heard(now)
            if not isinstance(message, Pong):
                self._messages_received += 1
                self._events.append(Received(self._keeper.session, message))

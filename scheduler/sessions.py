"""Who is on the other end of each connection, and since when nothing was heard of them.

Pure: the time is passed in. A connection is what the ROUTER calls a peer; an identity is what a process says it is.
One identity has one session and one connection has one session: the newer closes the older.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum

from protocol.ids import SessionId

UNWELCOME_INTERVAL = 1.0
"""Seconds between two Unwelcomes on one connection."""

LOOKS = 0.02
"""Of the peer timeout: how long between two looks for silent peers."""

REMEMBERED_STRANGERS = 4096
"""Connections whose last Unwelcome is remembered; a flood of connections is not answered faster."""


class Kind(Enum):
    """What a peer is."""

    FRONTEND = "frontend"
    LEADER = "leader"
    LAUNCHER = "launcher"


Identity = tuple[Kind, int | str]
"""(kind, instance) for frontends and launchers, (kind, group) for leaders."""


@dataclass(eq=False)
class Session:
    """One open session."""

    id: SessionId
    peer: bytes
    identity: Identity
    version: int
    last_heard: float

    @property
    def kind(self) -> Kind:
        """What the peer is."""
        return self.identity[0]


class SessionTable:
    """The sessions of one socket."""

    def __init__(self, peer_timeout: float) -> None:
        self._peer_timeout = peer_timeout
        self._by_peer: dict[bytes, Session] = {}
        self._by_identity: dict[Identity, Session] = {}
        self._by_id: dict[SessionId, Session] = {}
        self._unwelcomed: dict[bytes, float] = {}
        self._next_sweep = self._next_look = 0.0
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._by_id)

    def older(self, peer: bytes, identity: Identity) -> list[Session]:
        """Sessions that a new one of this connection and identity closes."""
        candidates = (self._by_peer.get(peer), self._by_identity.get(identity))
        return list(dict.fromkeys(session for session in candidates if session is not None))

    def open(self, peer: bytes, identity: Identity, version: int, now: float) -> Session:
        """A new session; the caller has closed the older ones."""
        session = Session(SessionId(next(self._ids)), peer, identity, version, now)
        self._by_peer[peer] = self._by_identity[identity] = self._by_id[session.id] = session
        self._unwelcomed.pop(peer, None)
        return session

    def close(self, session: Session) -> None:
        """It is over."""
        del self._by_peer[session.peer], self._by_identity[session.identity], self._by_id[session.id]

    def of(self, peer: bytes) -> Session | None:
        """The session on a connection."""
        return self._by_peer.get(peer)

    def get(self, session: SessionId) -> Session | None:
        """A session by its number; None once it is over."""
        return self._by_id.get(session)

    def all(self, kind: Kind) -> list[Session]:
        """Every session of one kind."""
        return [session for session in self._by_id.values() if session.kind is kind]

    def silent(self, now: float) -> list[Session]:
        """Sessions whose peer was not heard for longer than the peer timeout; looked for now and then only."""
        if now < self._next_look:
            return []
        self._next_look = now + self._peer_timeout * LOOKS
        return [session for session in self._by_id.values() if now - session.last_heard > self._peer_timeout]

    def restart_timers(self, now: float) -> None:
        """This process was paused: silence proves nothing about anyone."""
        for session in self._by_id.values():
            session.last_heard = now

    def may_unwelcome(self, peer: bytes, now: float) -> bool:
        """Whether a stranger may be told so now; counts as told if it may."""
        if now - self._unwelcomed.get(peer, -UNWELCOME_INTERVAL) < UNWELCOME_INTERVAL:
            return False
        if len(self._unwelcomed) >= REMEMBERED_STRANGERS:
            if now < self._next_sweep:
                return False
            self._next_sweep = now + UNWELCOME_INTERVAL
            self._unwelcomed = {
                peer: told for peer, told in self._unwelcomed.items() if now - told < UNWELCOME_INTERVAL
            }
        self._unwelcomed[peer] = now
        return True

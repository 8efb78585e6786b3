"""Messages that every session has, whoever the peer is."""

from __future__ import annotations

from protocol.base import U64, Text, Wire


class Ping(Wire, frozen=True, tag=30):
    """Sent every second by the peer's I/O thread."""

    progress: U64
    """A counter of the peer's main loop: alive but stuck shows as a ping whose progress stands still."""


class Pong(Wire, frozen=True, tag=60):
    """The scheduler's answer to a Ping, from its own loop."""

    epoch: U64
    progress: U64


class Unwelcome(Wire, frozen=True, tag=61):
    """This connection has no session (or lost it): greet again. Sent at most once a second per connection."""

    epoch: U64
    reason: Text = ""
    final: bool = False
    """True when greeting again cannot help: the version ranges are disjoint."""

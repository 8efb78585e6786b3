"""What a Cell wants sent: messages with their destination, in order."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from protocol.frontend import SchedulerToFrontend
from protocol.ids import SessionId
from protocol.worker import SchedulerToLauncher, SchedulerToLeader
from scheduler.frames import StepFrames


class ToFrontend(msgspec.Struct, frozen=True):
    """To one frontend session."""

    session: SessionId
    message: SchedulerToFrontend


@dataclass(frozen=True, slots=True)
class ToFrontends:
    """To every frontend session: encoded once."""

    message: SchedulerToFrontend


class ToLeader(msgspec.Struct, frozen=True):
    """To one leader session."""

    session: SessionId
    message: SchedulerToLeader


@dataclass(frozen=True, slots=True)
class ToLaunchers:
    """To every launcher; the one that knows the group acts."""

    message: SchedulerToLauncher


@dataclass(frozen=True, slots=True)
class EndLeader:
    """Close a leader's session: its incarnation was given up."""

    session: SessionId
    reason: str


Outgoing = ToFrontend | ToFrontends | StepFrames | ToLeader | ToLaunchers | EndLeader


@dataclass
class Outbox:
    """Messages in the order they are to leave."""

    waiting: list[Outgoing] = field(default_factory=list)

    def add(self, outgoing: Outgoing) -> None:
        """One more."""
        self.waiting.append(outgoing)

    def take(self) -> list[Outgoing]:
        """Everything since the last call."""
        waiting, self.waiting = self.waiting, []
        return waiting

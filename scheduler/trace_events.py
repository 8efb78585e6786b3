"""What happens to a cell, and what it answers, as a trace keeps it: one struct per kind of event.

An incoming event can be applied to another cell. Session numbers and times are part of it, so that nothing but the
events decides what comes out.
"""

from __future__ import annotations

from abc import abstractmethod
from zlib import crc32

import msgspec

from protocol.codec import encode
from protocol.frontend import Abort, Submit
from protocol.ids import SessionId
from protocol.worker import DrainGroup, GroupDown, Plan, Register, StepDone, StepFailed
from scheduler.cell import Cell
from scheduler.frames import StepFrames
from scheduler.outbox import Outgoing, ToLeader


class Event(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Something that happened to a cell."""

    @abstractmethod
    def apply(self, cell: Cell) -> None:
        """Let it happen to this cell."""


class FrontendJoined(Event, frozen=True, tag=1):
    session: int

    def apply(self, cell: Cell) -> None:
        cell.frontend_joined(SessionId(self.session))


class FrontendLost(Event, frozen=True, tag=2):
    session: int

    def apply(self, cell: Cell) -> None:
        cell.frontend_lost(SessionId(self.session))


class Submitted(Event, frozen=True, tag=3):
    now: float
    session: int
    message: Submit

    def apply(self, cell: Cell) -> None:
        cell.submit(SessionId(self.session), self.message, self.now)


class Aborted(Event, frozen=True, tag=4):
    session: int
    message: Abort

    def apply(self, cell: Cell) -> None:
        cell.abort(SessionId(self.session), self.message)


class GroupJoined(Event, frozen=True, tag=5):
    now: float
    session: int
    message: Register

    def apply(self, cell: Cell) -> None:
        cell.group_joined(SessionId(self.session), self.message, self.now)


class GroupLost(Event, frozen=True, tag=6):
    now: float
    session: int
    reason: str

    def apply(self, cell: Cell) -> None:
        cell.group_lost(SessionId(self.session), self.reason, self.now)


class Down(Event, frozen=True, tag=7):
    now: float
    message: GroupDown

    def apply(self, cell: Cell) -> None:
        cell.group_down(self.message, self.now)


class Drained(Event, frozen=True, tag=8):
    now: float
    message: DrainGroup

    def apply(self, cell: Cell) -> None:
        cell.drain_group(self.message, self.now)


class Done(Event, frozen=True, tag=9):
    now: float
    session: int
    message: StepDone

    def apply(self, cell: Cell) -> None:
        cell.step_done(SessionId(self.session), self.message, self.now)


class Failed(Event, frozen=True, tag=10):
    now: float
    session: int
    message: StepFailed

    def apply(self, cell: Cell) -> None:
        cell.step_failed(SessionId(self.session), self.message, self.now)


class Advanced(Event, frozen=True, tag=11):
    now: float

    def apply(self, cell: Cell) -> None:
        cell.advance(self.now)


class TimersRestarted(Event, frozen=True, tag=12):
    now: float

    def apply(self, cell: Cell) -> None:
        cell.restart_timers(self.now)


class DrainingStarted(Event, frozen=True, tag=13):
    def apply(self, cell: Cell) -> None:
        cell.start_draining()


class Planned(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=20):
    """A plan went out."""

    session: int
    plan: bytes
    """Its frame."""

    def message(self) -> Plan:
        """The plan itself."""
        return _plans.decode(self.plan)


class Framed(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=21):
    """The frames of a step went out; their ids are those of its StepDone."""

    group: str
    step: int
    rows: int
    checksum: int
    """Over what its StepDone does not tell: whose rows they are, and the notes of all frontends."""


Incoming = (
    FrontendJoined
    | FrontendLost
    | Submitted
    | Aborted
    | GroupJoined
    | GroupLost
    | Down
    | Drained
    | Done
    | Failed
    | Advanced
    | TimersRestarted
    | DrainingStarted
)
Answer = Planned | Framed
Entry = Incoming | Answer

_plans = msgspec.msgpack.Decoder(Plan)


def answer_of(outgoing: Outgoing) -> Answer | None:
    """What a trace keeps of it; None for what steps do not bring about."""
    if isinstance(outgoing, ToLeader) and isinstance(outgoing.message, Plan):
        return Planned(outgoing.session, encode(outgoing.message))
    if isinstance(outgoing, StepFrames):
        return Framed(outgoing.group, outgoing.step, len(outgoing.delivery), _checksum(outgoing))
    return None


def _checksum(frames: StepFrames) -> int:
    delivery = frames.delivery
    checksum = crc32(delivery.first.tobytes(), crc32(delivery.rid.tobytes()))
    for session, notes in frames.notes.items():
        said = msgspec.msgpack.encode((session, notes.finishes, notes.started, notes.judged))
        checksum = crc32(said, checksum)
    return checksum

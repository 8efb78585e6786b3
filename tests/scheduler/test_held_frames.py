"""Frames of one turn go to a frontend as one message, in their order, and those that may be large at once."""

from __future__ import annotations

from typing import Any, cast

import pytest

from protocol import codec
from protocol.frontend import Frame, Frames
from protocol.ids import Epoch, SessionId
from protocol.transport import Sent, Transport
from scheduler.doors import FrontendDoor
from scheduler.sessions import Kind
from scheduler.settings import CellSettings
from scheduler.watched_cell import WatchedCell

GONE = SessionId(99)


class Wire:
    """What was sent to whom."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []

    def send(self, frame: bytes, peer: bytes) -> Sent:
        self.sent.append((peer, codec.scheduler_to_frontend.decode(frame)))
        return Sent.SENT


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def door(wire: Wire) -> FrontendDoor:
    door = FrontendDoor(cast(Transport, wire), WatchedCell(CellSettings(), Epoch(1), lambda: 0.0), 10.0)
    for number in (1, 2):
        door.sessions.open(b"peer%d" % number, (Kind.FRONTEND, number), 1, 0.0)
    return door


def test_what_came_in_one_turn_is_one_message_in_order(door: FrontendDoor, wire: Wire) -> None:
    for step in range(3):
        door.hold(SessionId(1), Frame("g", step), 0.0)
    door.hold(SessionId(2), Frame("g", 0), 0.0)
    assert not wire.sent
    door.release(0.0)
    together = Frames((Frame("g", 0), Frame("g", 1), Frame("g", 2)))
    assert wire.sent == [(b"peer1", together), (b"peer2", Frame("g", 0))], "one alone is a plain Frame"
    door.release(0.0)
    assert len(wire.sent) == 2, "sent once"


def test_logprobs_go_at_once_and_what_was_held_before_goes_with_them(door: FrontendDoor, wire: Wire) -> None:
    door.hold(SessionId(1), Frame("g", 0), 0.0)
    door.hold(SessionId(1), Frame("g", 1, logprobs=b"l"), 0.0)
    assert wire.sent == [(b"peer1", Frames((Frame("g", 0), Frame("g", 1, logprobs=b"l"))))]


def test_a_frontend_that_is_gone_gets_nothing(door: FrontendDoor, wire: Wire) -> None:
    door.hold(GONE, Frame("g", 0), 0.0)
    door.release(0.0)
    assert not wire.sent

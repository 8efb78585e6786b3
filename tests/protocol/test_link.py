"""A link greets, carries messages both ways, and comes back by itself after a loss."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from protocol import codec
from protocol.frontend import Credit, Hello, Limits, Load, Submit, Welcome
from protocol.keys import NullSecurity
from protocol.link import Act, Closed, LinkTimes, Opened, PeerLink, Received, Refused, SessionKeeper
from protocol.requests import Choice
from protocol.session import Ping, Pong, Unwelcome
from protocol.transport import Transport
from protocol.versions import NEWEST, OLDEST

WAIT_MS = 10_000


class Scheduler:
    """The other end, driven by hand from the test."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.transport = Transport.listen(address, security=NullSecurity(), context=self.context)

    def next(self) -> tuple[bytes, object]:
        assert self.transport.socket.poll(WAIT_MS), "nothing arrived"
        received = self.transport.receive()
        assert received is not None
        return received[0], codec.frontend_to_scheduler.decode(received[1])

    def next_of(self, kind: type) -> tuple[bytes, object]:
        while True:
            peer, message = self.next()
            if isinstance(message, kind):
                return peer, message

    def welcome(self) -> bytes:
        peer, hello = self.next_of(Hello)
        assert isinstance(hello, Hello)
        self.send(peer, Welcome(hello.nonce, 77, 1, NEWEST, (), Limits(256, 10, 10), Credit(1, 1)))
        return peer

    def send(self, peer: bytes, message: object) -> None:
        self.transport.send(codec.encode(message), peer)  # type: ignore[arg-type]

    def close(self) -> None:
        self.transport.close()
        self.context.term()


@pytest.fixture
def address(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def scheduler(address: str) -> Iterator[Scheduler]:
    scheduler = Scheduler(address)
    yield scheduler
    scheduler.close()


def connect(address: str, events: queue.SimpleQueue[object], times: LinkTimes | None = None) -> PeerLink:
    link = PeerLink(
        address,
        security=NullSecurity,
        decoder=codec.scheduler_to_frontend,
        greet=lambda nonce: Hello(nonce, 5, OLDEST, NEWEST),
        deliver=lambda batch: [events.put(event) for event in batch] and None,
        progress=lambda: 3,
        times=times,
    )
    link.start()
    return link


@pytest.fixture
def events() -> queue.SimpleQueue[object]:
    return queue.SimpleQueue()


@pytest.fixture
def link(address: str, events: queue.SimpleQueue[object]) -> Iterator[PeerLink]:
    link = connect(address, events)
    yield link
    link.close()


def test_messages_travel_both_ways_in_a_session(scheduler, link, events) -> None:
    peer = scheduler.welcome()
    opened = events.get(timeout=10)
    assert isinstance(opened, Opened) and opened.welcome.epoch == 77

    submit = Submit((Choice(1, 2),), "m", b"\1\0\0\0", 4)
    assert link.send(submit, opened.session)
    assert scheduler.next_of(Submit)[1] == submit

    load = Load(Credit(1, 1), 0, 0, 0, 0, ())
    scheduler.send(peer, load)
    assert events.get(timeout=10) == Received(opened.session, load)
    assert link.statistics().messages_received == 1


def test_unwelcome_ends_the_session_and_a_new_one_opens(scheduler, link, events) -> None:
    peer = scheduler.welcome()
    first = events.get(timeout=10)
    scheduler.send(peer, Unwelcome(78, "restarted"))
    assert events.get(timeout=10) == Closed("restarted")
    scheduler.welcome()
    second = events.get(timeout=10)
    assert isinstance(second, Opened) and second.session != first.session
    assert not link.send(Submit((Choice(1, 2),), "m", b"", 4), first.session)


def test_junk_from_the_other_side_is_dropped_and_counted(scheduler, link, events) -> None:
    peer = scheduler.welcome()
    events.get(timeout=10)
    for junk in (b"", b"\xc1", b"GET / HTTP/1.1\r\n\r\n", b"\x92" * 50_000):
        scheduler.transport.send(junk, peer)
    load = Load(Credit(1, 1), 0, 0, 0, 0, ())
    scheduler.send(peer, load)
    assert isinstance(events.get(timeout=10), Received)
    assert link.statistics().frames_dropped == 4


def test_pings_carry_the_main_loops_progress(scheduler, link, events) -> None:
    scheduler.welcome()
    assert scheduler.next_of(Ping)[1] == Ping(3)


def test_a_final_refusal_stops_the_greetings(scheduler, link, events) -> None:
    peer, _ = scheduler.next_of(Hello)
    scheduler.send(peer, Unwelcome(1, "no common version", final=True))
    assert events.get(timeout=10) == Refused("no common version")


def test_a_link_without_a_scheduler_closes_at_once(address, events) -> None:
    link = connect(address, events)
    assert link.statistics().session == 0
    link.close()
    assert events.empty()


TIMES = LinkTimes(ping=1.0, greet=1.0, peer_timeout=10.0)


def opened_keeper(now: float) -> SessionKeeper:
    keeper = SessionKeeper(TIMES, now)
    assert keeper.turn(now) == [Act.GREET]
    assert keeper.welcomed(keeper.nonce, now)
    return keeper


def test_silence_beyond_the_peer_timeout_loses_the_session() -> None:
    keeper = opened_keeper(0.0)
    now = 0.0
    while now < 10.0:
        now += 1.0
        assert Act.LOST not in keeper.turn(now)
    assert keeper.turn(10.5) == [Act.LOST]
    assert keeper.turn(10.5) == [Act.GREET], "the next greeting goes out at once"


def test_a_pause_of_this_process_is_not_the_other_sides_silence() -> None:
    keeper = opened_keeper(0.0)
    keeper.turn(1.0)
    assert Act.LOST not in keeper.turn(60.0)
    for second in range(61, 71):
        assert Act.LOST not in keeper.turn(float(second))
    assert keeper.turn(70.5) == [Act.LOST]


def test_a_late_welcome_opens_nothing() -> None:
    keeper = SessionKeeper(TIMES, 0.0)
    keeper.turn(0.0)
    late = keeper.nonce
    keeper.turn(1.0)
    assert keeper.nonce != late
    assert not keeper.welcomed(late, 1.1)
    assert keeper.welcomed(keeper.nonce, 1.2)
    assert not keeper.welcomed(keeper.nonce, 1.3), "one welcome opens one session"


def test_greetings_keep_their_pace_while_nobody_answers() -> None:
    keeper = SessionKeeper(TIMES, 0.0)
    acts = [act for tick in range(100) for act in keeper.turn(tick / 10)]
    assert acts.count(Act.GREET) == 10


def test_a_connection_that_leads_nowhere_is_made_anew() -> None:
    keeper = SessionKeeper(TIMES, 0.0)
    anew = [tick / 10 for tick in range(200) if Act.RECONNECT in keeper.turn(tick / 10)]
    assert anew == [5.0, 10.0, 15.0]
    assert keeper.welcomed(keeper.nonce, 20.0)
    assert Act.RECONNECT not in keeper.turn(20.1), "not while a session lives"


def test_heard_pongs_keep_the_session() -> None:
    keeper = opened_keeper(0.0)
    for second in range(1, 60):
        assert Act.LOST not in keeper.turn(float(second))
        keeper.heard(float(second))
    assert keeper.session


def test_nothing_is_sent_before_the_first_session(link) -> None:
    assert not link.send(Submit((Choice(1, 2),), "m", b"", 4), 0)


def test_pong_is_not_delivered(scheduler, link, events) -> None:
    peer = scheduler.welcome()
    events.get(timeout=10)
    scheduler.send(peer, Pong(77, 3))
    load = Load(Credit(1, 1), 0, 0, 0, 0, ())
    scheduler.send(peer, load)
    assert events.get(timeout=10) == Received(1, load)

"""One session per connection and per identity; silence ends it; strangers are told so once a second."""

from __future__ import annotations

from scheduler.sessions import REMEMBERED_STRANGERS, Kind, SessionTable


def test_the_newer_session_of_an_identity_or_of_a_connection_closes_the_older() -> None:
    table = SessionTable(peer_timeout=10.0)
    first = table.open(b"a", (Kind.FRONTEND, 1), 1, 0.0)
    other = table.open(b"b", (Kind.FRONTEND, 2), 1, 0.0)
    assert table.older(b"c", (Kind.FRONTEND, 1)) == [first]
    assert table.older(b"b", (Kind.FRONTEND, 1)) == [other, first]
    assert table.older(b"a", (Kind.FRONTEND, 1)) == [first]
    assert table.older(b"c", (Kind.LAUNCHER, 1)) == [], "another kind of peer"


def test_a_silent_peer_loses_its_session_after_the_peer_timeout() -> None:
    table = SessionTable(peer_timeout=10.0)
    session = table.open(b"a", (Kind.LEADER, "g"), 1, 0.0)
    assert table.silent(10.0) == []
    session.last_heard = 5.0
    assert table.silent(14.0) == []
    assert table.silent(15.1) == [session]


def test_a_pause_of_this_process_is_nobodys_silence() -> None:
    table = SessionTable(peer_timeout=10.0)
    table.open(b"a", (Kind.LEADER, "g"), 1, 0.0)
    table.restart_timers(60.0)
    assert table.silent(69.0) == []


def test_unwelcome_goes_out_once_a_second_per_connection() -> None:
    table = SessionTable(peer_timeout=10.0)
    times = [tick / 10 for tick in range(31)]
    assert sum(table.may_unwelcome(b"a", now) for now in times) == 4
    assert table.may_unwelcome(b"b", 3.0)


def test_a_flood_of_strangers_is_not_remembered_without_bound() -> None:
    table = SessionTable(peer_timeout=10.0)
    told = sum(table.may_unwelcome(number.to_bytes(4, "little"), 0.0) for number in range(2 * REMEMBERED_STRANGERS))
    assert REMEMBERED_STRANGERS <= told <= REMEMBERED_STRANGERS + 1
    assert table.may_unwelcome(b"new", 1.5), "and is forgotten"

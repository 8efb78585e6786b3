"""The loop over real sockets: a fake frontend, a fake leader, a fake launcher, and strangers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.base import Wire
from protocol.codec import encode
from protocol.frontend import (
    Abort,
    Drain,
    FinishReason,
    Frame,
    Hello,
    Load,
    ModelDown,
    ModelUp,
    Reject,
    RejectCode,
)
from protocol.session import Ping, Pong, Unwelcome
from protocol.versions import NEWEST, OLDEST
from protocol.worker import DrainGroup, GroupDown, KillGroup, LauncherHello, Plan, StepDone, Stop, WorkerWelcome
from tests.scheduler.fake_worker import register
from tests.scheduler.live_loop import Bench
from tests.scheduler.rig import FakeFrontend, expected_output, submit


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_a_request_goes_from_submit_to_finish(bench: Bench) -> None:
    frontend_peer, (leader, worker) = bench.frontend(), bench.leader()
    welcome = bench.hello(frontend_peer)
    assert [model.name for model in welcome.models] == ["m"]
    frontend, message = FakeFrontend(welcome.session), submit(1)
    frontend.expect(message)
    frontend_peer.send(message)
    bench.serve(leader, worker, until=lambda done: len(worker.executed) == 8)
    while frontend.open:
        frontend.receive(frontend_peer.next())
    assert frontend.output[1] == expected_output(message)
    assert frontend.finishes[1].reason is FinishReason.LENGTH
    load = frontend_peer.next_of(Load)
    while load.groups[0].blocks_used:
        load = frontend_peer.next_of(Load)


@pytest.mark.parametrize("asked_by", ["leader", "launcher"])
def test_a_group_that_is_to_go_is_told_to_stop_once_it_has_ended_what_it_has(bench: Bench, asked_by: str) -> None:
    frontend, (leader, worker) = bench.frontend(), bench.leader()
    bench.hello(frontend)
    frontend.send(submit(1, max_tokens=5))
    worker.receive(leader.next_of(Plan))
    drain = DrainGroup(worker.registration.group, worker.registration.incarnation, 30_000, "scaled down")
    if asked_by == "launcher":
        launcher = bench.worker()
        launcher.send(LauncherHello(1, OLDEST, NEWEST, 5))
        launcher.next_of(WorkerWelcome)
        launcher.send(drain)
    else:
        leader.send(drain)
    up = frontend.next_of(ModelUp)
    while up.model.ready_groups:
        up = frontend.next_of(ModelUp)
    stop: list[str] = []
    while not stop:
        if worker.plans:
            leader.send(worker.step())
        message = leader.next()
        if isinstance(message, Stop):
            stop.append(message.reason)
        elif isinstance(message, Plan):
            worker.receive(message)
    assert stop == ["scaled down"] and len(worker.executed) >= 5
    assert frontend.next_of(ModelDown).name == "m"


def test_two_plans_are_on_the_wire_before_the_first_answer(bench: Bench) -> None:
    frontend, (leader, _) = bench.frontend(), bench.leader()
    bench.hello(frontend)
    frontend.send(submit(1))
    assert [leader.next_of(Plan).step for _ in range(2)] == [1, 2]


def test_junk_is_dropped_and_counted_and_nothing_else_happens(bench: Bench) -> None:
    frontend, (leader, _) = bench.frontend(), bench.leader()
    junk = [b"", b"\xc1", b"GET / HTTP/1.1\r\n\r\n", b"\x92" * 50_000, encode(Pong(1, 1)), encode(Load_())]
    bench.hello(frontend)
    frontend.send(*junk)
    leader.send(*junk)
    frontend.send(Ping(5))
    assert frontend.next_of(Pong).progress == 5
    leader.send(Ping(6))
    assert leader.next_of(Pong).progress == 6
    load = frontend.next_of(Load)
    while load.frames_dropped < 2 * len(junk):
        load = frontend.next_of(Load)
    assert load.frames_dropped == 2 * len(junk)


def Load_() -> Wire:
    return Drain(1)


def test_a_message_without_a_session_is_answered_unwelcome_once_a_second(bench: Bench) -> None:
    stranger = bench.frontend()
    stranger.send(submit(1), Abort((1,)), Ping(1))
    unwelcome = stranger.next()
    assert isinstance(unwelcome, Unwelcome) and not unwelcome.final
    welcome = bench.hello(stranger)
    assert welcome.epoch == unwelcome.epoch, "one answer for three messages, then the session"
    worker = bench.worker()
    worker.send(StepDone(1, 1, 1, b"", b"", b""), Ping(1))
    assert isinstance(worker.next(), Unwelcome)


def test_disjoint_versions_are_refused_for_good(bench: Bench) -> None:
    frontend = bench.frontend()
    frontend.send(Hello(1, 1, NEWEST + 1, NEWEST + 2))
    unwelcome = frontend.next()
    assert unwelcome.final and str(NEWEST + 1) in unwelcome.reason


def test_a_pool_too_small_is_refused_for_good(bench: Bench) -> None:
    worker = bench.worker()
    worker.send(register(num_blocks=1))
    assert worker.next().final


def test_a_newer_session_of_the_same_frontend_closes_the_older_and_aborts_its_requests(bench: Bench) -> None:
    old, new, (leader, _) = bench.frontend(), bench.frontend(), bench.leader()
    bench.hello(old, instance=9, nonce=1)
    old.send(submit(1))
    leader.next_of(Plan)
    bench.hello(new, instance=9, nonce=2)
    load = new.next_of(Load)
    while load.requests_running or load.requests_waiting:
        load = new.next_of(Load)
    old.send(Ping(1))
    assert isinstance(old.next_of(Unwelcome), Unwelcome)


def test_a_newer_session_of_the_same_group_closes_the_older_and_takes_its_requests(bench: Bench) -> None:
    frontend_peer, (leader, worker) = bench.frontend(), bench.leader()
    frontend, message = FakeFrontend(bench.hello(frontend_peer).session), submit(1)
    frontend.expect(message)
    frontend_peer.send(message)
    bench.serve(leader, worker, until=lambda done: len(worker.executed) == 3)
    while len(frontend.output[1]) < 3:
        frontend.receive(frontend_peer.next())
    new_leader, new_worker = bench.leader(incarnation=2)
    frontend.steps_seen.clear()  # steps begin anew
    while leader.transport.socket.poll(0):
        leader.next()
    leader.send(Ping(1))
    assert isinstance(leader.next_of(Unwelcome), Unwelcome)
    bench.serve(new_leader, new_worker, until=lambda done: len(new_worker.executed) == 5)
    while frontend.open:
        frontend.receive(frontend_peer.next())
    assert frontend.output[1] == expected_output(message)


def test_a_frontend_that_greets_again_on_its_connection_starts_afresh(bench: Bench) -> None:
    frontend, (leader, _) = bench.frontend(), bench.leader()
    first = bench.hello(frontend, nonce=1)
    frontend.send(submit(1))
    leader.next_of(Plan)
    second = bench.hello(frontend, nonce=2)
    assert second.session != first.session
    load = frontend.next_of(Load)
    while load.requests_running:
        load = frontend.next_of(Load)


def test_a_silent_frontend_loses_its_session_and_its_requests(tmp_path: Path) -> None:
    bench = Bench(tmp_path, peer_timeout=1000.0, model_grace=1e9)
    try:
        silent, loud, launcher = bench.frontend(), bench.frontend(), bench.launcher()
        bench.leader()
        bench.hello(silent, instance=1)
        bench.hello(loud, instance=2)
        launcher.send(LauncherHello(3, OLDEST, NEWEST, 8), GroupDown("g0", 1, "no group: the request waits"))
        loud.next_of(ModelDown)
        silent.send(submit(1))
        assert (loud.next_of(Load).requests_waiting or loud.next_of(Load).requests_waiting) == 1
        for _ in range(3):  # less than half a timeout at a time: no pause of the process
            bench.advance(400.0, loud)
        while loud.next_of(Load).requests_waiting:
            pass
        silent.send(Ping(1))
        assert isinstance(silent.next_of(Unwelcome), Unwelcome)
    finally:
        bench.close()


def test_a_hung_group_is_killed_by_its_launcher_and_its_requests_go_on(bench: Bench) -> None:
    frontend_peer, launcher, (leader, worker) = bench.frontend(), bench.launcher(), bench.leader()
    launcher.send(LauncherHello(3, OLDEST, NEWEST, 8))
    assert launcher.next_of(WorkerWelcome).nonce == 3
    frontend, message = FakeFrontend(bench.hello(frontend_peer).session), submit(1)
    frontend.expect(message)
    frontend_peer.send(message)
    leader.next_of(Plan)
    bench.advance(4.0, frontend_peer, leader)
    bench.advance(4.0, frontend_peer)
    kill = launcher.next_of(KillGroup)
    assert (kill.group, kill.incarnation) == ("g0", 1)
    leader.next_of(Unwelcome)
    leader.send(worker.registration)
    assert not leader.next_of(Unwelcome).final, "the dead incarnation does not come back"
    launcher.send(GroupDown("g0", 1, "killed"))
    new_leader, new_worker = bench.leader(incarnation=2)
    bench.serve(new_leader, new_worker, until=lambda done: len(new_worker.executed) == 8)
    while frontend.open:
        frontend.receive(frontend_peer.next())
    assert frontend.output[1] == expected_output(message)


def test_a_drain_lets_requests_finish_and_takes_no_new_ones(bench: Bench) -> None:
    frontend_peer, (leader, worker) = bench.frontend(), bench.leader()
    frontend, message = FakeFrontend(bench.hello(frontend_peer).session), submit(1)
    frontend.expect(message)
    frontend_peer.send(message)
    leader_plan = leader.next_of(Plan)
    bench.loop.drain()
    assert frontend_peer.next_of(Drain).remaining_ms == 30_000
    frontend_peer.send(submit(2))
    reject = frontend_peer.next_of(Reject)
    assert reject.code is RejectCode.DRAINING
    late = bench.frontend()
    bench.hello(late, instance=5)
    assert isinstance(late.next_of(Drain), Drain), "those who come later are told too"
    worker.receive(leader_plan)
    leader.send(worker.step())
    bench.serve(leader, worker, until=lambda done: len(worker.executed) == 8)
    while frontend.open:
        frontend.receive(frontend_peer.next_of(Frame))
    assert frontend.output[1] == expected_output(message)
    bench.join()


def test_models_come_and_go_and_come_back(bench: Bench) -> None:
    frontend = bench.frontend()
    assert bench.hello(frontend).models == ()
    bench.leader()
    up = frontend.next_of(ModelUp).model
    assert (up.name, up.ready_groups, up.context) == ("m", 1, 64)
    bench.leader(incarnation=2)
    assert bench.hello(bench.frontend(), instance=2).models[0].ready_groups == 1


def test_statistics_are_published_for_other_threads(bench: Bench) -> None:
    frontend = bench.frontend()
    bench.hello(frontend)
    for _ in range(3):
        frontend.next_of(Load)
    published = bench.loop.published()
    assert published is not None and published.turns > 0 and published.frontends.sessions == 1

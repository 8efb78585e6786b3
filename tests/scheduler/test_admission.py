"""A full queue: who is refused, who gives way, and what frontends are told beforehand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.frontend import RejectCode
from protocol.requests import Choice
from scheduler.settings import CellSettings
from tests.scheduler.fake_worker import register
from tests.scheduler.rig import FakeFrontend, Rig, expected_output, submit


def full_rig(*, queue: int = 3, **cell: float) -> tuple[Rig, FakeFrontend]:
    """One request runs (rid 1), the queue behind it is full of priority 5 (rids 2 …)."""
    rig = Rig(CellSettings(max_queue_requests=queue, **cell))  # type: ignore[arg-type]
    rig.group(register(max_slots=1))
    frontend = rig.frontend()
    rig.submit(frontend, submit(1, priority=5))
    for rid in range(2, 2 + queue):
        rig.submit(frontend, submit(rid, priority=5))
    assert not frontend.rejects
    return rig, frontend


def test_a_more_urgent_newcomer_displaces_the_newest_of_the_least_urgent() -> None:
    rig, frontend = full_rig()
    rig.submit(frontend, submit(10, priority=0))
    assert frontend.rejects.keys() == {4}
    assert frontend.rejects[4].code is RejectCode.OVERLOADED and frontend.rejects[4].retry_after_ms >= 1000
    rig.submit(frontend, submit(11, priority=5))
    assert frontend.rejects.keys() == {4, 11}, "as urgent as the least urgent is not enough"
    assert rig.cell.load(rig.now).shed == 1
    rig.run_until_idle()
    assert list(frontend.finishes)[:2] == [1, 10]
    rig.check_outcomes()
    rig.check_at_rest()


def test_what_has_started_or_comes_back_never_gives_way() -> None:
    rig, frontend = full_rig(queue=2)
    worker = next(iter(rig.workers.values()))
    rig.step(worker)
    rig.lose(worker)  # rid 1 waits again, with what it has
    rig.submit(frontend, submit(10, priority=-1))
    rig.submit(frontend, submit(11, priority=-1))
    rig.submit(frontend, submit(12, priority=-1))
    assert frontend.rejects.keys() == {3, 2, 12}
    rig.group(register(incarnation=2, max_slots=1))
    rig.run_until_idle()
    assert frontend.finishes.keys() == {1, 10, 11}
    rig.check_outcomes()


def test_a_resume_is_taken_however_full_the_queue_is() -> None:
    """Its client sees a stream: it was accepted before, by this scheduler or the one before it."""
    rig, frontend = full_rig()
    message = submit(10, priority=100)
    rig.submit(frontend, replace(message, choices=(Choice(10, 7, b"\0\0\0\0"),)))
    rig.submit(frontend, submit(11, priority=-5))
    assert 10 not in frontend.rejects and frontend.rejects.keys() == {4}


def test_choices_of_one_submit_give_way_together_and_only_before_any_has_started() -> None:
    rig = Rig(CellSettings(max_queue_requests=4))
    rig.group(register(max_slots=2))
    frontend = rig.frontend()
    pair = replace(submit(1, priority=5), choices=tuple(Choice(rid, rid) for rid in (1, 2, 3)))
    rig.submit(frontend, pair)  # two start, one waits
    rig.submit(frontend, replace(submit(4, priority=5), choices=tuple(Choice(rid, rid) for rid in (4, 5, 6))))
    rig.submit(frontend, submit(7, priority=0))
    assert frontend.rejects.keys() == {4, 5, 6}
    rig.submit(frontend, replace(submit(8, priority=0), choices=tuple(Choice(rid, rid) for rid in (8, 9, 10))))
    assert frontend.rejects.keys() == {4, 5, 6, 8, 9, 10}, "rid 3 waits, but its sisters have started"
    rig.run_until_idle()
    rig.check_outcomes()
    rig.check_at_rest()


def test_nothing_gives_way_when_all_that_could_would_not_be_enough() -> None:
    rig = Rig(CellSettings(max_queue_tokens=40))
    rig.group(register(max_slots=1))
    frontend = rig.frontend()
    rig.submit(frontend, submit(1))
    rig.submit(frontend, submit(2, list(range(30)), priority=0))
    rig.submit(frontend, submit(3, list(range(10)), priority=5))
    rig.submit(frontend, submit(4, list(range(20)), priority=0))
    assert frontend.rejects.keys() == {4}


def test_what_comes_in_one_turn_is_not_refused_while_slots_are_free() -> None:
    rig = Rig(CellSettings(max_queue_requests=2))
    rig.group(register(max_slots=8))
    frontend = rig.frontend()
    for rid in range(1, 9):
        frontend.expect(submit(rid))
        rig.cell.submit(frontend.session, submit(rid), rig.now)
    rig.turn()
    assert not frontend.rejects and len(frontend.started) == 8


def test_a_fresh_request_that_waited_too_long_is_refused_and_one_that_started_is_not() -> None:
    rig, frontend = full_rig(max_queue_seconds=0.5)
    (worker,) = rig.workers.values()
    rig.turn(0.4)
    assert not frontend.rejects
    rig.turn(0.2)
    assert frontend.rejects.keys() == {2, 3, 4}
    assert {reject.code for reject in frontend.rejects.values()} == {RejectCode.OVERLOADED}
    assert rig.cell.statistics().queue_timeouts == 3
    rig.lose(worker)
    rig.turn(0.6)
    rig.group(register(incarnation=2))
    rig.run_until_idle()
    assert frontend.finishes.keys() == {1}
    rig.check_outcomes()


# ------------------------------------------------------------------------------------------------------------- credit


def test_credit_tells_which_priority_still_has_a_chance_and_when_to_come_back() -> None:
    rig, frontend = full_rig()
    credit = rig.cell.credit(frontend.session, rig.now)
    assert (credit.requests, credit.displaces) == (0, 5) and credit.retry_after_ms >= 1000
    rig.submit(frontend, submit(9, priority=credit.displaces - 1))
    assert 9 not in frontend.rejects


def test_credit_counts_on_what_leaves_before_the_next_load() -> None:
    """A queue that drains by the hundred a second is not empty before anyone dares to submit again."""
    rig = Rig(CellSettings(max_queue_requests=10))
    worker, frontend = rig.group(register(max_slots=1)), rig.frontend()
    rid = 0
    for _ in range(80):
        while len(frontend.open) < 11:
            rid += 1
            rig.submit(frontend, submit(rid, max_tokens=1))
        rig.turn(0.01)
        rig.step(worker)
    while len(frontend.open) < 11:
        rid += 1
        rig.submit(frontend, submit(rid, max_tokens=1))
    credit = rig.cell.credit(frontend.session, rig.now)
    assert rig.cell.load(rig.now).requests_waiting == 10 and 5 <= credit.requests <= 10


def test_credit_of_a_half_full_queue_is_shared_by_recent_demand() -> None:
    rig = Rig(CellSettings(max_queue_requests=100))
    rig.group(register(max_slots=1))
    busy, idle = rig.frontend(), rig.frontend()
    assert rig.cell.credit(busy.session, rig.now).requests == rig.cell.credit(idle.session, rig.now).requests == 100
    for rid in range(61):
        rig.submit(busy, submit(rid + 1))
    shares = [rig.cell.credit(frontend.session, rig.now).requests for frontend in (busy, idle)]
    assert sum(shares) <= 40 + 2 and shares[0] >= 38 and shares[1] >= 1


@settings(max_examples=40, deadline=None)
@given(
    frontends=st.integers(1, 4),
    bursts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=5, max_size=40),
    limit=st.integers(1, 30),
)
def test_credit_that_is_kept_to_is_hardly_ever_refused(
    frontends: int, bursts: list[tuple[int, int]], limit: int
) -> None:
    """Frontends that account as they should are refused by the scheduler only for what was promised twice."""
    rig = Rig(CellSettings(max_queue_requests=limit))
    worker = rig.group(register(max_slots=2))
    peers = [rig.frontend() for _ in range(frontends)]
    rid, sent = 0, dict.fromkeys(range(frontends), 0)
    credit = {at: rig.cell.credit(peer.session, rig.now) for at, peer in enumerate(peers)}
    for at, burst in bursts:
        at %= frontends
        for _ in range(burst):
            if credit[at].requests - (sent[at] - credit[at].taken_requests) < 1:
                continue
            rid += 1
            sent[at] += 1
            rig.submit(peers[at], submit(rid, max_tokens=2))
        rig.turn(0.26)
        if worker.plans:
            rig.step(worker)
        for n, peer in enumerate(peers):
            credit[n] = peer.loads[-1].credit
            assert credit[n].taken_requests == sent[n], "what was read is told"
    refused = sum(len(peer.rejects) for peer in peers)
    assert refused <= (rid if frontends > 1 else len(bursts)), "alone, only what was hoped to have left by then"
    if frontends == 1:
        assert refused <= 3 * len(bursts)
    rig.run_until_idle()
    rig.check_outcomes()
    rig.check_at_rest()


def test_every_load_is_answered_by_ids_once() -> None:
    rig, frontend = full_rig()
    rig.submit(frontend, submit(10, priority=-3))
    rig.run_until_idle()
    for rid in frontend.output:
        assert (rid in frontend.finishes) != (rid in frontend.rejects)
    assert frontend.output[10] == expected_output(submit(10, priority=-3))


# ----------------------------------------------------------------------------------------------------------- overload


@pytest.mark.parametrize("frontends", [1, 3])
def test_at_ten_times_the_load_the_groups_stay_full_and_the_rest_is_refused(frontends: int) -> None:
    """Counts, not times: steps are what a group can do, tokens what it did."""
    rig = Rig(CellSettings(max_queue_requests=40))
    shape = {"max_slots": 8, "num_blocks": 256, "max_tokens_per_step": 64}
    workers = [rig.group(register(f"g{n}", n + 1, **shape)) for n in range(2)]
    peers = [rig.frontend() for _ in range(frontends)]
    waited: dict[int, int] = {}
    sent = refused_before = rid = 0
    saturation = len(workers) * shape["max_slots"]  # tokens a step
    steps, tokens = 400, 0
    for step in range(steps):
        for _ in range(20):  # a request of 8 tokens each: 160 tokens a step for groups that make 16
            rid += 1
            peer = peers[rid % frontends]
            credit = peer.loads[-1].credit if peer.loads else rig.cell.credit(peer.session, rig.now)
            asked = rig.cell._admission._asked[peer.session].choices
            if credit.requests - (asked - credit.taken_requests) < 1:
                refused_before += 1
                continue
            sent += 1
            waited[rid] = step
            peer.expect(submit(rid))
            rig.submitted[peer.session, rid] = submit(rid)
            rig.cell.submit(peer.session, submit(rid), rig.now)
        for peer in peers:
            for started in peer.started.keys() & waited.keys():
                waited[started] -= step if waited[started] >= 0 else 0
        rig.turn(0.05)
        for worker in workers:
            if worker.plans:
                rig.step(worker)
        if step == 100:
            tokens = sum(len(output) for peer in peers for output in peer.output.values())
        assert rig.cell.load(rig.now).requests_waiting <= 40
    made = sum(len(output) for peer in peers for output in peer.output.values()) - tokens
    refused_late = sum(len(peer.rejects) for peer in peers)
    assert made >= 0.9 * saturation * (steps - 101), "goodput"
    assert refused_before + refused_late >= 0.85 * rid and refused_late <= 0.5 * refused_before
    assert all(reject.retry_after_ms >= 1000 for peer in peers for reject in peer.rejects.values())
    assert len(rig.cell._deadlines) == 0 and len(rig.cell._fleet.models["m"].queue) <= 40, "nothing piles up"
    rig.run_until_idle()
    rig.check_outcomes()
    rig.check_at_rest()

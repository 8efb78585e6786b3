"""Groups and models come, go and come back; requests find a group and survive its death."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protocol.frontend import FinishReason, ModelDown, ModelUp, RejectCode
from protocol.worker import GroupDown
from scheduler.outbox import ToFrontends
from scheduler.settings import CellSettings
from tests.scheduler.fake_worker import register
from tests.scheduler.rig import Rig, submit


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_requests_spread_over_groups_by_load(rig: Rig) -> None:
    rig.group(register("g0", 1))
    rig.group(register("g1", 2))
    frontend = rig.frontend()
    for rid in range(1, 9):
        rig.submit(frontend, submit(rid))
    placed = list(frontend.started.values())
    assert placed.count("g0") == placed.count("g1") == 4
    rig.run_until_idle()
    rig.check_outcomes()


def test_kv_pressure_counts_in_the_choice_of_a_group(rig: Rig) -> None:
    """Equal counts of requests; the one whose blocks are taken gets the next request last."""
    rig.group(register("g0", 1, max_tokens_per_step=64))
    rig.group(register("g1", 2, max_tokens_per_step=64))
    frontend = rig.frontend()
    rig.submit(frontend, submit(1, list(range(50)), max_tokens=10))
    rig.submit(frontend, submit(2, [1], max_tokens=10))
    assert frontend.started == {1: "g0", 2: "g1"}
    for worker in rig.workers.values():
        rig.step(worker)
    rig.submit(frontend, submit(3, [2]))
    assert frontend.started[3] == "g1"
    rig.run_until_idle()


def test_a_model_is_served_by_its_own_groups_alone(rig: Rig) -> None:
    one, other = rig.group(register("g0", 1, model="a")), rig.group(register("g1", 2, model="b", max_slots=1))
    frontend = rig.frontend()
    for rid in (1, 2, 3):
        rig.submit(frontend, submit(rid, model="b"))
    rig.submit(frontend, submit(4, model="a"))
    assert one.plans[0].adds and len(other.plans[0].adds) == 1, "a full model holds nobody else up"
    rig.run_until_idle()
    assert {rid: group for rid, group in frontend.started.items() if rid == 4} == {4: "g0"}
    rig.check_outcomes()


def test_requests_of_a_dead_group_go_on_elsewhere_with_the_ids_they_have(rig: Rig) -> None:
    worker, other = rig.group(register("g0", 1)), rig.group(register("g1", 2))
    frontend = rig.frontend()
    for rid in range(1, 7):
        rig.submit(frontend, submit(rid))
    for _ in range(3):
        rig.step(worker)
    rig.lose(worker)
    rig.run_until_idle()
    rig.check_outcomes()
    rig.check_at_rest()
    assert other.executed and rig.cell.statistics().group_losses == 1


def test_a_request_in_a_plan_at_a_groups_death_is_counted_a_suspect(rig: Rig) -> None:
    worker, frontend = rig.group(register(max_slots=1)), rig.frontend()
    rig.submit(frontend, submit(1))
    rig.submit(frontend, submit(2))
    rig.lose(worker)
    live = rig.cell._frontends[frontend.session]
    assert (live[1].suspicion, live[2].suspicion) == (1, 0)


def test_a_model_known_once_stays_listed_and_its_requests_wait_for_the_relaunch(rig: Rig) -> None:
    worker, frontend = rig.group(), rig.frontend()
    rig.lose(worker)
    told = [out.message for out in rig.log if isinstance(out, ToFrontends)]
    assert [type(message) for message in told if isinstance(message, ModelUp | ModelDown)] == [ModelUp, ModelDown]
    (model,) = rig.cell.models()
    assert (model.name, model.ready_groups) == ("m", 0)
    rig.submit(frontend, submit(1))
    assert not frontend.rejects
    rig.group(register(incarnation=2))
    rig.run_until_idle()
    rig.check_outcomes()


def test_requests_do_not_wait_forever_for_a_model_without_a_group() -> None:
    rig = Rig(CellSettings(model_grace=10.0))
    worker, frontend = rig.group(), rig.frontend()
    rig.submit(frontend, submit(1))
    rig.step(worker)
    rig.lose(worker)
    rig.submit(frontend, submit(2))
    rig.turn(9.0)
    assert not frontend.rejects and not frontend.finishes
    rig.turn(2.0)
    assert frontend.rejects[2].code is RejectCode.UNAVAILABLE
    assert frontend.finishes[1].reason is FinishReason.ERROR, "it had started: its client has seen tokens"


def test_a_launchers_word_of_a_death_is_enough(rig: Rig) -> None:
    worker, frontend = rig.group(), rig.frontend()
    rig.submit(frontend, submit(1))
    session = rig.session_of(worker)
    rig.cell.group_down(GroupDown("g0", 99, "another incarnation"), rig.now)
    rig.turn()
    assert not rig.ended_leaders
    rig.cell.group_down(GroupDown("g0", 1, "rank 0 exited with 17"), rig.now)
    rig.turn()
    assert rig.ended_leaders == [session] and rig.cell.load(rig.now).requests_waiting == 1


def test_a_group_of_another_tokenizer_does_not_join_a_model_that_is_served(rig: Rig) -> None:
    rig.group()
    stranger = replace(register("g1", 2), tokenizer_digest=b"x" * 16)
    refusal = rig.cell.refusal(stranger)
    assert refusal is not None and refusal.final and "g0" in refusal.reason and "g1" in refusal.reason


def test_a_pool_too_small_for_any_request_is_refused_in_words(rig: Rig) -> None:
    refusal = rig.cell.refusal(register(num_blocks=1))
    assert refusal is not None and refusal.final and "1 blocks" in refusal.reason


def test_a_shorter_context_after_a_relaunch_shortens_what_waits(rig: Rig) -> None:
    worker, frontend = rig.group(register(context=60)), rig.frontend()
    rig.submit(frontend, submit(1, [1, 2], max_tokens=50))
    rig.submit(frontend, submit(2, list(range(30)), max_tokens=10))
    rig.lose(worker)
    rig.group(register(incarnation=2, context=20))
    rig.run_until_idle()
    assert (frontend.finishes[1].count, frontend.finishes[2].count) == (18, 0)
    rig.check_at_rest()

"""Groups and models come, go and come back; requests find a group and survive its death."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protocol.frontend import FinishReason, ModelDown, ModelUp, RejectCode
from protocol.worker import DrainGroup, GroupDown, Stop
from scheduler.outbox import ToFrontends, ToLeader
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


# --------------------------------------------------------------------------------------------------- choice of a group


def test_a_cached_prefix_draws_requests_but_not_onto_a_group_that_is_full_of_them(rig: Rig) -> None:
    """Affinity is worth a step at most: while the other group idles, a shared prefix does not pile up on one."""
    shape = {"num_blocks": 400, "max_slots": 16, "max_tokens_per_step": 16, "context": 200}
    groups = {name: rig.group(register(name, n, **shape)) for n, name in enumerate(("g0", "g1"), 1)}
    frontend = rig.frontend()
    prefix = list(range(48))
    rig.submit(frontend, submit(1, [*prefix, 1], max_tokens=1, block_size=4))
    rig.run_until_idle()
    home = frontend.started[1]
    for rid in range(2, 4):
        rig.submit(frontend, submit(rid, [*prefix, rid], max_tokens=60, block_size=4))
    assert {frontend.started[2], frontend.started[3]} == {home}, "where its prefix is, while that group has time"
    for rid in range(4, 30):
        rig.submit(frontend, submit(rid, [*prefix, rid], max_tokens=60, block_size=4))
        for worker in groups.values():
            if worker.plans:
                rig.step(worker)
    placed = [frontend.started[rid] for rid in range(2, 30) if rid in frontend.started]
    assert len(set(placed)) == 2 and placed.count(home) > len(placed) / 2
    rig.run_until_idle()
    rig.check_outcomes()


@pytest.mark.parametrize("prompt", [24, 80])
def test_choices_of_one_request_go_to_one_group_and_its_prompt_is_computed_once(rig: Rig, prompt: int) -> None:
    """Also while other groups idle, and whether the prompt takes a part of a step or several."""
    shape = {"num_blocks": 400, "max_slots": 16, "max_tokens_per_step": 32, "context": 200}
    workers = [rig.group(register(f"g{number}", number + 1, **shape)) for number in range(3)]
    frontend = rig.frontend()
    rig.submit(frontend, submit(1, list(range(prompt)), choices=4, block_size=4, max_tokens=5))
    rig.run_until_idle()
    assert len(set(frontend.started.values())) == 1 and len(frontend.started) == 4
    computed = sum(int(batch.lengths[batch.num_decodes :].sum()) for worker in workers for _, batch in worker.executed)
    assert computed <= prompt + 3 * 4, "what is not full of the last block each computes itself"
    rig.check_outcomes()
    rig.check_at_rest()


def test_newcomers_of_one_turn_see_each_other(rig: Rig) -> None:
    """What was just admitted counts at once, before any plan or step."""
    for number in range(4):
        rig.group(register(f"g{number}", number + 1, max_slots=16))
    frontend = rig.frontend()
    for rid in range(1, 17):
        frontend.expect(submit(rid))
        rig.cell.submit(frontend.session, submit(rid), rig.now)
    rig.turn()
    placed = list(frontend.started.values())
    assert {placed.count(f"g{number}") for number in range(4)} == {4}
    rig.run_until_idle()


def test_models_do_not_stand_in_each_others_way(rig: Rig) -> None:
    """One model's queue is full of requests that do not fit; the other model's run on."""
    rig.group(register("g0", 1, model="a", max_slots=1))
    busy = rig.group(register("g1", 2, model="b", max_slots=2))
    frontend = rig.frontend()
    for rid in range(1, 40):
        rig.submit(frontend, submit(rid, model="a", max_tokens=30))
    for rid in range(40, 44):
        rig.submit(frontend, submit(rid, model="b", max_tokens=3))
    while busy.plans:
        rig.step(busy)
    assert frontend.finishes.keys() == set(range(40, 44))
    rig.run_until_idle()
    rig.check_outcomes()
    rig.check_at_rest()


# --------------------------------------------------------------------------------------------------------------- drains


def stopped(rig: Rig) -> list[str]:
    """Reasons of the Stops that were sent."""
    return [out.message.reason for out in rig.log if isinstance(out, ToLeader) and isinstance(out.message, Stop)]


def test_a_group_that_is_to_go_ends_what_it_has_and_gets_nothing_new(rig: Rig) -> None:
    going, staying = rig.group(register("g0", 1)), rig.group(register("g1", 2))
    frontend = rig.frontend()
    for rid in (1, 2):
        rig.submit(frontend, submit(rid))
    session, held = rig.session_of(going), [rid for rid, group in frontend.started.items() if group == "g0"]
    rig.cell.drain_group(DrainGroup("g0", 1, 60_000, "fewer are wanted"), rig.now)
    rig.turn()
    (model,) = rig.cell.models()
    assert held and model.ready_groups == 1 and rig.cell.statistics().groups_draining == 1
    for rid in range(3, 9):
        rig.submit(frontend, submit(rid))
    assert all(group == "g1" for rid, group in frontend.started.items() if rid > 2)
    assert not rig.ended_leaders
    rig.run_until_idle()
    assert stopped(rig) == ["fewer are wanted"] and rig.ended_leaders == [session]
    statistics = rig.cell.statistics()
    assert (statistics.groups, statistics.group_losses, statistics.requeues) == (1, 0, 0)
    assert staying.executed
    rig.check_outcomes()
    rig.check_at_rest()


def test_what_runs_when_a_drains_time_is_up_goes_on_elsewhere(rig: Rig) -> None:
    going = rig.group(register("g0", 1))
    frontend = rig.frontend()
    rig.submit(frontend, submit(1, max_tokens=20))
    for _ in range(3):
        rig.step(going)
    rig.group(register("g1", 2))
    rig.cell.drain_group(DrainGroup("g0", 1, 500), rig.now)
    rig.turn(0.4)
    assert not stopped(rig)
    rig.turn(0.2)
    assert len(stopped(rig)) == 1 and rig.cell.statistics().requeues == 1
    rig.run_until_idle()
    rig.check_outcomes()
    assert rig.cell._frontends[frontend.session] == {} and rig.cell.statistics().group_losses == 0


def test_an_idle_group_that_is_to_go_goes_at_once_and_its_model_waits_for_the_next(rig: Rig) -> None:
    rig.group(register("g0", 1))
    frontend = rig.frontend()
    rig.cell.drain_group(DrainGroup("g0", 99, 1000), rig.now)
    rig.turn()
    assert not stopped(rig), "another incarnation is meant"
    rig.cell.drain_group(DrainGroup("g0", 1, 1000), rig.now)
    rig.turn()
    assert len(stopped(rig)) == 1 and rig.cell.models()[0].ready_groups == 0
    rig.submit(frontend, submit(1))
    assert not frontend.rejects
    rig.group(register("g0", 2))
    rig.run_until_idle()
    rig.check_outcomes()

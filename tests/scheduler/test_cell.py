"""In which order a cell runs what it took, and how it ends."""

from __future__ import annotations

import pytest

from protocol.frontend import FinishReason, RejectCode
from protocol.requests import Sampling
from scheduler.group_policy import GroupPolicy
from scheduler.settings import CellSettings
from tests.scheduler.fake_worker import register
from tests.scheduler.rig import Rig, expected_output, submit


@pytest.fixture
def rig() -> Rig:
    return Rig()


# ------------------------------------------------------------------------------------------------------------- queue


def test_the_queue_is_bounded_in_requests_and_says_when_to_come_back() -> None:
    rig = Rig(CellSettings(max_queue_requests=2))
    worker, frontend = rig.group(register(max_slots=1)), rig.frontend()
    for rid in range(1, 5):
        rig.submit(frontend, submit(rid))
    assert frontend.rejects.keys() == {4}
    assert frontend.rejects[4].code is RejectCode.OVERLOADED and frontend.rejects[4].retry_after_ms >= 1000
    assert rig.cell.credit(frontend.session, rig.now).requests == 0
    assert worker.plans
    rig.run_until_idle()
    rig.check_outcomes()
    assert rig.cell.credit(frontend.session, rig.now).requests == 2


def test_the_queue_is_bounded_in_tokens_but_an_empty_one_takes_any_submit() -> None:
    rig = Rig(CellSettings(max_queue_tokens=10))
    rig.group(register(max_slots=1))
    frontend = rig.frontend()
    rig.submit(frontend, submit(1))
    rig.submit(frontend, submit(2, list(range(30))))
    rig.submit(frontend, submit(3))
    assert frontend.rejects.keys() == {3}
    rig.run_until_idle()
    rig.check_outcomes()


def test_order_is_priority_then_arrival(rig: Rig) -> None:
    rig.group(register(max_slots=1))
    frontend = rig.frontend()
    rig.submit(frontend, submit(1))
    for rid, priority in ((2, 0), (3, 5), (4, -5), (5, 0)):
        rig.submit(frontend, submit(rid, priority=priority))
    rig.run_until_idle()
    assert list(frontend.finishes) == [1, 4, 2, 5, 3]


def test_a_request_that_lost_its_group_comes_before_fresh_ones_of_its_priority(rig: Rig) -> None:
    worker, frontend = rig.group(register(max_slots=1)), rig.frontend()
    rig.submit(frontend, submit(1, priority=1))
    rig.submit(frontend, submit(2, priority=1))
    rig.submit(frontend, submit(3, priority=0))
    rig.step(worker)
    rig.lose(worker)
    rig.group(register(incarnation=2, max_slots=1))
    rig.run_until_idle()
    assert list(frontend.finishes) == [3, 1, 2]
    rig.check_outcomes()


def hold_a_big_one_back(rig: Rig, small: int) -> list[int]:
    """A running request, a big one that does not fit beside it, and small ones behind; returns the start order."""
    rig.group(register(num_blocks=14, context=52, max_slots=32, max_tokens_per_step=64))
    frontend = rig.frontend()
    rig.submit(frontend, submit(1, list(range(20)), max_tokens=30))
    rig.submit(frontend, submit(2, list(range(40)), max_tokens=2))
    for rid in range(3, 3 + small):
        rig.submit(frontend, submit(rid, [rid], max_tokens=1))
        for worker in rig.workers.values():
            if worker.plans and len(frontend.output[1]) < 12:
                rig.step(worker)
    rig.run_until_idle()
    rig.check_outcomes()
    return list(frontend.started)


def test_small_requests_pass_one_that_does_not_fit(rig: Rig) -> None:
    assert hold_a_big_one_back(rig, 3) == [1, 3, 4, 5, 2]


def test_one_that_does_not_fit_is_passed_eight_times_at_most(rig: Rig) -> None:
    order = hold_a_big_one_back(rig, 20)
    assert order.index(2) <= 1 + 8


def test_a_prompt_is_admitted_only_when_all_of_it_fits_beside_the_watermark(rig: Rig) -> None:
    rig.group(register(num_blocks=10, context=32))
    frontend = rig.frontend()
    rig.submit(frontend, submit(1, list(range(16)), max_tokens=2))  # 4 blocks
    rig.submit(frontend, submit(2, list(range(24)), max_tokens=2))  # 6 blocks: the pool's rest, watermark included
    assert frontend.started.keys() == {1}
    rig.run_until_idle()
    rig.check_outcomes()


@pytest.mark.parametrize("ids", range(1, 9))
@pytest.mark.parametrize(("blocks", "block_size"), [(3, 16), (9, 16), (5, 4), (12, 4), (20, 1), (33, 2)])
def test_one_request_alone_always_completes_up_to_the_effective_context(ids: int, blocks: int, block_size: int) -> None:
    rig = Rig(seed=ids)
    registration = register(num_blocks=blocks, block_size=block_size, max_ids_per_row=ids, context=500)
    if rig.cell.refusal(registration):
        assert (blocks - 1) * block_size < 2 + 2 * ids, "refused although a request would fit"
        return
    worker, frontend = rig.group(registration), rig.frontend()
    (model,) = rig.cell.models()
    rig.submit(frontend, submit(1, [1], max_tokens=10_000))
    rig.run_until_idle()
    assert frontend.finishes[1].count == model.context - 1
    assert rig.cell.load(rig.now).groups[0].preemptions == 0 and worker.executed
    rig.check_at_rest()


def test_many_requests_on_a_pool_for_one_all_complete(rig: Rig) -> None:
    rig.group(register(num_blocks=5, context=16, max_ids_per_row=2))
    frontend = rig.frontend()
    for rid in range(1, 9):
        rig.submit(frontend, submit(rid, [rid, 2], max_tokens=9))
    rig.run_until_idle()
    rig.check_outcomes()
    rig.check_at_rest()
    load = rig.cell.load(rig.now).groups[0]
    assert load.preemptions < 8 * 3, "requests do not push each other out forever"


@pytest.mark.parametrize(("stretch", "prefill"), [(0.0, 7), (4.0, 2)])
def test_prefill_chunks_share_a_step_with_decodes_within_the_budget(stretch: float, prefill: int) -> None:
    """All that decodes leave, or what they can bear: until steps were measured, a quarter of the step."""
    rig = Rig(CellSettings(group=GroupPolicy(prefill_stretch=stretch)))
    worker, frontend = rig.group(register(max_tokens_per_step=8)), rig.frontend()
    rig.submit(frontend, submit(1, [1, 2], max_tokens=30))
    rig.step(worker)
    rig.submit(frontend, submit(2, list(range(20)), max_tokens=2))
    rig.run_until_idle()
    mixed = [batch for _, batch in worker.executed if 0 < batch.num_decodes < len(batch.slots)]
    assert len(mixed) >= 3 and all(batch.lengths.sum() == 1 + prefill for batch in mixed[:2])
    rig.check_outcomes()


def test_a_long_prompt_leaves_room_in_a_step_for_the_others() -> None:
    rig = Rig(CellSettings(group=GroupPolicy(long_prefill_threshold=4)))
    worker, frontend = rig.group(register(max_tokens_per_step=16)), rig.frontend()
    rig.submit(frontend, submit(1, list(range(60)), max_tokens=1))
    rig.submit(frontend, submit(2, list(range(3)), max_tokens=1))
    rig.run_until_idle()
    assert next(iter(frontend.finishes)) == 2, "the short one is through before the long one"
    assert max(batch.lengths.max() for _, batch in worker.executed) == 16, "alone it has the whole step"
    rig.check_outcomes()


# --------------------------------------------------------------------------------------------------- ends and resumes


def test_a_deadline_ends_a_request_wherever_it_is(rig: Rig) -> None:
    worker, frontend = rig.group(register(max_slots=1)), rig.frontend()
    rig.submit(frontend, submit(1, remaining_ms=500))
    rig.submit(frontend, submit(2, remaining_ms=500))
    rig.submit(frontend, submit(3))
    rig.step(worker)
    assert rig.cell.next_deadline() == pytest.approx(rig.now + 0.5)
    rig.turn(0.6)
    assert {rid: finish.reason for rid, finish in frontend.finishes.items()} == dict.fromkeys(
        (1, 2), FinishReason.DEADLINE
    )
    assert frontend.finishes[1].count == len(frontend.output[1]) == 1
    rig.run_until_idle()
    rig.check_outcomes()
    rig.check_at_rest()


def test_a_resume_continues_at_its_next_index(rig: Rig) -> None:
    rig.group()
    frontend = rig.frontend()
    whole = expected_output(submit(1))
    rig.submit(frontend, submit(1, resume=tuple(whole[:3])))
    rig.run_until_idle()
    assert frontend.output[1] == whole and frontend.finishes[1].count == len(whole)


@pytest.mark.parametrize(
    ("resume", "fields", "reason"),
    [
        ((5, 6), {"stop": (6,)}, FinishReason.STOP),
        ((5, 6), {"max_tokens": 2}, FinishReason.LENGTH),
        ((5, 6, 7), {"max_tokens": 2}, FinishReason.LENGTH),
    ],
)
def test_a_resume_that_is_already_at_its_end_is_finished_at_once(rig: Rig, resume, fields, reason) -> None:
    worker, frontend = rig.group(), rig.frontend()
    rig.submit(frontend, submit(1, resume=resume, **fields))
    assert frontend.finishes[1].reason is reason and frontend.finishes[1].count == len(resume)
    assert not worker.plans
    rig.check_at_rest()


def test_a_stop_id_before_min_tokens_ends_no_resume(rig: Rig) -> None:
    rig.group()
    frontend = rig.frontend()
    first = expected_output(submit(1))[:1]
    message = submit(1, resume=tuple(first), stop=tuple(first), sampling=Sampling(min_tokens=3))
    rig.submit(frontend, message)
    assert not frontend.finishes
    rig.run_until_idle()
    rig.check_outcomes()


def test_a_lost_frontend_takes_its_requests_and_no_one_elses_with_it(rig: Rig) -> None:
    worker, gone, stays = rig.group(register(max_slots=2)), rig.frontend(), rig.frontend()
    for frontend in (gone, stays):
        for rid in (1, 2):
            rig.submit(frontend, submit(rid))
    rig.step(worker)
    del rig.frontends[gone.session]
    rig.cell.frontend_lost(gone.session)
    rig.turn()
    rig.run_until_idle()
    rig.check_outcomes()
    rig.check_at_rest()
    assert stays.finishes.keys() == {1, 2}


# -------------------------------------------------------------------------------------------------------------- load


def test_load_comes_while_it_changes_and_once_a_second_otherwise(rig: Rig) -> None:
    worker, frontend = rig.group(), rig.frontend()
    rig.turn(5.0)
    frontend.loads.clear()
    for _ in range(40):
        rig.turn(0.1)
    assert 3 <= len(frontend.loads) <= 4
    frontend.loads.clear()
    rig.submit(frontend, submit(1, max_tokens=40))
    for _ in range(20):
        rig.step(worker)
        rig.turn(0.1)
    assert 6 <= len(frontend.loads) <= 8
    last = frontend.loads[-1].groups[0]
    assert last.steps > 10 and last.generation_tokens == len(frontend.output[1])
    assert last.blocks_used > 0 and last.prompt_tokens == 5 and last.step_us == last.steps * 1000


def test_a_draining_cell_takes_nothing_new_and_finishes_the_rest(rig: Rig) -> None:
    rig.group()
    frontend = rig.frontend()
    rig.submit(frontend, submit(1))
    rig.cell.draining = True
    rig.submit(frontend, submit(2))
    assert frontend.rejects[2].code is RejectCode.DRAINING and not rig.cell.idle
    rig.run_until_idle()
    assert rig.cell.idle
    rig.check_outcomes()

"""The rules of PROTOCOL §5, "Steps", each by name, at a cell with fake groups."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protocol.frontend import FinishReason
from protocol.packing import pack_u8, pack_u32, unpack_u32
from protocol.requests import Sampling
from protocol.worker import KillGroup, Reset, RowStatus
from scheduler.outbox import ToLeader
from tests.scheduler.fake_worker import FakeWorker, id_at, register
from tests.scheduler.rig import EPOCH, FakeFrontend, Rig, expected_output, submit

TIGHT = {"num_blocks": 9, "block_size": 4, "max_slots": 4, "max_tokens_per_step": 16, "context": 32}
"""Two requests of 5 tokens start side by side; both cannot come to 20."""


@pytest.fixture
def rig() -> Rig:
    return Rig()


def one_running(rig: Rig, **fields: object) -> tuple[FakeFrontend, FakeWorker]:
    worker, frontend = rig.group(), rig.frontend()
    rig.submit(frontend, submit(1, **fields))  # type: ignore[arg-type]
    return frontend, worker


def rows_of(worker: FakeWorker) -> list[list[int]]:
    """Slots of each executed step."""
    return [batch.slots.tolist() for _, batch in worker.executed]


def test_the_next_plan_is_sent_before_the_step_before_it_is_done(rig: Rig) -> None:
    _, worker = one_running(rig)
    assert [plan.step for plan in worker.plans] == [1, 2], "step 2 decodes what step 1, not executed yet, will sample"
    rig.step(worker)
    assert [plan.step for plan in worker.plans] == [2, 3], "never more than two"


def test_the_next_plan_leaves_before_the_frames_of_the_step_that_made_room(rig: Rig) -> None:
    _, worker = one_running(rig)
    rig.log.clear()
    rig.cell.step_done(rig.session_of(worker), worker.step(), rig.now)
    kinds = [type(outgoing).__name__ for outgoing in rig.cell.take_outbox()]
    assert kinds == ["ToLeader", "StepFrames"]


def test_a_step_done_is_matched_by_epoch_incarnation_and_step(rig: Rig) -> None:
    frontend, worker = one_running(rig)
    session = rig.session_of(worker)
    done = worker.step()
    wrong = [
        replace(done, epoch=EPOCH + 1),
        replace(done, incarnation=done.incarnation + 1),
        replace(done, step=done.step + 1),
        replace(done, step=done.step - 1),
    ]
    for stale in wrong:
        rig.cell.step_done(session, stale, rig.now)
        rig.turn()
    assert rig.cell.statistics().stale_steps == len(wrong) and not frontend.output[1]
    rig.cell.step_done(session, done, rig.now)
    rig.cell.step_done(session, done, rig.now)
    rig.turn()
    assert frontend.output[1] == expected_output(submit(1))[:1], "once, and not twice"


def test_rows_are_matched_to_the_plans_record_and_never_by_slot(rig: Rig) -> None:
    """A slot that changes hands while its old row is under way does not give that row's ids to the new sequence."""
    worker, frontend = rig.group(register(max_slots=1)), rig.frontend()
    rig.submit(frontend, submit(1, [1, 2, 3]))
    rig.abort(frontend, 1)
    rig.submit(frontend, submit(2, [9, 9]))
    rig.run_until_idle()
    assert frontend.output[1] == []
    assert frontend.output[2] == expected_output(rig.submitted[frontend.session, 2])
    adds = [add.slot for plan, _ in worker.executed for add in plan.adds]
    assert adds == [0, 0]


def test_after_a_failed_step_every_row_is_requeued_and_a_reset_names_the_next_step(rig: Rig) -> None:
    frontend, worker = one_running(rig)
    rig.submit(frontend, submit(2, [5, 6, 7]))
    for _ in range(3):
        rig.step(worker)
    reached = {rid: len(output) for rid, output in frontend.output.items()}
    assert min(reached.values()) > 0
    planned = rig.plans()[-1].step
    rig.fail(worker)
    resets = [out.message for out in rig.log if isinstance(out, ToLeader) and isinstance(out.message, Reset)]
    assert resets[-1] == Reset(EPOCH, planned + 1)
    assert worker.plans[0].step == planned + 1
    resumed = {add.prompt_len: len(unpack_u32(add.tokens)) for add in worker.plans[0].adds}
    assert resumed == {5: 5 + reached[1], 3: 3 + reached[2]}, "with the ids they have"
    rig.run_until_idle()
    rig.check_outcomes()
    rig.check_at_rest()


def test_a_late_failure_changes_nothing(rig: Rig) -> None:
    _, worker = one_running(rig)
    failed = worker.fail()
    rig.cell.step_failed(rig.session_of(worker), failed, rig.now)
    rig.turn()
    rig.cell.step_failed(rig.session_of(worker), failed, rig.now)
    rig.turn()
    assert rig.cell.statistics().stale_steps == 1
    rig.run_until_idle()
    rig.check_outcomes()


def test_a_group_that_only_fails_is_given_up(rig: Rig) -> None:
    _, worker = one_running(rig)
    for _ in range(3):
        rig.fail(worker)
    assert [kill.group for kill in rig.kills] == ["g0"]
    refusal = rig.cell.refusal(worker.registration)
    assert refusal is not None and not refusal.final, "the launcher is to kill it, not to think it hopeless"
    rig.group(register(incarnation=2))
    rig.run_until_idle()
    rig.check_outcomes()


def test_a_finished_request_settles_and_its_surplus_ids_go_nowhere(rig: Rig) -> None:
    """The plan after the one that ends it is out already; its row comes back and is dropped."""
    prompt = [1, 2, 3, 4, 5]
    last = id_at(pack_u32(prompt), 7, 1)
    frontend, worker = one_running(rig, prompt=prompt, stop=(last,))
    rig.run_until_idle()
    assert frontend.finishes[1].reason is FinishReason.STOP and frontend.finishes[1].stop_id == last
    assert len(frontend.output[1]) == 2
    assert rows_of(worker) == [[0], [0], [0]], "a third row ran"
    rig.check_at_rest()


def test_an_aborted_request_settles_and_its_ids_go_nowhere(rig: Rig) -> None:
    frontend, worker = one_running(rig)
    rig.step(worker)
    rig.abort(frontend, 1)
    count = len(frontend.output[1])
    rig.run_until_idle()
    assert frontend.finishes[1].reason is FinishReason.ABORT and frontend.finishes[1].count == count
    rig.check_at_rest()


def preempt_one(rig: Rig) -> tuple[FakeFrontend, FakeWorker]:
    """Step a tight group until the later of two requests has been preempted."""
    worker, frontend = rig.group(register(**TIGHT)), rig.frontend()
    for rid, first in ((1, 10), (2, 20)):
        rig.submit(frontend, submit(rid, [first, 2, 3, 4, 5], max_tokens=20))
    while not rig.cell.load(rig.now).groups[0].preemptions:
        rig.step(worker)
    return frontend, worker


def test_a_decode_without_a_block_preempts_the_newest_of_the_lowest_priority(rig: Rig) -> None:
    frontend, worker = preempt_one(rig)
    running = [slot for slot in range(4) if worker.table.occupied[slot]]
    rig.run_until_idle()
    assert frontend.output.keys() == {1, 2} and running
    first_finish = next(frame.finishes[0].rid for frame in frontend.frames if frame.finishes)
    assert first_finish == 1, "the older ran on"
    rig.check_outcomes()
    rig.check_at_rest()


def preempt_a_row_under_way(rig: Rig) -> tuple[FakeFrontend, FakeWorker]:
    """Choices 1 and 2 ask for a block with one left; 3 has a row in step 2 when plan 3 takes its blocks."""
    worker, frontend = rig.group(register(num_blocks=5, context=16, max_slots=4)), rig.frontend()
    for rid, prompt in ((1, [1, 2, 3, 4]), (2, [2, 2, 3, 4]), (3, [3, 2, 3, 4, 5])):
        message = submit(rid, prompt)
        frontend.expect(message)
        rig.submitted[frontend.session, rid] = message
        rig.cell.submit(frontend.session, message, rig.now)
    rig.turn()
    rig.step(worker)
    assert rig.cell.load(rig.now).groups[0].preemptions == 1
    assert unpack_u32(worker.plans[-1].drops).tolist() == [2], "dropped by plan 3 while plan 2 is out"
    return frontend, worker


def test_ids_that_arrive_for_a_preempted_row_are_appended_before_it_is_requeued(rig: Rig) -> None:
    frontend, worker = preempt_a_row_under_way(rig)
    assert len(frontend.output[3]) == 1 and rig.cell.load(rig.now).requests_waiting == 0, "settling"
    rig.step(worker)
    assert len(frontend.output[3]) == 2 and rig.cell.load(rig.now).requests_waiting == 1, "requeued with the late id"
    rig.run_until_idle()
    rig.check_outcomes()
    rig.check_at_rest()


def test_a_preempted_request_that_ends_with_its_late_ids_is_finished_and_not_requeued(rig: Rig) -> None:
    last = id_at(pack_u32([3, 2, 3, 4, 5]), 7, 1)
    stop = pack_u32([last])
    original = rig.cell.submit
    rig.cell.submit = lambda session, message, now: original(  # type: ignore[method-assign]
        session, replace(message, stop_ids=stop), now
    )
    frontend, worker = preempt_a_row_under_way(rig)
    rig.step(worker)
    assert frontend.finishes[3].reason is FinishReason.STOP and frontend.finishes[3].count == 2
    rig.run_until_idle()
    rig.check_at_rest()


def test_a_preempted_request_is_admitted_nowhere_until_it_has_settled(rig: Rig) -> None:
    """Not even by a group that is idle."""
    frontend, worker = preempt_a_row_under_way(rig)
    other = rig.group(register("g1", 2))
    assert not other.plans
    rig.step(worker)
    assert [add.prompt_len for add in other.plans[0].adds] == [5]
    rig.run_until_idle()
    rig.check_outcomes()
    assert frontend.started[3] == "g0", "told once"


def test_blocks_of_a_released_sequence_serve_the_very_next_plan(rig: Rig) -> None:
    """In order: the plan that drops a slot may hand its blocks on, though an older plan still writes them."""
    worker, frontend = rig.group(register(num_blocks=3, context=8, max_slots=2)), rig.frontend()
    rig.submit(frontend, submit(1, [1, 2, 3, 4], max_tokens=4))
    rig.submit(frontend, submit(2, [5, 6, 7, 8], max_tokens=4))
    rig.abort(frontend, 1)
    rig.step(worker)
    plan = worker.plans[-1]
    assert unpack_u32(plan.drops).tolist() == [0] and len(plan.adds) == 1
    rig.run_until_idle()  # the fake worker reads back every KV position
    rig.check_outcomes()
    rig.check_at_rest()


def test_a_row_known_to_reach_max_tokens_sits_out_the_step_after(rig: Rig) -> None:
    frontend, worker = one_running(rig, max_tokens=1)
    rig.submit(frontend, submit(2, [9, 8], max_tokens=5))
    rig.run_until_idle()
    skips = [unpack_u32(plan.skips).tolist() for plan, _ in worker.executed]
    assert [0] in skips, "its last id is under way: no row is spent on it"
    assert frontend.finishes[1].reason is FinishReason.LENGTH
    rig.check_outcomes()


def test_no_plan_is_sent_for_nothing(rig: Rig) -> None:
    frontend, worker = one_running(rig, max_tokens=1)
    rig.run_until_idle()
    rig.turn(1.0)
    assert len(worker.executed) == 1 and not worker.plans
    rig.check_at_rest()
    rig.submit(frontend, submit(2))
    assert unpack_u32(worker.plans[0].drops).tolist() == [0], "the drop goes with the next plan"


@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding", "settling", "finished", "unknown"])
def test_abort_is_legal_in_any_state_idempotent_and_answered_unless_finished(state: str) -> None:
    rig = Rig()
    frontend = rig.frontend()
    if state == "settling":
        frontend, worker = preempt_one(rig)
        assert rig.cell.load(rig.now).groups[0].preemptions
        rid = 2
    else:
        worker = rig.group(register(max_tokens_per_step=4))
        rid = 1
        if state == "queued":
            rig.lose(worker)
        if state != "unknown":
            rig.submit(frontend, submit(rid, list(range(10)), max_tokens=3))
        if state == "decoding":
            while not frontend.output[rid]:
                rig.step(worker)
        elif state == "prefilling":
            rig.step(worker)
        elif state == "finished":
            rig.run_until_idle()
    before = len(frontend.finishes)
    for _ in range(2):
        rig.abort(frontend, rid)
    answered = state not in ("finished", "unknown")
    assert len(frontend.finishes) == before + answered
    if answered:
        assert frontend.finishes[rid].reason is FinishReason.ABORT
    rig.run_until_idle()
    rig.check_outcomes()
    if rig.workers:
        rig.check_at_rest()


def test_an_abort_carries_exact_ids(rig: Rig) -> None:
    worker, one, other = rig.group(), rig.frontend(), rig.frontend()
    for frontend in (one, other):
        rig.submit(frontend, submit(1))
        rig.submit(frontend, submit(11))
    rig.abort(one, 1)
    rig.run_until_idle()
    reasons = [frontend.finishes[rid].reason for frontend in (one, other) for rid in (1, 11)]
    assert reasons == [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.LENGTH]
    assert worker.executed


def test_an_overdue_step_makes_its_group_suspect_and_nothing_new_is_admitted_there(rig: Rig) -> None:
    frontend, worker = one_running(rig)
    rig.turn(2.0)
    rig.submit(frontend, submit(2))
    assert not rig.cell.load(rig.now).groups[0].ready and rig.cell.load(rig.now).requests_waiting == 1
    rig.step(worker)
    assert rig.cell.load(rig.now).groups[0].ready and rig.cell.load(rig.now).requests_waiting == 0, "it was only slow"
    rig.run_until_idle()
    rig.check_outcomes()


def test_a_suspect_group_whose_step_then_fails_is_trusted_again(rig: Rig) -> None:
    _, worker = one_running(rig)
    rig.turn(2.0)
    rig.fail(worker)
    assert rig.cell.load(rig.now).groups[0].ready
    rig.run_until_idle()
    rig.check_outcomes()


def test_a_step_overdue_beyond_its_limit_is_the_groups_death(rig: Rig) -> None:
    _, worker = one_running(rig)
    for _ in range(3):
        rig.step(worker)
    late = worker.step()
    session = rig.session_of(worker)
    rig.turn(4.9)
    assert not rig.kills
    rig.turn(0.2)
    assert rig.kills == [KillGroup("g0", 1, "a step took too long")] and rig.ended_leaders == [session]
    rig.cell.step_done(session, late, rig.now)
    rig.turn()
    assert rig.cell.statistics().stale_steps == 1, "the dead incarnation's answer is dropped"
    assert rig.cell.given_up() and rig.cell.load(rig.now).requests_waiting == 1
    rig.group(register(incarnation=2))
    rig.run_until_idle()
    rig.check_outcomes()
    rig.check_at_rest()


def test_the_limit_of_a_step_follows_what_steps_take(rig: Rig) -> None:
    _, worker = one_running(rig, max_tokens=6)
    rig.turn(4.0)
    rig.step(worker)
    rig.turn(30.0)
    assert not rig.kills, "ten times the slowest recent step, not five seconds"
    rig.turn(11.0)
    assert rig.kills


def test_a_pause_of_this_process_gives_every_step_its_time_again(rig: Rig) -> None:
    one_running(rig)
    rig.now += 60.0
    rig.cell.restart_timers(rig.now)
    rig.turn()
    assert not rig.kills
    rig.turn(5.1)
    assert rig.kills


FAILED = {RowStatus.EMPTY_SUPPORT: FinishReason.NO_TOKEN}
"""A row that its own request left no token is that client's mistake; all else is the engine's."""


@pytest.mark.parametrize("status", [RowStatus.NAN, RowStatus.EMPTY_SUPPORT, RowStatus.FAULT])
def test_a_rows_fault_fails_one_request_and_never_the_group(rig: Rig, status: RowStatus) -> None:
    frontend, worker = one_running(rig)
    rig.submit(frontend, submit(2, [4, 4]))
    rig.step(worker)
    rig.step(worker, {0: status})
    rig.run_until_idle()
    assert frontend.finishes[1].reason is FAILED.get(status, FinishReason.ERROR) and frontend.finishes[1].message
    assert frontend.finishes[2].reason is FinishReason.LENGTH
    rig.check_outcomes()
    rig.check_at_rest()


@pytest.mark.parametrize("step", range(4))
def test_a_row_that_was_not_ready_loses_nothing(step: int) -> None:
    """Also when it was the last chunk and the next plan already takes it for decoding."""
    rig = Rig()
    worker, frontend = rig.group(register(max_tokens_per_step=4, max_ids_per_row=2)), rig.frontend()
    rig.submit(frontend, submit(1, list(range(10)), max_tokens=6))
    for _ in range(step):
        rig.step(worker)
    rig.step(worker, {0: RowStatus.NOT_READY})
    rig.run_until_idle()
    rig.check_outcomes()
    assert frontend.finishes[1].reason is FinishReason.LENGTH
    assert worker.resets == 1, "and the step did not fail for it"
    rig.check_at_rest()


@pytest.mark.parametrize(
    "change",
    [
        {"counts": b""},
        {"counts": pack_u8([2]), "ids": pack_u32([1, 1])},
        {"ids": b"\0"},
        {"ids": pack_u32([10_000])},
        {"status": pack_u8([9])},
        {"counts": pack_u8([0]), "ids": b""},
        {"status": pack_u8([RowStatus.NAN])},
    ],
)
def test_an_answer_that_does_not_fit_its_plan_counts_as_a_failed_step(rig: Rig, change: dict[str, bytes]) -> None:
    _, worker = one_running(rig)
    done = worker.step()
    worker.plans.clear()
    rig.cell.step_done(rig.session_of(worker), replace(done, **change), rig.now)
    rig.turn()
    assert worker.resets == 2
    rig.run_until_idle()
    rig.check_outcomes()


def test_ids_past_a_stop_id_or_max_tokens_are_dropped() -> None:
    for seed in range(20):
        rig = Rig(seed=seed)
        rig.group(register(max_ids_per_row=8, num_blocks=200))
        frontend = rig.frontend()
        for rid in range(1, 9):
            stop = tuple(range(rid)) if rid % 2 else ()
            rig.submit(frontend, submit(rid, [rid], max_tokens=7 + rid, stop=stop, sampling=Sampling(min_tokens=2)))
        rig.run_until_idle()
        rig.check_outcomes()
        rig.check_at_rest()


def test_more_stop_ids_than_the_matrix_holds_stop_all_the_same(rig: Rig) -> None:
    prompt = [1, 2, 3]
    stops = tuple(range(40))
    rig.group()
    frontend = rig.frontend()
    message = submit(1, prompt, max_tokens=30, stop=stops)
    rig.submit(frontend, message)
    rig.run_until_idle()
    assert frontend.output[1] == expected_output(message) and frontend.finishes[1].reason is FinishReason.STOP

"""Logprob records reach whoever asked for them, each once, with the ids or the prompt tokens they belong to."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protocol.frontend import FinishReason, RejectCode
from protocol.packing import pack_u32
from protocol.requests import Choice, Sampling
from protocol.worker import RowStatus
from scheduler.settings import CellSettings
from tests.scheduler.fake_worker import FakeWorker, register
from tests.scheduler.rig import Rig, expected_output, submit

# The fake frontend compares every record with what its position must give, see FakeFrontend.
BOTH = Sampling(logprobs=3, prompt_logprobs=2)
PROMPT = list(range(20))
TIGHT = {"num_blocks": 9, "block_size": 4, "max_slots": 4, "max_tokens_per_step": 16, "context": 32}
"""Two requests of 5 tokens start side by side; both cannot come to 20."""


@pytest.fixture
def rig() -> Rig:
    return Rig()


def prompt_alternatives(worker: FakeWorker) -> list[int]:
    """``prompt_logprobs`` of every sequence the worker was given, in order."""
    return [add.sampling.prompt_logprobs for plan, _ in worker.executed for add in plan.adds]


@pytest.mark.parametrize("ids", range(1, 9))
def test_records_are_cut_where_the_ids_are(ids: int) -> None:
    for max_tokens in (1, 2, 7):
        rig = Rig(seed=ids)
        rig.group(register(max_ids_per_row=ids, max_tokens_per_step=9))
        frontend = rig.frontend()
        stop = tuple(expected_output(submit(2, max_tokens=3))[-1:])
        rig.submit(frontend, submit(1, PROMPT, max_tokens=max_tokens, sampling=BOTH))
        rig.submit(frontend, submit(2, max_tokens=7, stop=stop, sampling=Sampling(logprobs=0)))
        rig.submit(frontend, submit(3, max_tokens=max_tokens))
        rig.run_until_idle()
        rig.check_outcomes()
        assert frontend.judged == {1: len(PROMPT) - 1, 2: 0, 3: 0}


def test_each_frontend_gets_the_records_of_its_own_rows(rig: Rig) -> None:
    worker, first, second = rig.group(), rig.frontend(), rig.frontend()
    for rid, frontend in enumerate((first, second, first, second, second)):
        rig.submit(frontend, submit(rid, [rid, 9, 9], sampling=Sampling(logprobs=rid - 1, prompt_logprobs=rid % 3 - 1)))
    rig.run_until_idle()
    rig.check_outcomes()
    assert any(frame.logprobs and len(frame.counts) == 3 for frame in second.frames)
    assert first.judged == {0: 0, 2: 2} and second.judged == {1: 2, 3: 0, 4: 2}
    assert worker.executed


@pytest.mark.parametrize(
    ("step", "change"),
    [
        (1, {"prompt_logprobs": b""}),
        (1, {"prompt_logprobs": b"\0" * 1000}),
        (1, {"logprobs": b"\0" * 28}),
        (2, {"logprobs": b""}),
        (2, {"logprobs": b"\0" * 27}),
        (2, {"prompt_logprobs": b"\0"}),
    ],
)
def test_a_step_with_another_number_of_records_counts_as_failed(rig: Rig, step: int, change: dict[str, bytes]) -> None:
    worker, frontend = rig.group(register(max_tokens_per_step=12)), rig.frontend()
    rig.submit(frontend, submit(1, list(range(20)), sampling=BOTH))
    for _ in range(step if step == 1 else 3):
        done = worker.step()
        changed = step == done.step if step == 1 else done.step == 3
        rig.cell.step_done(rig.session_of(worker), replace(done, **change) if changed else done, rig.now)
        rig.turn()
    assert worker.resets == 2
    rig.run_until_idle()
    rig.check_outcomes()


def test_records_that_nobody_asked_for_make_a_failed_step(rig: Rig) -> None:
    worker, frontend = rig.group(), rig.frontend()
    rig.submit(frontend, submit(1))
    rig.cell.step_done(rig.session_of(worker), replace(worker.step(), logprobs=b"\0" * 12), rig.now)
    rig.turn()
    assert worker.resets == 2
    rig.run_until_idle()
    rig.check_outcomes()


@pytest.mark.parametrize("ids", [1, 3, 8])
def test_a_preemption_sends_no_prompt_record_twice(ids: int) -> None:
    rig = Rig(seed=ids)
    worker = rig.group(register(**{**TIGHT, "num_blocks": 10 if ids == 8 else 9}, max_ids_per_row=ids))
    frontend = rig.frontend()
    for rid in (1, 2, 3):
        rig.submit(frontend, submit(rid, [rid, 1, 2, 3, 4], max_tokens=15, sampling=BOTH))
    rig.run_until_idle()
    assert rig.cell.load(rig.now).groups[0].preemptions > 0
    assert set(frontend.judged.values()) == {4}
    assert -1 in prompt_alternatives(worker), "what is known is not computed again"
    rig.check_outcomes()


@pytest.mark.parametrize("steps", range(5))
def test_a_group_that_dies_in_a_prefill_costs_no_record(rig: Rig, steps: int) -> None:
    worker, frontend = rig.group(register(max_tokens_per_step=6)), rig.frontend()
    rig.submit(frontend, submit(1, PROMPT, sampling=BOTH))
    for _ in range(steps):
        rig.step(worker)
    assert frontend.judged[1] == min(6 * steps, len(PROMPT) - 1)
    rig.lose(worker)
    worker = rig.group(register(incarnation=2, max_tokens_per_step=7))
    rig.run_until_idle()
    assert frontend.judged[1] == len(PROMPT) - 1
    assert prompt_alternatives(worker) == [2 if steps < 4 else -1]
    rig.check_outcomes()


def test_a_row_that_was_not_ready_gives_its_records_later(rig: Rig) -> None:
    for late in range(4):
        worker, frontend = rig.group(register(incarnation=late + 1, max_tokens_per_step=8)), rig.frontend()
        for rid in (2, 3):
            rig.submit(frontend, submit(rid, [rid], max_tokens=20, sampling=Sampling(logprobs=rid)))
        rig.step(worker)
        rig.step(worker)
        rig.submit(frontend, submit(1, PROMPT, max_tokens=3, sampling=BOTH))
        rig.step(worker)
        for step in range(9):
            chunk_not_ready = late <= step <= late + 1 and worker.plans[0].chunks
            rig.step(worker, {2: RowStatus.NOT_READY} if chunk_not_ready else None)
        rig.run_until_idle()
        assert frontend.judged[1] == len(PROMPT) - 1
        rig.check_outcomes()


@pytest.mark.parametrize("status", [RowStatus.NAN, RowStatus.EMPTY_SUPPORT, RowStatus.FAULT])
def test_a_chunk_that_failed_owes_no_records(rig: Rig, status: RowStatus) -> None:
    worker, frontend = rig.group(register(max_tokens_per_step=30)), rig.frontend()
    for rid in (1, 2):
        rig.submit(frontend, submit(rid, PROMPT, sampling=BOTH))
    rig.step(worker, {0: status})
    rig.run_until_idle()
    assert worker.resets == 1
    assert frontend.finishes[1].message and frontend.judged == {1: 0, 2: len(PROMPT) - 1}
    rig.check_outcomes()


def test_a_resume_goes_on_with_the_records_of_its_next_id(rig: Rig) -> None:
    rig.group()
    frontend = rig.frontend()
    whole = expected_output(submit(1))
    rig.submit(frontend, submit(1, resume=tuple(whole[:3]), sampling=Sampling(logprobs=3)))
    rig.submit(frontend, submit(2, PROMPT, resume=tuple(expected_output(submit(2, PROMPT))[:2]), sampling=BOTH))
    rig.run_until_idle()
    rig.check_outcomes()
    assert frontend.judged == {1: 0, 2: len(PROMPT) - 1}


def test_an_aborted_choices_records_go_nowhere(rig: Rig) -> None:
    worker, frontend = rig.group(register(max_tokens_per_step=6)), rig.frontend()
    for rid in (1, 2):
        rig.submit(frontend, submit(rid, PROMPT, sampling=BOTH))
    rig.step(worker)
    rig.abort(frontend, 1)
    assert frontend.judged == {1: 6, 2: 0}
    rig.run_until_idle()
    assert frontend.judged == {1: 6, 2: len(PROMPT) - 1}
    rig.check_outcomes()


# --------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("ids", range(1, 9))
@pytest.mark.parametrize("prompt", [[5], PROMPT])
def test_no_output_tokens_end_a_choice_once_its_prompt_is_computed(ids: int, prompt: list[int]) -> None:
    rig = Rig(seed=ids)
    worker = rig.group(register(max_ids_per_row=ids, max_tokens_per_step=6))
    frontend = rig.frontend()
    rig.submit(frontend, submit(1, prompt, max_tokens=0, stop=(5,), sampling=BOTH))
    rig.submit(frontend, submit(2, prompt, max_tokens=0))
    rig.submit(frontend, submit(3, prompt, max_tokens=2, sampling=BOTH))
    rig.run_until_idle()
    for rid in (1, 2):
        assert frontend.finishes[rid].reason is FinishReason.LENGTH and not frontend.output[rid]
    assert frontend.judged == {1: len(prompt) - 1, 2: 0, 3: len(prompt) - 1}
    computed = sum(int(batch.lengths[batch.num_decodes :].sum()) for _, batch in worker.executed)
    assert computed == 3 * len(prompt), "also when nobody wants to know"
    rig.check_outcomes()
    rig.check_at_rest()


def test_a_prompt_that_fills_the_context_can_be_scored(rig: Rig) -> None:
    rig.group(register(num_blocks=7, context=20))
    frontend = rig.frontend()
    rig.submit(frontend, submit(1, PROMPT, max_tokens=0, sampling=BOTH))
    rig.submit(frontend, submit(2, PROMPT, max_tokens=1))
    rig.submit(frontend, submit(3, [*PROMPT, 1], max_tokens=0))
    assert frontend.rejects.keys() == {2, 3}
    rig.run_until_idle()
    assert frontend.judged[1] == len(PROMPT) - 1


def test_scoring_survives_preemption_and_the_death_of_its_group(rig: Rig) -> None:
    worker, frontend = rig.group(register(**{**TIGHT, "max_tokens_per_step": 2})), rig.frontend()
    rig.submit(frontend, submit(1, [1, 2, 3, 4, 5], max_tokens=25, priority=-1))
    for _ in range(3):
        rig.step(worker)
    rig.submit(frontend, submit(2, list(range(19)), max_tokens=0, sampling=BOTH))
    for _ in range(4):
        rig.step(worker)
    assert 0 < frontend.judged[2] < 18
    while not rig.cell.load(rig.now).groups[0].preemptions:
        rig.step(worker)
    rig.lose(worker)
    rig.group(register(incarnation=2, **TIGHT))
    rig.run_until_idle()
    assert frontend.judged[2] == 18 and not frontend.output[2]
    rig.check_outcomes()


def test_scoring_that_is_preempted_with_its_last_chunk_out_ends_with_that_chunk(rig: Rig) -> None:
    worker, frontend = rig.group(register(**{**TIGHT, "max_tokens_per_step": 2})), rig.frontend()
    rig.submit(frontend, submit(1, [1, 2, 3, 4, 5], max_tokens=25, priority=-1))
    for _ in range(5):
        rig.step(worker)
    rig.submit(frontend, submit(2, list(range(13)), max_tokens=0, sampling=BOTH))
    while not rig.cell.load(rig.now).groups[0].preemptions:
        rig.step(worker)
    assert frontend.judged[2] == 11 and 2 not in frontend.finishes
    rig.run_until_idle()
    assert len(prompt_alternatives(worker)) == 2, "it did not start over"
    rig.check_outcomes()


def test_scoring_fails_when_no_group_can_hold_the_prompt_any_more(rig: Rig) -> None:
    worker, frontend = rig.group(), rig.frontend()
    rig.lose(worker)
    rig.submit(frontend, submit(1, list(range(40)), max_tokens=0))
    rig.submit(frontend, submit(2, list(range(32)), max_tokens=0))
    rig.group(register(incarnation=2, num_blocks=9))
    rig.run_until_idle()
    assert {rid: finish.reason for rid, finish in frontend.finishes.items()} == {
        1: FinishReason.ERROR,
        2: FinishReason.LENGTH,
    }
    rig.check_at_rest()


# --------------------------------------------------------------------------------------------------------- choices


def choices(*rids: int) -> tuple[Choice, ...]:
    return tuple(Choice(rid, 1000 + rid) for rid in rids)


def test_choices_of_one_submit_are_refused_as_one_when_the_queue_is_full() -> None:
    rig = Rig(CellSettings(max_queue_requests=4))
    rig.group(register(max_slots=1))
    frontend = rig.frontend()
    rig.submit(frontend, replace(submit(1), choices=choices(1, 2, 3)))
    rig.submit(frontend, replace(submit(4), choices=choices(4, 5, 6)))
    assert frontend.rejects.keys() == {4, 5, 6} and frontend.rejects[4].code is RejectCode.OVERLOADED
    rig.run_until_idle()
    assert frontend.finishes.keys() == {1, 2, 3}
    rig.check_outcomes()


def test_each_choice_is_a_sequence_with_its_own_seed_and_its_own_records(rig: Rig) -> None:
    worker, frontend = rig.group(), rig.frontend()
    rig.submit(frontend, replace(submit(1, sampling=BOTH, max_tokens=6), choices=choices(1, 2, 3)))
    rig.run_until_idle()
    assert [add.seed for plan, _ in worker.executed for add in plan.adds] == [1001, 1002, 1003]
    assert frontend.judged == {1: 4, 2: 4, 3: 4}
    rig.check_outcomes()


def test_a_choice_may_be_aborted_or_resumed_without_the_others(rig: Rig) -> None:
    worker, frontend = rig.group(), rig.frontend()
    message = replace(submit(1, sampling=BOTH, max_tokens=6), choices=choices(1, 2, 3))
    ahead = expected_output(message, 1)[:4]
    rig.submit(frontend, replace(message, choices=(*choices(1), Choice(2, 1002, pack_u32(ahead)), *choices(3))))
    rig.step(worker)
    rig.abort(frontend, 3)
    rig.run_until_idle()
    assert frontend.finishes[3].reason is FinishReason.ABORT
    assert len(frontend.output[1]) == len(frontend.output[2]) == 6
    rig.check_outcomes()

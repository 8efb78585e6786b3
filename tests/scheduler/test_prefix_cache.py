"""Requests that begin alike share what was computed: what is found, when, by whom, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.frontend import FinishReason, Submit
from protocol.requests import Sampling
from protocol.worker import RowStatus
from scheduler.group_policy import GroupPolicy
from scheduler.prefix_index import ENTRY_BYTES
from scheduler.settings import CellSettings
from tests.scheduler.fake_worker import FakeWorker, register
from tests.scheduler.rig import FakeFrontend, Rig, expected_output, submit

BLOCK = 4
PREFIX = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]
"""Three blocks."""


@pytest.fixture
def rig() -> Rig:
    return Rig()


def ask(rid: int, prompt: list[int], **fields: Any) -> Submit:
    return submit(rid, prompt, **{"block_size": BLOCK, "max_tokens": 4, **fields})


def started(rig: Rig, **shape: int) -> tuple[FakeWorker, FakeFrontend]:
    return rig.group(register(**{"block_size": BLOCK, **shape})), rig.frontend()


def computed(worker: FakeWorker) -> list[int]:
    """Tokens that each added sequence needed not compute."""
    return [add.computed for plan, _ in worker.executed for add in plan.adds]


def run(rig: Rig) -> None:
    rig.run_until_idle()
    rig.check_outcomes()
    rig.check_at_rest()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 11, 12])
def test_a_prompt_that_was_there_before_is_found_but_for_its_last_token(rig: Rig, length: int) -> None:
    worker, frontend = started(rig)
    for rid in (1, 2):
        rig.submit(frontend, ask(rid, PREFIX[:length], seed=rid))
        run(rig)
    found = (length - 1) // BLOCK * BLOCK
    assert computed(worker) == [0, found] and frontend.cached == {1: 0, 2: found}
    load = rig.cell.load(rig.now).groups[0]
    assert (load.prompt_tokens, load.cached_tokens) == (2 * length, found)


def test_a_prefix_is_found_as_far_as_whole_blocks_agree(rig: Rig) -> None:
    _, frontend = started(rig)
    rig.submit(frontend, ask(1, PREFIX))
    run(rig)
    for rid, tail in ((2, [1]), (3, [1, 2, 3, 4, 5]), (4, [])):
        rig.submit(frontend, ask(rid, PREFIX[:10] + tail))
        run(rig)
    assert frontend.cached == {1: 0, 2: 8, 3: 8, 4: 8}


@pytest.mark.parametrize("others", [{"salt": b"else"}, {"block_size": 0}, {"block_size": 2}])
def test_what_is_named_otherwise_is_never_found(rig: Rig, others: dict[str, Any]) -> None:
    worker, frontend = started(rig)
    rig.submit(frontend, ask(1, PREFIX))
    run(rig)
    rig.submit(frontend, ask(2, PREFIX, **others))
    run(rig)
    assert computed(worker) == [0, 0]
    rig.submit(frontend, ask(3, PREFIX))
    run(rig)
    assert frontend.cached == {1: 0, 2: 0, 3: 8}


def test_reuse_can_be_turned_off() -> None:
    rig = Rig(CellSettings(group=GroupPolicy(prefix_caching=False)))
    worker, frontend = started(rig)
    for rid in (1, 2):
        rig.submit(frontend, ask(rid, PREFIX, choices=1))
        run(rig)
    rig.submit(frontend, ask(3, PREFIX, choices=3))
    assert rig.cell.load(rig.now).requests_running == 3, "nobody waits for a twin"
    run(rig)
    assert set(computed(worker)) == {0} and rig.cell.load(rig.now).groups[0].blocks_cached == 0


def test_the_next_turn_of_a_conversation_finds_the_answer_too(rig: Rig) -> None:
    _, frontend = started(rig)
    first = ask(1, PREFIX[:6], max_tokens=9)
    rig.submit(frontend, first)
    run(rig)
    rig.submit(frontend, ask(2, [*PREFIX[:6], *expected_output(first), 7, 7, 7]))
    run(rig)
    assert frontend.cached[2] == 12, "14 of its 15 tokens have KV, in three full blocks"


def test_a_twin_waits_for_what_is_being_computed_and_blocks_nobody(rig: Rig) -> None:
    worker, frontend = started(rig, max_tokens_per_step=6)
    rig.submit(frontend, ask(1, PREFIX))
    rig.submit(frontend, ask(2, PREFIX, seed=2))
    rig.submit(frontend, ask(3, [9, 9]))
    assert frontend.started.keys() == {1, 3}, "the second waits, the third does not"
    while 2 not in frontend.started:
        rig.step(worker)
    assert frontend.cached[2] == 8, "once the blocks are confirmed"
    run(rig)
    assert computed(worker) == [0, 0, 8]


def test_a_block_is_shared_only_after_the_step_that_wrote_it_is_done(rig: Rig) -> None:
    worker, frontend = started(rig)
    rig.submit(frontend, ask(1, PREFIX))
    rig.submit(frontend, ask(2, [*PREFIX, 1], seed=2))
    done = worker.step()
    rig.turn(0.01)
    assert 2 not in frontend.started, "executed, but nobody said so"
    rig.cell.step_done(rig.session_of(worker), done, rig.now)
    rig.turn()
    assert frontend.cached[2] == 12
    run(rig)


@pytest.mark.parametrize("end", ["abort", "fault", "step failure"])
def test_when_the_one_who_computes_ends_without_it_the_oldest_follower_takes_over(rig: Rig, end: str) -> None:
    worker, frontend = started(rig, max_tokens_per_step=6)
    for rid in (1, 2, 3):
        rig.submit(frontend, ask(rid, PREFIX, seed=rid))
    assert frontend.started.keys() == {1}
    if end == "abort":
        rig.abort(frontend, 1)
        rig.step(worker)
    elif end == "fault":
        rig.step(worker, {0: RowStatus.FAULT})
    else:
        rig.fail(worker)
    assert frontend.started.keys() == ({1, 2} if end != "step failure" else {1})
    run(rig)
    assert frontend.finishes[2].reason is frontend.finishes[3].reason is FinishReason.LENGTH
    assert frontend.cached[3] == 8


def test_the_more_urgent_does_not_wait_for_the_less_urgent(rig: Rig) -> None:
    worker, frontend = started(rig, max_tokens_per_step=6)
    rig.submit(frontend, ask(1, PREFIX, priority=1))
    rig.submit(frontend, ask(2, PREFIX, seed=2))
    assert frontend.started.keys() == {1, 2}
    run(rig)
    assert computed(worker) == [0, 0]
    rig.submit(frontend, ask(3, PREFIX))
    run(rig)
    assert frontend.cached[3] == 8, "one of the two was kept"


def test_choices_wait_for_the_first_ones_prompt_and_share_it(rig: Rig) -> None:
    worker, frontend = started(rig)
    rig.submit(frontend, ask(1, [*PREFIX, 1, 2], choices=4, max_tokens=3))
    assert frontend.started.keys() == {1}
    rig.step(worker)
    assert frontend.cached == {1: 0, 2: 12, 3: 12, 4: 12}
    assert rig.cell.load(rig.now).groups[0].blocks_used == 3 + 4, "three shared, and each its own end"
    run(rig)


def test_the_blocks_of_a_shared_prefix_are_counted_once_when_room_is_looked_for(rig: Rig) -> None:
    """Both fit only because they share."""
    worker, frontend = started(rig, num_blocks=8, context=20, max_slots=4)
    rig.submit(frontend, ask(1, [*PREFIX, 1, 2, 3], max_tokens=2))
    rig.submit(frontend, ask(2, [*PREFIX, 4, 5, 6], max_tokens=2, seed=2))
    rig.step(worker)
    assert rig.cell.load(rig.now).requests_running == 2
    run(rig)


def test_judging_a_prompt_computes_all_of_it_and_the_next_one_still_finds_it(rig: Rig) -> None:
    _, frontend = started(rig)
    judging = Sampling(prompt_logprobs=1)
    rig.submit(frontend, ask(1, PREFIX))
    run(rig)
    rig.submit(frontend, ask(2, PREFIX, sampling=judging, seed=2, choices=2))
    run(rig)
    rig.submit(frontend, ask(4, PREFIX))
    run(rig)
    assert frontend.cached == {1: 0, 2: 0, 3: 0, 4: 8} and frontend.judged[2] == frontend.judged[3] == 11


def test_a_preempted_judge_computes_only_what_is_not_judged_yet(rig: Rig) -> None:
    """Its blocks are there when it comes back, and so are the records of the tokens in them."""
    worker, frontend = started(rig, num_blocks=7, context=20, max_slots=2, max_tokens_per_step=8)
    rig.submit(frontend, ask(1, [1, 2, 3], max_tokens=16))
    rig.step(worker)
    rig.submit(frontend, ask(2, list(range(40, 55)), max_tokens=4, sampling=Sampling(prompt_logprobs=0)))
    run(rig)
    assert rig.cell.load(rig.now).groups[0].preemptions > 0
    assert frontend.cached[2] == 0, "counted at the first start, and never again"


def test_preempted_and_requeued_requests_find_their_own_blocks(rig: Rig) -> None:
    worker, frontend = started(rig, num_blocks=9, context=32, max_slots=4, max_tokens_per_step=16)
    for rid, first in ((1, 10), (2, 20)):
        rig.submit(frontend, ask(rid, [first, 2, 3, 4, 5], max_tokens=20))
    run(rig)
    load = rig.cell.load(rig.now).groups[0]
    assert load.preemptions > 0 and max(computed(worker)) >= 4
    assert load.cached_tokens == 0 and set(frontend.cached.values()) == {0}, "that is no hit a client should see"


@pytest.mark.parametrize("survived", [True, False])
def test_confirmed_blocks_outlive_a_failed_step_if_the_kv_does(rig: Rig, survived: bool) -> None:
    worker, frontend = started(rig)
    rig.submit(frontend, ask(1, PREFIX, max_tokens=9))
    for _ in range(3):
        rig.step(worker)
    rig.fail(worker, kv_survived=survived)
    run(rig)
    assert computed(worker) == [0, 12 if survived else 0], "prompt and two ids; the last id's KV was on its way"


def test_a_dead_groups_blocks_are_gone_with_it(rig: Rig) -> None:
    worker, frontend = started(rig)
    rig.submit(frontend, ask(1, PREFIX))
    run(rig)
    rig.lose(worker)
    worker = rig.group(register(incarnation=2))
    rig.submit(frontend, ask(2, PREFIX))
    run(rig)
    assert computed(worker) == [0]


def test_what_a_faulty_row_wrote_is_not_shared(rig: Rig) -> None:
    worker, frontend = started(rig, max_tokens_per_step=4)
    rig.submit(frontend, ask(1, PREFIX))
    rig.step(worker)
    rig.step(worker, {0: RowStatus.NAN})
    run(rig)
    rig.submit(frontend, ask(2, PREFIX))
    run(rig)
    assert frontend.cached[2] == 4, "the chunk before the fault, and nothing of it or after it"


def test_leaves_go_before_their_roots_and_the_oldest_first(rig: Rig) -> None:
    _, frontend = started(rig, num_blocks=8, context=28, max_slots=2)
    rig.submit(frontend, ask(1, PREFIX, max_tokens=1))
    run(rig)
    rig.submit(frontend, ask(2, [*PREFIX[:4], 1, 2, 3, 4, 5], max_tokens=1))
    run(rig)
    assert rig.cell.load(rig.now).groups[0].blocks_cached == 4, "the root, two of the first and one of the second"
    rig.submit(frontend, ask(3, list(range(60, 77)), max_tokens=1))
    run(rig)
    assert rig.cell.load(rig.now).groups[0].blocks_cached == 7
    rig.submit(frontend, ask(4, PREFIX, max_tokens=1))
    run(rig)
    assert frontend.cached[4] == 8, "one block had to go: the first one's leaf"


def test_the_index_is_bounded_in_bytes() -> None:
    rig = Rig(CellSettings(group=GroupPolicy(prefix_index_bytes=5 * ENTRY_BYTES)))
    _, frontend = started(rig)
    for rid in range(1, 6):
        rig.submit(frontend, ask(rid, [rid, *PREFIX]))
        run(rig)
        assert rig.cell.load(rig.now).groups[0].blocks_cached <= 5
    rig.submit(frontend, ask(9, [5, *PREFIX]))
    run(rig)
    assert frontend.cached[9] == 12, "the newest are kept"


def test_a_resumed_request_finds_what_it_had(rig: Rig) -> None:
    """As after a scheduler's restart on the frontend's side, while a group of that prefix is warm."""
    worker, frontend = started(rig)
    first = ask(1, PREFIX[:6], max_tokens=9)
    rig.submit(frontend, first)
    run(rig)
    output = expected_output(first)
    rig.submit(frontend, ask(2, PREFIX[:6], max_tokens=12, resume=tuple(output)))
    run(rig)
    assert frontend.cached[2] == 6 and computed(worker) == [0, 12], "of the prompt, all; of the output, some more"

"""A leader executes the plans it is given, in order, and says precisely when it did not."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from protocol.link import LinkTimes
from protocol.packing import pack_u32, unpack_u8
from protocol.session import Unwelcome
from protocol.worker import AdapterDone, DrainGroup, LoadAdapter, Register, RowStatus, StepFailed, Stop
from tests.workers.hand_driven import HandDrivenScheduler, slot_add
from workers.engine import EngineDescription, EngineFault, RowResults
from workers.leader import End, Ended, Leader
from workers.options import WorkerOptions
from workers.slots import PoolShape, SlotTable, StepBatch

SHAPE = PoolShape(
    num_blocks=16,
    block_size=16,
    max_slots=4,
    max_tokens_per_step=64,
    max_ids_per_row=1,
    vocab_size=256,
    context=128,
)
WAIT = 20.0


class EchoEngine:
    """Returns each sequence's last token plus one; does what a test puts into ``next_step`` first."""

    def __init__(self) -> None:
        self.description = EngineDescription(SHAPE, b"n" * 16, b"t" * 16, "echo")
        self.next_step: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.status: dict[int, RowStatus] = {}
        self.records = (b"", b"")
        self.resets = 0

    def execute(self, batch: StepBatch, table: SlotTable) -> RowResults:
        if not self.next_step.empty():
            self.next_step.get()()
        status = np.array([self.status.get(int(slot), RowStatus.OK) for slot in batch.slots], dtype=np.uint8)
        returned = batch.samples & (status == RowStatus.OK)
        ids = [(table.sequence(int(slot))[-1] + 1) % SHAPE.vocab_size for slot in batch.slots[returned]]
        logprobs, prompt_logprobs = self.records
        return RowResults(
            returned.astype(np.uint8),
            np.array(ids, dtype=np.int32),
            status,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def reset(self) -> None:
        self.resets += 1

    def close(self) -> None:
        pass


class RunningLeader:
    """A leader on a thread, as its process would run it."""

    def __init__(self, scheduler: HandDrivenScheduler, address: str, **options: object) -> None:
        self.engine = EchoEngine()
        self.registered = threading.Semaphore(0)
        settings = {"model": "m", "served_model_name": "m", "group": "g0", "incarnation": 5, "scheduler": address}
        self.leader = Leader(
            WorkerOptions(**{**settings, "lease": "held", **options}),  # type: ignore[arg-type]
            self.engine,
            on_registered=self.registered.release,
            times=LinkTimes(ping=0.05),
        )
        self.end: End | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.scheduler = scheduler

    def _run(self) -> None:
        self.end = self.leader.run()

    def join(self) -> End:
        self.thread.join(WAIT)
        assert self.end is not None, "the leader did not end"
        return self.end


@pytest.fixture
def address(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"ipc://{tmp_path}/w"


@pytest.fixture
def scheduler(address: str) -> Iterator[HandDrivenScheduler]:
    scheduler = HandDrivenScheduler(address)
    yield scheduler
    scheduler.close()


@pytest.fixture
def running(scheduler: HandDrivenScheduler, address: str) -> Iterator[RunningLeader]:
    running = RunningLeader(scheduler, address)
    yield running
    running.leader.stop("the test is over")
    running.join()


def test_a_leader_registers_what_its_engine_is(scheduler, running) -> None:
    register = scheduler.welcome().register
    assert (register.group, register.incarnation, register.model, register.tp) == ("g0", 5, "m", 1)
    assert (register.numerics_digest, register.tokenizer_digest) == (b"n" * 16, b"t" * 16)
    for field in SHAPE.__dataclass_fields__:
        assert getattr(register, field) == getattr(SHAPE, field)
    assert running.registered.acquire(timeout=WAIT)


def test_a_plan_is_executed_and_its_features_reported(scheduler, running) -> None:
    group = scheduler.open_group()
    group.add(0, [10, 11, 12], block=3)
    done, counts, ids = group.done()
    assert (done.epoch, done.incarnation, done.step) == (group.epoch, 5, 1)
    assert (counts, ids) == ([1], [13])
    assert (done.prefill_tokens, done.decode_seqs, done.sum_ctx_decode, done.sum_chunk_ctx_prefill) == (3, 0, 0, 9)
    group.plan(adds=(slot_add(2, [50, 51]),), blocks=((2, 4),), chunks=((2, 1),))
    done, counts, ids = group.done()
    assert (counts, ids) == ([1, 0], [14]), "a chunk before the end of its sequence returns nothing"
    assert (done.prefill_tokens, done.decode_seqs, done.sum_ctx_decode, done.sum_chunk_ctx_prefill) == (1, 1, 4, 1)


def test_logprobs_go_out_as_the_engine_gave_them(scheduler, running) -> None:
    group = scheduler.open_group()
    running.engine.records = (b"output", b"prompt")
    group.add(0, [10, 20, 30])
    done, _, _ = group.done()
    assert (done.logprobs, done.prompt_logprobs) == (b"output", b"prompt")


def test_plans_in_flight_are_executed_strictly_in_order(scheduler, running) -> None:
    group = scheduler.open_group()
    gate = threading.Event()
    running.engine.next_step.put(lambda: gate.wait(WAIT))
    group.add(0, [1])
    for _ in range(5):
        group.plan()
    gate.set()
    results = [group.done() for _ in range(6)]
    assert [done.step for done, _, _ in results] == [1, 2, 3, 4, 5, 6]
    assert [ids for _, _, ids in results] == [[2], [3], [4], [5], [6], [7]]


def test_a_gap_fails_the_step_and_plans_are_discarded_until_reset(scheduler, running) -> None:
    group = scheduler.open_group()
    group.add(0, [1])
    group.done()
    group.plan(step=3)
    failed = scheduler.expect(StepFailed)
    assert (failed.epoch, failed.incarnation, failed.step) == (group.epoch, 5, 3)
    assert (failed.kind, failed.kv_survived) == ("gap", True)
    group.plan(step=2)
    group.plan(step=4)
    group.reset(first_step=9)
    group.add(1, [20])
    done, _, ids = group.done()
    assert (done.step, ids) == (9, [21]), "slot 0 was dropped: only the new sequence ran"
    assert running.leader.statistics().plans_discarded == 2


def test_a_plan_before_the_first_reset_is_discarded(scheduler, running) -> None:
    group = scheduler.welcome()
    group.add(0, [1])
    group.reset()
    group.add(0, [30])
    assert group.done()[2] == [31]


@pytest.mark.parametrize(
    "contradiction",
    [
        {"drops": (3,)},
        {"chunks": ((0, 1),)},
        {"blocks": ((0, 9999),)},
        {"adds": (slot_add(77, [1]),)},
        {"adds": (slot_add(1, [300]),), "blocks": ((1, 1),), "chunks": ((1, 1),)},
        {"adds": (slot_add(1, [1]),), "chunks": ((1, 1),)},
        {"epoch": 78},
        {"incarnation": 6},
    ],
    ids=[
        "empty slot dropped",
        "no token left to prefill",
        "block beyond the pool",
        "slot beyond the table",
        "id beyond the vocabulary",
        "no block for a position",
        "epoch",
        "incarnation",
    ],
)
def test_a_plan_that_contradicts_the_tables_is_refused(scheduler, running, contradiction) -> None:
    group = scheduler.open_group()
    group.add(0, [1])
    group.done()
    group.plan(**contradiction)
    failed = scheduler.expect(StepFailed)
    assert (failed.kind, failed.kv_survived, failed.epoch) == ("invalid_plan", True, group.epoch)
    group.reset()
    group.add(0, [40])
    assert group.done()[2] == [41]


def test_an_engines_fault_is_reported_and_the_leader_lives_on(scheduler, running) -> None:
    def out_of_memory() -> None:
        raise EngineFault("out_of_memory", "no room for activations", kv_survived=False)

    group = scheduler.open_group()
    running.engine.next_step.put(out_of_memory)
    group.add(0, [1])
    failed = scheduler.expect(StepFailed)
    assert (failed.kind, failed.kv_survived, failed.message) == (
        "out_of_memory",
        False,
        "no room for activations",
    )
    group.reset()
    group.add(0, [40])
    assert group.done()[2] == [41]


def test_a_failed_row_fails_alone_and_rows_keep_their_order(scheduler, running) -> None:
    group = scheduler.open_group()
    running.engine.status = {0: RowStatus.NAN}
    group.plan(adds=(slot_add(0, [1]), slot_add(1, [60])), blocks=((0, 0), (1, 1)), chunks=((0, 1), (1, 1)))
    group.plan()
    done, counts, ids = group.done()
    assert unpack_u8(done.status).tolist() == [RowStatus.NAN, RowStatus.OK]
    assert (counts, ids) == ([0, 1], [61])
    done, counts, ids = group.done()
    assert len(done.status) == 2, "the plan already in flight still has the failed slot as its first row"
    assert ids[-1] == 62


def test_losing_the_session_drops_every_slot(scheduler, running) -> None:
    group = scheduler.open_group()
    group.add(0, [1])
    group.add(1, [2], block=1)
    group.done(), group.done()
    assert running.leader.statistics().slots_occupied == 2
    scheduler.send(group.peer, Unwelcome(99, "restarted"))
    again = scheduler.open_group(epoch=99)
    again.add(0, [5])
    assert again.done()[2] == [6], "slot 0 was free, and nothing else ran"
    assert running.leader.statistics().slots_occupied == 1


def test_a_step_that_outlives_its_session_is_not_reported_in_the_next(scheduler, running) -> None:
    group = scheduler.open_group()
    gate, began = threading.Event(), threading.Event()
    running.engine.next_step.put(lambda: (began.set(), gate.wait(WAIT)))
    group.add(0, [1])
    assert began.wait(WAIT)
    scheduler.send(group.peer, Unwelcome(99, "restarted"))
    again = scheduler.open_group(epoch=99)
    again.add(0, [5])
    gate.set()
    done, _, ids = again.done()
    assert (done.epoch, ids) == (99, [6])


def test_stop_ends_the_leader_after_what_it_received(scheduler, address) -> None:
    running = RunningLeader(scheduler, address)
    group = scheduler.open_group()
    group.add(0, [1])
    group.plan()
    group.send(Stop("the model is unloaded"))
    assert running.join() == End(Ended.STOPPED, "the model is unloaded")
    assert [group.done()[0].step for _ in range(2)] == [1, 2]


def test_a_busy_leader_that_is_to_end_asks_for_a_drain_and_ends_by_stop(scheduler, address) -> None:
    running = RunningLeader(scheduler, address, drain_timeout=7.0)
    group = scheduler.open_group()
    group.add(0, [1])
    group.done()
    running.leader.drain("SIGTERM")
    drain = scheduler.expect(DrainGroup)
    assert (drain.group, drain.remaining_ms, drain.reason) == (group.register.group, 7000, "SIGTERM")
    group.plan()
    assert group.done()[0].step == 2, "what runs there goes on"
    group.send(Stop("SIGTERM"))
    assert running.join() == End(Ended.STOPPED, "SIGTERM")


def test_an_idle_leader_that_is_to_end_ends_at_once(scheduler, address) -> None:
    running = RunningLeader(scheduler, address)
    scheduler.open_group()
    running.leader.drain("SIGTERM")
    assert running.join() == End(Ended.STOPPED, "SIGTERM")


def test_a_drain_ends_with_the_session(scheduler, address) -> None:
    running = RunningLeader(scheduler, address)
    group = scheduler.open_group()
    group.add(0, [1])
    group.done()
    running.leader.drain("SIGTERM")
    scheduler.expect(DrainGroup)
    scheduler.send(group.peer, Unwelcome(99, "restarted"))
    assert running.join() == End(Ended.STOPPED, "restarted")


def test_a_drain_that_nobody_ends_is_over_after_its_limit(scheduler, address, monkeypatch) -> None:
    monkeypatch.setattr("workers.leader.DRAIN_MARGIN", 0.0)
    running = RunningLeader(scheduler, address, drain_timeout=0.0)
    group = scheduler.open_group()
    group.add(0, [1])
    group.done()
    running.leader.drain("SIGTERM")
    assert running.join() == End(Ended.STOPPED, "the drain limit is over")


def test_a_final_refusal_ends_the_leader(scheduler, address) -> None:
    running = RunningLeader(scheduler, address)
    peer, _ = scheduler.next_of(Register)
    scheduler.send(peer, Unwelcome(1, "versions 9..9", final=True))
    end = running.join()
    assert end.why is Ended.REFUSED and "versions 9..9" in end.message


def test_a_leader_without_lease_and_session_ends_itself(address) -> None:
    running = RunningLeader(None, address, lease="", orphan_ttl=0.0)  # type: ignore[arg-type]
    assert running.join().why is Ended.ORPHANED


def test_pings_show_whether_the_loop_turns(scheduler, running) -> None:
    group = scheduler.open_group()
    gate, began = threading.Event(), threading.Event()
    running.engine.next_step.put(lambda: (began.set(), gate.wait(WAIT)))
    group.add(0, [1])
    assert began.wait(WAIT)
    stuck = running.leader.progress()
    while scheduler.next_ping().progress != stuck:
        pass
    assert [scheduler.next_ping().progress for _ in range(3)] == [stuck] * 3
    gate.set()
    group.done()
    while scheduler.next_ping().progress <= stuck:
        pass


def test_adapters_are_declined(scheduler, running) -> None:
    group = scheduler.open_group()
    group.send(LoadAdapter("french", "/somewhere"))
    declined = scheduler.expect(AdapterDone)
    assert (declined.adapter, declined.ok) == ("french", False)


def test_the_step_log_has_a_line_per_step(scheduler, address, tmp_path) -> None:
    log = tmp_path / "steps.jsonl"
    running = RunningLeader(scheduler, address, step_log=str(log))
    group = scheduler.open_group()
    group.add(0, [1, 2])
    group.plan()
    done = [group.done()[0] for _ in range(2)]
    group.send(Stop())
    running.join()
    assert [json.loads(line) for line in log.read_text().splitlines()] == [
        {
            "step": step.step,
            "rows": 1,
            "ids": 1,
            "step_us": step.step_us,
            "prefill_tokens": step.prefill_tokens,
            "decode_seqs": step.decode_seqs,
            "sum_ctx_decode": step.sum_ctx_decode,
            "sum_chunk_ctx_prefill": step.sum_chunk_ctx_prefill,
        }
        for step in done
    ]


def test_ragged_bulk_fields_are_an_invalid_plan(scheduler, running) -> None:
    group = scheduler.open_group()
    plan = group.make_plan()
    group.send(type(plan)(plan.epoch, plan.incarnation, plan.step, drops=pack_u32([0])[:3]))
    assert scheduler.expect(StepFailed).kind == "invalid_plan"

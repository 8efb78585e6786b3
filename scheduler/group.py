"""One group: which sequences hold its slots and blocks, and what each step runs.

Pure: StepDone in, Plan out; no socket, no clock. The decode path works on arrays over slots; Python objects are
touched on admission, finish, block growth and for rows that failed. Knows nothing of queues, models or other groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from protocol.frontend import FinishReason, PromptLogprobs
from protocol.ids import Epoch, Incarnation, SessionId
from protocol.worker import Plan, RowStatus, StepDone
from scheduler.block_pool import IntegrityError, PoolStatistics
from scheduler.group_policy import GroupPolicy
from scheduler.ledger import PlanRecord, StepLedger
from scheduler.logprobs import StepRecords
from scheduler.pacing import PrefillPace
from scheduler.planner import Planner
from scheduler.requests import Sequence, State
from scheduler.results import (
    ADVANCES,
    BoolArray,
    Delivery,
    Finished,
    Int64Array,
    Rows,
    StepOutcome,
    deliver_one,
    read_rows,
)
from scheduler.results import first_stop as find_first_stop
from scheduler.shape import GroupShape
from scheduler.tenancy import SlotIndex, Tenancy

FAILURES = {
    RowStatus.EMPTY_SUPPORT: (FinishReason.NO_TOKEN, "no token is allowed here"),
    RowStatus.NAN: (FinishReason.ERROR, "the model's output is not a number"),
    RowStatus.FAULT: (FinishReason.ERROR, "the engine failed on this request"),
}


@dataclass(frozen=True)
class GroupStatistics:
    """Pools now, and counters since the group registered."""

    blocks: PoolStatistics
    running: int
    settling: int
    plans_out: int
    pending_prefill: int
    preemptions: int
    prompt_tokens: int
    """Prompt lengths of requests admitted for the first time."""
    cached_tokens: int
    """Of these: found computed."""
    generation_tokens: int
    """Ids accepted as output."""
    steps: int
    step_us: int


class GroupScheduler:
    """Slots, blocks and plans of one incarnation of one group.

    A caller admits while there is room, asks for plans while there are any, and feeds back each StepDone; after either
    of the last two, ``take_requeued`` holds the preempted sequences that may now be admitted anywhere.
    """

    def __init__(
        self, shape: GroupShape, epoch: Epoch, incarnation: Incarnation, policy: GroupPolicy | None = None
    ) -> None:
        self.shape = shape
        self._policy = policy or GroupPolicy()
        self._epoch = epoch
        self._incarnation = incarnation
        self._preemptions = 0
        self._pace = PrefillPace(self._policy.prefill_stretch, shape.max_tokens_per_step)
        self._start(Tenancy(shape, self._policy.index_bytes), last_planned=0)
        self._prompt_tokens = self._cached_tokens = self._generation_tokens = self._steps = self._step_us = 0

    def _start(self, tenancy: Tenancy, last_planned: int) -> None:
        self._tenancy = tenancy
        self._ledger = StepLedger(last_planned)
        self._planner = Planner(tenancy, self._ledger, self._epoch, self._incarnation, self._pace, self._policy)

    # -------------------------------------------------------------------------------------------------- admission

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return self._tenancy.running

    @property
    def idle(self) -> bool:
        """Nothing runs, settles or is out."""
        return not (self.running or self._ledger.settling or self._ledger.records or self._planner.preempted)

    @property
    def steps(self) -> int:
        """Steps done."""
        return self._steps

    @property
    def plans_out(self) -> int:
        """Plans made and not done."""
        return len(self._ledger.records)

    @property
    def wants_plan(self) -> bool:
        """Fewer plans are out than may be."""
        return not self._ledger.full

    def is_out(self, step: int) -> bool:
        """Whether the plan of this step was made and is not done."""
        return self._ledger.last_done < step <= self._ledger.last_planned

    @property
    def next_step(self) -> int:
        """The step the next plan will carry."""
        return self._ledger.last_planned + 1

    @property
    def pending_prefill(self) -> int:
        """Prefill tokens of admitted sequences that no plan covers yet."""
        return self._tenancy.pending_prefill

    @property
    def blocks_used(self) -> int:
        """Blocks held by sequences."""
        return self.shape.num_blocks - self._tenancy.pool.free

    @property
    def has_room(self) -> bool:
        """A slot is free, and the next step's budget has tokens left after decodes and the chunks already waiting."""
        return not self._tenancy.full and self.running + self.pending_prefill < self.shape.max_tokens_per_step

    def free_for_admission(self) -> int:
        """Blocks a newcomer may take: not the watermark, nor what those who run will ask for soon.

        Alone on the group it may take all; the effective context sees to it that all is enough.
        """
        free = self._tenancy.pool.free
        return free - self.shape.watermark - self._planner.blocks_wanted_soon() if self.running else free

    def surely_free_for_admission(self) -> int:
        """No more than ``free_for_admission``, without a look at who runs."""
        free = self._tenancy.pool.free
        return free - self.shape.watermark - self.running * self._planner.most_wanted_soon if self.running else free

    def blocks_to_admit(self, sequence: Sequence) -> int:
        """Blocks that its admission would take from those free; fewer when others hold the beginning it shares."""
        return self._tenancy.blocks_to_admit(sequence)

    def cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of its prefill that it would find computed if it were admitted now."""
        return self._tenancy.hit(sequence) * self.shape.block_size

    def coming_tokens(self, sequence: Sequence) -> int:
        """Tokens behind those that are being computed for others right now."""
        return self._tenancy.coming(sequence) * self.shape.block_size

    def parks(self, sequence: Sequence) -> bool:
        """Whether to wait a moment: the next tokens that it lacks are being computed for another sequence."""
        return self._tenancy.parks(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Give it a slot and the blocks of its whole prefill; the caller has seen that both are there."""
        cached = self._tenancy.admit(sequence)
        self._planner.rows_changed()
        if not sequence.started:
            prompt = len(sequence.request.prompt)
            sequence.cached_tokens = min(cached, prompt)
            self._prompt_tokens += prompt
            self._cached_tokens += sequence.cached_tokens

    def plan(self) -> Plan | None:
        """The next step, or None when two are out or there is nothing to run."""
        return self._planner.plan()

    # -------------------------------------------------------------------------------------------------- step done

    def step_done(self, done: StepDone) -> StepOutcome | None:
        """Accept a step's ids; None when no such step is due (a late answer, or one that was never asked for).

        Raises BadStepDone, before anything changes, when the rows do not fit the plan.
        """
        if not self._ledger.expects(done.step):
            return None
        record = self._ledger.records[0]
        rows = read_rows(done, record.samples, self.shape.max_ids_per_row, self.shape.vocab_size)
        records = StepRecords(done, record.wanted, rows)
        self._ledger.close()
        self._planner.rows_changed()
        slots = self._tenancy.slots
        live = slots.generation[record.slots] == record.generations
        all_live = np.count_nonzero(live) == len(live)
        if all_live:
            slots.under_way[record.slots] -= record.samples
        else:
            slots.under_way[record.slots[live]] -= record.samples[live]
        if len(record.slots) > record.num_decodes:
            self._confirm_chunks(record, rows, live)
        finished: list[Finished] = []
        judged = self._take_prompt_records(records)
        delivery = self._accept(record, rows, records, live, finished)
        if rows.failed:
            self._take_failures(record, rows, live, finished)
        if self._ledger.settling:
            late = self._take_late_ids(record, rows, records, finished)
            delivery = delivery.joined(late) if late else delivery
            self._planner.preempted += self._ledger.take_settled()
        self._generation_tokens += int(delivery.counts.sum())
        self._steps += 1
        self._step_us += done.step_us
        self._pace.step_took(done.step_us, record.num_decodes, record.prefill_tokens)
        return StepOutcome(delivery, finished, judged)

    def _confirm_chunks(self, record: PlanRecord, rows: Rows, live: BoolArray) -> None:
        """The KV of these chunks is there: whoever begins with the same tokens may use it."""
        for row in range(record.num_decodes, len(record.slots)):
            if live[row] and ADVANCES[rows.status[row]]:
                slot = int(record.slots[row])
                self._tenancy.slots.computed[slot] += record.lengths[row]
                self._tenancy.confirm(slot)

    def _take_prompt_records(self, records: StepRecords) -> list[tuple[SessionId, PromptLogprobs]]:
        """Prompt logprobs that are new to their frontends: a prefill that is done again yields them again."""
        judged = []
        for chunk, data in records.prompts():
            sequence = self._tenancy.slots.tenant(chunk.slot, chunk.generation)
            if sequence is None:
                sequence = self._ledger.settling.get((chunk.slot, chunk.generation))
            if sequence is None or chunk.start + chunk.records <= sequence.judged:
                continue
            known = max(sequence.judged - chunk.start, 0)
            message = PromptLogprobs(sequence.rid, chunk.start + known + 1, data[known * chunk.record_bytes :])
            judged.append((sequence.request.session, message))
            sequence.judged = chunk.start + chunk.records
        return judged

    def _accept(
        self, record: PlanRecord, rows: Rows, records: StepRecords, live: BoolArray, finished: list[Finished]
    ) -> Delivery:
        """Append each live row's ids, cut at a stop id and at its limit; end the sequences that reached one."""
        slots = self._tenancy.slots
        returning = live & (rows.counts > 0)
        if np.count_nonzero(returning) == len(returning):  # the usual case takes no copies
            at, where, ids, counts = np.arange(len(live)), record.slots, rows.ids, rows.counts
        else:
            (at,) = returning.nonzero()
            where, ids, counts = record.slots[at], rows.ids[at], rows.counts[at]
        first, limit = slots.outputs[where], slots.limit[where]
        taken = np.minimum(counts, limit - first)
        stop = self._first_stops(where, ids, counts, first)
        if stop is not None:
            taken = np.minimum(taken, stop + 1)
        reached = first + taken
        slots.append_output(where, first, taken, ids)
        delivery = Delivery(slots.session[where], slots.rid[where], first, taken, ids, records.of_rows(at, taken))
        ended = reached >= limit
        if stop is not None:
            ended |= stop < taken
        if rows.failed:
            ended |= rows.status[at] == RowStatus.GRAMMAR_END
        scored = False
        for row in ended.nonzero()[0].tolist():
            sequence = slots.sequence(int(where[row]))
            scored |= sequence.request.scoring
            count, stop_id = int(reached[row]), -1
            if stop is not None and stop[row] < taken[row]:
                reason, stop_id = FinishReason.STOP, int(ids[row, stop[row]])
            else:
                reason = FinishReason.LENGTH if count >= sequence.request.limit else FinishReason.GRAMMAR
            self.end(sequence)
            finished.append(Finished(sequence, reason, count, stop_id))
        return delivery.without_empty_rows() if scored else delivery

    def _first_stops(
        self, where: SlotIndex, ids: Int64Array, counts: Int64Array, first: Int64Array
    ) -> Int64Array | None:
        """Column of each row's first stop id, the width or more where there is none; None when no row has one."""
        slots = self._tenancy.slots
        stop = find_first_stop(ids, counts, first, slots.min_tokens[where], slots.stops_of(where))
        if slots.with_many_stops:
            stop = np.full(len(ids), ids.shape[1], dtype=np.int64) if stop is None else stop
            for row in slots.many_stops[where].nonzero()[0].tolist():
                these = ids[row, : counts[row]].tolist()
                stop[row] = slots.sequence(int(where[row])).first_stop(these, int(first[row]))
        return stop

    def _take_failures(self, record: PlanRecord, rows: Rows, live: BoolArray, finished: list[Finished]) -> None:
        """A failed row ends its own request; a row that was not ready stays where it was."""
        slots = self._tenancy.slots
        for row in np.flatnonzero(rows.status).tolist():
            slot, status = int(record.slots[row]), RowStatus(int(rows.status[row]))
            if status is RowStatus.NOT_READY and row >= record.num_decodes:
                self._ledger.row_stood_still(slots, slot, int(record.generations[row]), int(record.lengths[row]))
                if live[row]:
                    slots.planned[slot] -= record.lengths[row]
                    self._tenancy.prefill_again(slots.sequence(slot), int(record.lengths[row]))
            elif status in FAILURES and live[row]:
                sequence, count = slots.sequence(slot), int(slots.outputs[slot])
                self.end(sequence)
                reason, message = FAILURES[status]
                finished.append(Finished(sequence, reason, count, message=message))

    def _take_late_ids(
        self, record: PlanRecord, rows: Rows, records: StepRecords, finished: list[Finished]
    ) -> list[Delivery]:
        """Ids of preempted rows are appended before their sequences are requeued."""
        late = []
        for (slot, generation), sequence in list(self._ledger.settling.items()):
            row = record.row_of(slot, generation)
            if row is None:
                continue
            status = RowStatus(int(rows.status[row]))
            ids, first = rows.ids[row, : rows.counts[row]], len(sequence.output)
            taken = sequence.append_output(ids)
            if taken:
                logprobs = records.of_rows(np.array([row]), np.array([taken]))
                late.append(deliver_one(sequence, first, ids[:taken], logprobs))
            reason, stop_id = sequence.satisfied_by_output() or (None, -1)
            if sequence.request.scoring and len(ids):
                reason = FinishReason.LENGTH
            if reason is None and status is RowStatus.GRAMMAR_END:
                reason = FinishReason.GRAMMAR
            failure, message = FAILURES.get(status, (None, ""))
            if (reason := reason or failure) is not None:
                self.end(sequence)
                finished.append(Finished(sequence, reason, len(sequence.output), stop_id, message))
        return late

    # ---------------------------------------------------------------------------------------------- leaving a slot

    def end(self, sequence: Sequence) -> None:
        """It finished or was aborted, in whatever state: its blocks serve the next plan, its late ids are dropped."""
        if sequence.state is State.RUNNING:
            self._tenancy.release(sequence)
            self._planner.rows_changed()
        elif sequence.state is State.SETTLING:
            self._ledger.forget(sequence)
        sequence.state = State.FINISHED

    def take_requeued(self) -> list[Sequence]:
        """Preempted sequences whose ids have all arrived; the caller queues them again."""
        requeued, self._planner.preempted = self._planner.preempted, []
        return requeued

    def unfinished(self) -> list[Sequence]:
        """Everything that runs here or waits for its last ids from here."""
        return [*self._tenancy.sequences(), *self._ledger.settling.values()]

    def in_flight(self) -> list[Sequence]:
        """Unfinished sequences that an outstanding plan names."""
        last_steps = self._tenancy.slots.last_step
        named = [seq for seq in self._tenancy.sequences() if last_steps[seq.slot] > self._ledger.last_done]
        return named + list(self._ledger.settling.values())

    def reset(self, *, kv_survived: bool = False) -> list[Sequence]:
        """Forget every slot and outstanding plan; returns what was unfinished, with the ids it has so far.

        Confirmed blocks stay shareable if the KV survived.
        """
        unfinished = self._tenancy.sequences()
        for sequence in unfinished:
            self._tenancy.release(sequence)
        unfinished += [*self._ledger.settling.values(), *self._planner.preempted]
        self._preemptions += self._planner.preemptions
        self._tenancy.worker_forgot()
        tenancy = self._tenancy if kv_survived else Tenancy(self.shape, self._policy.index_bytes)
        self._start(tenancy, self._ledger.last_planned)
        return unfinished

    # --------------------------------------------------------------------------------------------------- accounts

    def statistics(self) -> GroupStatistics:
        """A frozen view of pools and counters."""
        return GroupStatistics(
            blocks=self._tenancy.pool.statistics(),
            running=self.running,
            settling=len(self._ledger.settling),
            plans_out=self.plans_out,
            pending_prefill=self.pending_prefill,
            preemptions=self._preemptions + self._planner.preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._steps,
            step_us=self._step_us,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless slots, blocks, plans and counters agree."""
        self._tenancy.check_integrity()
        self._ledger.check_integrity()
        slots = self._tenancy.slots
        owed = np.zeros_like(slots.under_way)
        for record in self._ledger.records:
            live = slots.generation[record.slots] == record.generations
            owed[record.slots[live]] += record.samples[live]
        if (owed != slots.under_way)[slots.occupied].any():
            raise IntegrityError("ids under way do not match the outstanding plans")

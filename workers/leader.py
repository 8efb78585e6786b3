"""Rank 0 of a group: plans in, steps done out.

An I/O thread (``PeerLink``) keeps the session and answers for the process; this module's thread owns the tables and
the engine, and does one thing at a time: strictly the plans it received, in their order. Knows nothing of models,
sockets, or how it was started.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import cast

import numpy as np

from protocol import codec
from protocol.ids import Nonce
from protocol.link import Closed, LinkEvent, LinkStatistics, LinkTimes, Opened, PeerLink, Received, Refused
from protocol.packing import pack_u8, pack_u32
from protocol.versions import NEWEST, OLDEST
from protocol.worker import (
    AdapterDone,
    DrainGroup,
    LoadAdapter,
    Plan,
    Prepare,
    Register,
    Reset,
    RowStatus,
    StepDone,
    StepFailed,
    Stop,
    UnloadAdapter,
)
from workers.engine import Engine, EngineFault, RowResults
from workers.options import WorkerOptions
from workers.slots import BoolArray, PlanError, SlotTable, StepBatch
from workers.step_log import StepFeatures, StepLog

logger = logging.getLogger(__name__)

IDLE_TURN_SECONDS = 1.0
"""Longest sleep of the loop: an idle leader's counter moves this often."""


DRAIN_MARGIN = 2.0
"""Seconds beyond the drain limit that the scheduler's Stop may take."""


class Ended(Enum):
    """Why the leader's loop returned."""

    STOPPED = "stopped"
    """The scheduler said Stop, or ``Leader.stop`` was called."""
    REFUSED = "refused"
    """The scheduler speaks no version of ours."""
    ORPHANED = "orphaned"
    """No session for longer than the orphan TTL, and no other lease."""


@dataclass(frozen=True)
class End:
    """How the loop ended."""

    why: Ended
    message: str


@dataclass(frozen=True)
class _Drain:
    """A request to end well."""

    reason: str


@dataclass(frozen=True)
class LeaderStatistics:
    """Counters since start."""

    turns: int
    steps_done: int
    steps_failed: int
    plans_discarded: int
    """Plans that came between a StepFailed (or the start of a session) and the Reset."""
    slots_occupied: int


class Leader:
    """The session and the step loop of one group.

    ``on_registered`` is called on the loop's thread at every session's start.
    """

    def __init__(
        self,
        options: WorkerOptions,
        engine: Engine,
        *,
        on_registered: Callable[[], None] = lambda: None,
        times: LinkTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._engine = engine
        self._on_registered = on_registered
        self._clock = clock
        self._table = SlotTable(engine.description.shape)
        self._inbox: queue.SimpleQueue[list[LinkEvent | End | _Drain]] = queue.SimpleQueue()
        self._drain_ends = float("inf")
        self._turns = self._steps_done = self._steps_failed = self._plans_discarded = 0
        self._session = 0
        self._epoch = 0
        self._next_step: int | None = None
        """The step the next plan must carry; None: plans are discarded until Reset."""
        self._step_log = StepLog(options.step_log)
        self._link = PeerLink(
            options.scheduler,
            security=options.scheduler_security,
            decoder=codec.scheduler_to_leader,
            greet=self._register,
            deliver=lambda events: self._inbox.put(list(events)),
            progress=lambda: self._turns,
            times=times or LinkTimes(peer_timeout=options.peer_timeout),
        )

    def run(self) -> End:
        """Serve until told to stop; every plan received before a Stop is executed."""
        self._link.start()
        with self._step_log, contextlib.closing(self._link):
            while True:
                self._turns += 1
                for event in self._next_events():
                    end = event if isinstance(event, End) else self._handle(event)
                    self._turns += 1
                    if end is not None:
                        return end
                if (end := self._orphaned() or self._drained_too_long()) is not None:
                    return end

    def stop(self, reason: str) -> None:
        """End the loop once what was received before is done. Any thread, and signal handlers."""
        self._inbox.put([End(Ended.STOPPED, reason)])

    def drain(self, reason: str) -> None:
        """Take nothing new, and end when what runs here has ended or the drain limit is over; what is left then goes
        on elsewhere. Any thread, and signal handlers."""
        self._inbox.put([_Drain(reason)])

    def progress(self) -> int:
        """The loop's counter: stands still while a step runs or hangs."""
        return self._turns

    def link_statistics(self) -> LinkStatistics:
        """Of the connection to the scheduler."""
        return self._link.statistics()

    def statistics(self) -> LeaderStatistics:
        """A frozen view of the counters."""
        return LeaderStatistics(
            turns=self._turns,
            steps_done=self._steps_done,
            steps_failed=self._steps_failed,
            plans_discarded=self._plans_discarded,
            slots_occupied=int(self._table.occupied.sum()),
        )

    def _register(self, nonce: Nonce) -> Register:
        description = self._engine.description
        shape = description.shape
        return Register(
            nonce=nonce,
            oldest_version=OLDEST,
            newest_version=NEWEST,
            group=self._options.group,
            incarnation=self._options.incarnation,
            model=self._options.served_model_name,
            tp=self._options.tp,
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            max_slots=shape.max_slots,
            max_tokens_per_step=shape.max_tokens_per_step,
            max_ids_per_row=shape.max_ids_per_row,
            vocab_size=shape.vocab_size,
            context=shape.context,
            numerics_digest=description.numerics_digest,
            tokenizer_digest=description.tokenizer_digest,
        )

    def _next_events(self) -> list[LinkEvent | End | _Drain]:
        try:
            return self._inbox.get(timeout=IDLE_TURN_SECONDS)
        except queue.Empty:
            return []

    def _orphaned(self) -> End | None:
        alone = self._link.statistics().seconds_out_of_session
        if self._options.lease or alone <= self._options.orphan_ttl:
            return None
        return End(Ended.ORPHANED, f"no session with a scheduler for {alone:.0f} s")

    def _drained_too_long(self) -> End | None:
        return End(Ended.STOPPED, "the drain limit is over") if self._clock() >= self._drain_ends else None

    def _start_draining(self, reason: str) -> End | None:
        """The scheduler gives this group nothing more and says Stop; without work or scheduler there is no need."""
        if not self._session or not self._table.occupied.any():
            return End(Ended.STOPPED, reason)
        limit = self._options.drain_timeout
        drain = DrainGroup(self._options.group, self._options.incarnation, int(1000 * limit), reason)
        self._link.send(drain, self._session)
        self._drain_ends = self._clock() + limit + DRAIN_MARGIN
        return None

    def _handle(self, event: LinkEvent | _Drain) -> End | None:
        if isinstance(event, _Drain):
            return self._start_draining(event.reason)
        if isinstance(event, Opened):
            self._drop_all()
            self._session = event.session
            self._epoch = event.welcome.epoch
            logger.info("group %s registered with the scheduler at %s", self._options.group, self._options.scheduler)
            self._on_registered()
        elif isinstance(event, Closed):
            logger.warning("group %s lost its session: %s", self._options.group, event.reason)
            self._drop_all()
            self._session = 0
            if self._drain_ends < float("inf"):
                return End(Ended.STOPPED, event.reason)
        elif isinstance(event, Refused):
            return End(Ended.REFUSED, f"the scheduler refused this worker: {event.reason}")
        elif isinstance(event, Received) and event.session == self._session:
            return self._receive(event.message)
        return None

    def _receive(self, message: object) -> End | None:
        if isinstance(message, Plan):
            self._plan(message)
        elif isinstance(message, Reset):
            self._reset(message)
        elif isinstance(message, Stop):
            return End(Ended.STOPPED, message.reason or "the scheduler said stop")
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            self._link.send(AdapterDone(message.adapter, False, "adapters are not supported"), self._session)
        elif isinstance(message, Prepare):
            logger.warning("a grammar was announced, which this worker does not enforce")
        return None

    def _reset(self, reset: Reset) -> None:
        self._drop_all()
        if reset.epoch == self._epoch:
            self._next_step = reset.first_step
        else:
            logger.warning("a reset of another epoch was ignored")

    def _drop_all(self) -> None:
        self._next_step = None
        self._table.reset()
        self._engine.reset()

    def _plan(self, plan: Plan) -> None:
        """Execute one plan, or say why not and discard what follows until Reset."""
        if self._next_step is None:
            self._plans_discarded += 1
            return
        try:
            done, features = self._execute(plan)
        except PlanError as error:
            self._fail(plan, "invalid_plan", str(error), kv_survived=True)
        except EngineFault as fault:
            self._fail(plan, fault.kind, str(fault), kv_survived=fault.kv_survived)
        else:
            self._link.send(done, self._session)
            self._steps_done += 1
            self._next_step = plan.step + 1
            self._step_log.write(plan.step, len(done.counts), len(done.ids) // 4, features)

    def _execute(self, plan: Plan) -> tuple[StepDone, StepFeatures]:
        self._check_identity(plan)
        began = self._clock()
        batch = self._table.apply(plan)
        results = self._engine.execute(batch, self._table)
        self._table.commit(batch, results.counts, results.ids, _advanced(batch, results))
        features = StepFeatures.of(batch, int((self._clock() - began) * 1e6))
        for row, detail in results.details.items():
            logger.warning("step %d, slot %d: %s", plan.step, batch.slots[row], detail)
        done = StepDone(
            epoch=plan.epoch,
            incarnation=plan.incarnation,
            step=plan.step,
            counts=pack_u8(results.counts),
            ids=pack_u32(results.ids),
            status=pack_u8(results.status),
            step_us=features.step_us,
            prefill_tokens=features.prefill_tokens,
            decode_seqs=features.decode_seqs,
            sum_ctx_decode=features.sum_ctx_decode,
            sum_chunk_ctx_prefill=features.sum_chunk_ctx_prefill,
            logprobs=results.logprobs,
            prompt_logprobs=results.prompt_logprobs,
        )
        return done, features

    def _check_identity(self, plan: Plan) -> None:
        if plan.step != self._next_step:
            raise EngineFault("gap", f"step {plan.step} came where {self._next_step} was due", kv_survived=True)
        if plan.epoch != self._epoch:
            raise PlanError(f"a plan of epoch {plan.epoch} in a session of epoch {self._epoch}")
        if plan.incarnation != self._options.incarnation:
            raise PlanError(f"a plan for incarnation {plan.incarnation}; this is {self._options.incarnation}")

    def _fail(self, plan: Plan, kind: str, message: str, *, kv_survived: bool) -> None:
        logger.error("step %d failed (%s): %s", plan.step, kind, message)
        self._drop_all()
        self._steps_failed += 1
        failed = StepFailed(self._epoch, self._options.incarnation, plan.step, kind, kv_survived, message[:4096])
        self._link.send(failed, self._session)


def _advanced(batch: StepBatch, results: RowResults) -> BoolArray:
    """Rows whose sequence moves on.

    A failed last chunk moves too: the plan that may already be on its way counts the slot among the decoding ones, and
    rows must keep the order the scheduler recorded. What such a slot decodes is thrown away with its request.
    """
    succeeded = np.isin(results.status, (RowStatus.OK, RowStatus.GRAMMAR_END))
    failed_chunk = ~succeeded & (results.status != RowStatus.NOT_READY)
    failed_chunk[: batch.num_decodes] = False
    return cast(BoolArray, succeeded | failed_chunk)

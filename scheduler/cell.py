"""One cell: what frontends asked for, and the one answer each of their requests gets.

Pure: events in with the time they happened, messages out through ``take_outbox``. Knows sessions by number only, and
nothing of sockets, connections or greetings. Where requests run is the fleet's business.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from msgspec.structs import replace

from protocol.frontend import (
    PRIORITY_CLASSES,
    Abort,
    Credit,
    Finish,
    FinishReason,
    Limits,
    Load,
    ModelInfo,
    Reject,
    RejectCode,
    Submit,
)
from protocol.ids import Epoch, SessionId
from protocol.requests import MAX_CHOICES
from protocol.worker import DrainGroup, GroupDown, KillGroup, Register, StepDone, StepFailed
from scheduler.admission import Admission
from scheduler.block_pool import IntegrityError
from scheduler.deadlines import Deadlines
from scheduler.directory import Model
from scheduler.fleet import Fleet, Refusal
from scheduler.frames import Notebook, StepFrames, note_frames
from scheduler.intake import SubmitRefused, read_submit
from scheduler.load import LoadPacer
from scheduler.outbox import Outbox, Outgoing, ToFrontend
from scheduler.queue import is_returning
from scheduler.requests import Request, Sequence, State
from scheduler.settings import CellSettings

POISON = "the group that ran this request died each time, also when it ran alone"
"""What is said of a request that is given up."""


@dataclass(frozen=True)
class CellStatistics:
    """Counters since start, and what is held now."""

    frontends: int
    models: int
    groups: int
    groups_draining: int
    requests: int
    """Choices without a finish."""
    requests_waiting: int
    waiting_tokens: int
    tenants: int
    """With something waiting or running."""
    queue_timeouts: int
    """Choices refused after they had waited too long."""
    stale_steps: int
    group_losses: int
    requeues: int
    resumed_inexact: int
    """Choices that went on in another numeric class."""
    finished: dict[str, int]
    """By reason."""
    rejected: dict[str, int]
    """Submits, by code."""


class Cell:
    """Requests, queue and groups of one scheduler."""

    def __init__(self, settings: CellSettings, epoch: Epoch) -> None:
        self.epoch = epoch
        self.draining = False
        self.frames_dropped = 0
        """Set by whoever reads sockets; relayed in Load."""
        self._settings = settings
        self._outbox, self._notes = Outbox(), Notebook()
        self._fleet = self._new_fleet()
        self._admission = Admission(settings, self._fleet)
        self._frontends: dict[SessionId, dict[int, Sequence]] = {}
        self._deadlines = Deadlines()
        self._arrivals = itertools.count()
        self._pacer = LoadPacer()
        self._finished: Counter[FinishReason] = Counter()
        self._rejected: Counter[RejectCode] = Counter()
        self._queue_timeouts = 0

    def _new_fleet(self) -> Fleet:
        """Its groups; a cell that watches them has a fleet that tells it."""
        return Fleet(self._settings, self.epoch, self._outbox, self._notes)

    def start_draining(self) -> None:
        """Nothing new is taken from now on."""
        self.draining = True

    def take_outbox(self) -> list[Outgoing]:
        """Everything to be sent since the last call, in order."""
        return self._outbox.take()

    # -------------------------------------------------------------------------------------------------- frontends

    def frontend_joined(self, session: SessionId) -> None:
        """A frontend's session opened."""
        self._frontends[session] = {}
        self._admission.joined(session)

    def frontend_lost(self, session: SessionId) -> None:
        """A frontend's session ended: nobody waits for its requests any more."""
        for sequence in self._frontends.pop(session, {}).values():
            self._fleet.withdraw(sequence)
        self._notes.forget(session)
        self._admission.left(session)

    def submit(self, session: SessionId, submit: Submit, now: float) -> None:
        """Queue a Submit, or refuse it as a whole."""
        live = self._frontends[session]
        rids = list(dict.fromkeys(choice.rid for choice in submit.choices))
        self._admission.asked(session, len(submit.choices), len(submit.tokens) // 4)
        try:
            model = self._model_for(submit)
            request = read_submit(submit, session, model.info, now, self._arrivals)
            if not live.keys().isdisjoint(rids):
                raise SubmitRefused(RejectCode.INVALID, "a rid was used before")
            displaced = self._admission.make_room(request, now)
        except SubmitRefused as refused:
            # A rid that is live keeps its one finish; the others get their one reject.
            self._reject(session, [rid for rid in rids if rid not in live], refused)
            return
        for victim in displaced:
            self._shed(victim, now)
        quarantined = self._fleet.quarantine.holds(request, now)
        for sequence in request.choices:
            live[sequence.rid] = sequence
            if quarantined:
                self._finish(sequence, FinishReason.ERROR, message=POISON)
                continue
            self._queue(model, sequence, now)
        self._watch_deadline(request, now)

    def abort(self, session: SessionId, abort: Abort) -> None:
        """End these choices, whatever they are doing; one that is unknown or has finished is left as it is."""
        live = self._frontends[session]
        for rid in abort.rids:
            if rid in live:
                self._withdraw(live[rid], FinishReason.ABORT)

    def _model_for(self, submit: Submit) -> Model:
        if self.draining:
            raise SubmitRefused(RejectCode.DRAINING, "the scheduler is shutting down")
        model = self._fleet.models.get(submit.model)
        if model is None:
            raise SubmitRefused(RejectCode.UNKNOWN_MODEL, f"no group has registered the model {submit.model!r}")
        return model

    def _end_unresumable(self, now: float) -> None:
        for sequence in self._fleet.release_those_bound_in_vain(now):
            self._withdraw(sequence, FinishReason.ERROR, "no group is left that would continue this answer exactly")

    def _end_condemned(self) -> None:
        for sequence in self._fleet.take_condemned():
            self._withdraw(sequence, FinishReason.ERROR, POISON)

    def _shed(self, request: Request, now: float) -> None:
        """It gives way to a more urgent one; nothing of it has started."""
        self._admission.shed += len(request.choices)
        self._refuse_after_all(request, "more urgent requests are waiting", now)

    def _refuse_after_all(self, request: Request, why: str, now: float) -> None:
        waiting, _ = self._admission.waiting()
        retry = self._fleet.drain_rate.retry_after_ms(waiting, now)
        self._take_back(request, SubmitRefused(RejectCode.OVERLOADED, why, retry))

    def _take_back(self, request: Request, refused: SubmitRefused) -> None:
        """Reject a Submit that was queued and of which nothing has started; choices that have ended stay ended."""
        waiting = [sequence for sequence in request.choices if sequence.state is State.QUEUED]
        for sequence in waiting:
            self._fleet.withdraw(sequence)
            del self._frontends[request.session][sequence.rid]
        self._reject(request.session, [sequence.rid for sequence in waiting], refused)

    def _queue(self, model: Model, sequence: Sequence, now: float) -> None:
        """It waits, unless its tail already satisfies a stop id or its length: then it is finished at once."""
        model.class_waits.saw(sequence.numerics)
        satisfied = sequence.satisfied_by_output()
        if satisfied is None:
            model.queue.add(sequence, now)
        else:
            self._finish(sequence, satisfied[0], stop_id=satisfied[1])

    def _withdraw(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None:
        self._fleet.withdraw(sequence)
        self._finish(sequence, reason, message=message)

    def _finish(self, sequence: Sequence, reason: FinishReason, *, stop_id: int = -1, message: str = "") -> None:
        """Its one finish; it has left queue and group already, and its output is complete."""
        sequence.state = State.FINISHED
        session = sequence.request.session
        del self._frontends[session][sequence.rid]
        self._finished[reason] += 1
        self._notes.finish(session, Finish(sequence.rid, reason, len(sequence.output), stop_id, message))

    def _reject(self, session: SessionId, rids: list[int], refused: SubmitRefused) -> None:
        if rids:
            self._rejected[refused.code] += 1
            message = Reject(tuple(rids), refused.code, refused.message[:4096], refused.retry_after_ms)
            self._outbox.add(ToFrontend(session, message))

    # ----------------------------------------------------------------------------------------------------- groups

    def refusal(self, register: Register) -> Refusal | None:
        """Why a group cannot join; None when it can."""
        return self._fleet.refusal(register)

    def group_joined(self, session: SessionId, register: Register, now: float) -> None:
        """A leader's session opened and was welcomed; Reset follows at once."""
        model = self._fleet.join(session, register, now)
        self._shorten_what_no_group_can_hold(model, now)

    def group_lost(self, session: SessionId, reason: str, now: float) -> None:
        """A leader's session ended."""
        self._fleet.lose(session, reason, now)
        self._end_condemned()

    def group_down(self, down: GroupDown, now: float) -> None:
        """A launcher says that an incarnation has ended."""
        self._fleet.down(down, now)
        self._end_condemned()

    def drain_group(self, drain: DrainGroup, now: float) -> None:
        """A group is to go."""
        self._fleet.drain(drain, now)

    def given_up(self) -> list[KillGroup]:
        """Incarnations that must not live on, for a launcher that has just come."""
        return self._fleet.given_up()

    def step_done(self, session: SessionId, done: StepDone, now: float) -> None:
        """Ids of a step: the next plan leaves first, then the frames."""
        outcome = self._fleet.step_done(session, done, now)
        if outcome is None:
            return
        group = self._fleet.groups[session].name
        for finished in outcome.finished:
            self._fleet.ended(finished.sequence)
            self._finish(finished.sequence, finished.reason, stop_id=finished.stop_id, message=finished.message)
        for frontend, judged in outcome.judged:
            self._notes.judge(frontend, judged)
        self._fleet.refill(session, now)
        self._outbox.add(StepFrames(group, done.step, outcome.delivery, self._notes.take()))

    def step_failed(self, session: SessionId, failed: StepFailed, now: float) -> None:
        """A plan was not executed: nothing is lost but the work."""
        self._fleet.step_failed(session, failed, now)
        self._end_condemned()

    def _shorten_what_no_group_can_hold(self, model: Model, now: float) -> None:
        """Requests accepted under a longer context get what the groups of today can give."""
        longest = max(group.scheduler.shape.effective_context for group in model.groups.values())
        for sequence in model.queue:
            room = max(longest - len(sequence.request.prompt), 0)
            if sequence.request.scoring and len(sequence.request.prompt) > longest:
                self._withdraw(sequence, FinishReason.ERROR, "no group can hold the prompt any more")
            elif sequence.request.limit > room:
                model.queue.remove(sequence)
                sequence.request.limit = room
                self._queue(model, sequence, now)

    # ------------------------------------------------------------------------------------------------------- time

    def advance(self, now: float) -> None:
        """After the events of one turn: what is overdue, who can start, which plans can go, what is left to say."""
        self._fleet.judge_overdue_steps(now)
        self._end_unresumable(now)
        self._end_condemned()
        self._end_expired(now)
        self._refuse_what_waits_in_vain(now)
        self._fleet.refill_stirred(now)
        for session, frame in note_frames(self._notes.take(), group="", step=0):
            self._outbox.add(ToFrontend(session, frame))
        if self._pacer.due(now):
            load = self.load(now)
            if self._pacer.passes(load, now):
                self._tell(load, now)

    def next_deadline(self) -> float | None:
        """When the earliest deadline passes."""
        return self._deadlines.next()

    def restart_timers(self, now: float) -> None:
        """This process was paused: every step gets its time again."""
        for group in self._fleet.groups.values():
            group.watch.restart(now)

    def _tell(self, load: Load, now: float) -> None:
        """To each frontend the load with the credit that is its own."""
        for session in self._frontends:
            self._outbox.add(ToFrontend(session, replace(load, credit=self._admission.credit(session, now))))
        self._admission.forget_a_little()

    def _watch_deadline(self, request: Request, now: float) -> None:
        times = [] if request.deadline is None else [request.deadline]
        if self._settings.max_queue_seconds and not any(map(is_returning, request.choices)):
            times.append(now + self._settings.max_queue_seconds)
        self._deadlines.watch(request, *times)

    def _end_expired(self, now: float) -> None:
        for request in self._deadlines.passed(now):
            if request.deadline is not None and request.deadline <= now:
                for sequence in request.choices:
                    if sequence.state is not State.FINISHED:
                        self._withdraw(sequence, FinishReason.DEADLINE)
            elif not any(sequence.started for sequence in request.choices):
                self._queue_timeouts += len(request.choices)
                why = f"nothing became free within {self._settings.max_queue_seconds:g} s"
                self._refuse_after_all(request, why, now)

    def _refuse_what_waits_in_vain(self, now: float) -> None:
        """A model without a group for too long: a Submit of which nothing started is rejected, the rest fails."""
        for model in self._fleet.models.values():
            since = model.without_group_since
            if since is None or now - since < self._settings.model_grace:
                continue
            message = f"the model {model.name} has had no group for {self._settings.model_grace:g} s"
            for request in dict.fromkeys(sequence.request for sequence in model.queue):
                self._give_back(request, message)

    def _give_back(self, request: Request, message: str) -> None:
        waiting = [sequence for sequence in request.choices if sequence.state is State.QUEUED]
        if len(waiting) < len(request.choices) or any(sequence.started for sequence in waiting):
            for sequence in waiting:
                self._withdraw(sequence, FinishReason.ERROR, message)
            return
        self._take_back(request, SubmitRefused(RejectCode.UNAVAILABLE, message))

    # --------------------------------------------------------------------------------------------------- accounts

    def models(self) -> tuple[ModelInfo, ...]:
        """Every model known, with or without a group."""
        return tuple(model.info for model in self._fleet.models.values())

    def limits(self) -> Limits:
        """Bounds for frontends."""
        return Limits(MAX_CHOICES, self._settings.max_queue_requests, self._settings.max_queue_tokens)

    def credit(self, session: SessionId, now: float) -> Credit:
        """What a frontend may still submit."""
        return self._admission.credit(session, now)

    def load(self, now: float) -> Load:
        """Queue and groups now; the credit is that of all frontends together."""
        waiting, tokens = self._admission.waiting()
        groups = tuple(group.load() for group in self._fleet.groups.values())
        return Load(
            credit=self._admission.credit(None, now),
            requests_running=sum(group.requests_running for group in groups),
            requests_waiting=waiting,
            waiting_tokens=tokens,
            frames_dropped=self.frames_dropped,
            groups=groups,
            waiting_by_priority=self._waiting_by_priority(),
            shed=self._admission.shed,
        )

    @property
    def idle(self) -> bool:
        """No request is without its finish."""
        return not any(self._frontends.values())

    def statistics(self) -> CellStatistics:
        """A frozen view of the counters."""
        waiting, tokens = self._admission.waiting()
        return CellStatistics(
            frontends=len(self._frontends),
            models=len(self._fleet.models),
            groups=len(self._fleet.groups),
            groups_draining=sum(group.draining for group in self._fleet.groups.values()),
            requests=sum(map(len, self._frontends.values())),
            requests_waiting=waiting,
            waiting_tokens=tokens,
            tenants=sum(len(model.queue.accounts) for model in self._fleet.models.values()),
            queue_timeouts=self._queue_timeouts,
            stale_steps=self._fleet.stale_steps,
            group_losses=self._fleet.losses,
            requeues=self._fleet.requeues,
            resumed_inexact=self._fleet.resumed_inexact,
            finished={reason.name.lower(): count for reason, count in self._finished.items()},
            rejected={code.name.lower(): count for code, count in self._rejected.items()},
        )

    def _waiting_by_priority(self) -> tuple[int, ...]:
        classes = [0] * len(PRIORITY_CLASSES)
        for model in self._fleet.models.values():
            for priority, count in model.queue.by_priority.items():
                classes[(priority > 0) - (priority < 0) + 1] += count
        return tuple(classes)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every unfinished choice is in exactly one place, and every place holds such."""
        live = {id(seq): seq for requests in self._frontends.values() for seq in requests.values()}
        found: list[Sequence] = []
        for model in self._fleet.models.values():
            model.queue.check_integrity()
            found += model.queue
            for group in model.groups.values():
                group.scheduler.check_integrity()
                found += group.scheduler.unfinished()
        if len(found) != len(live) or {id(sequence) for sequence in found} != live.keys():
            raise IntegrityError(f"{len(live)} choices await a finish, {len(found)} are queued, running or settling")
        if any(sequence.state is State.FINISHED for sequence in found):
            raise IntegrityError("a finished choice still awaits its finish")

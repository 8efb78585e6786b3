"""The groups of a cell: who joins, who is given up, what is placed where, and the plans that keep them busy.

Pure. Knows requests as things to place; nothing of frontends.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.frontend import ModelDown, ModelUp, Started
from protocol.ids import Epoch, Incarnation, SessionId
from protocol.packing import unpack_u32
from protocol.worker import DrainGroup, GroupDown, KillGroup, Plan, Register, Reset, StepDone, StepFailed, Stop
from scheduler.directory import Group, Model, Offers, new_model
from scheduler.frames import Notebook
from scheduler.group import GroupScheduler
from scheduler.load import DrainRate
from scheduler.numeric_classes import returns, starts_on
from scheduler.outbox import EndLeader, Outbox, ToFrontends, ToLaunchers, ToLeader
from scheduler.queue import WaitingQueue, is_returning
from scheduler.requests import Sequence, State
from scheduler.results import BadStepDone, StepOutcome
from scheduler.settings import CellSettings
from scheduler.shape import GroupShape, UnusableGroup
from scheduler.step_watch import StepWatch, Verdict
from scheduler.suspects import Quarantine, group_died, is_suspect

logger = logging.getLogger(__name__)

LOOK_AHEAD = 8
"""Requests considered past one that does not fit, and how often one may be passed before all wait for it."""

MOST_PARKED = 64
"""Requests that one look leaves aside because their prefix is just being computed."""

BETWEEN_JUDGEMENTS = 0.05
"""Seconds between two looks at overdue steps: a busy loop turns more often than that is worth."""

MOST_FAILURES = 3
"""Failed steps in a row, after which a group is given up."""


@dataclass(frozen=True)
class Refusal:
    """Why a registration is not taken."""

    reason: str
    final: bool
    """Trying again cannot help."""


class Fleet:
    """Models with their queues, and the groups that serve them."""

    def __init__(self, settings: CellSettings, epoch: Epoch, outbox: Outbox, notes: Notebook) -> None:
        self.models: dict[str, Model] = {}
        self.groups: dict[SessionId, Group] = {}
        self.drain_rate = DrainRate()
        self.stale_steps = 0
        """StepDone and StepFailed that answered no outstanding plan."""
        self.losses = 0
        self.requeues = 0
        self.resumed_inexact = 0
        """Choices that went on in another numeric class."""
        self._settings = settings
        self._epoch = epoch
        self._outbox = outbox
        self._notes = notes
        self._given_up: dict[str, int] = {}
        self._stirred: dict[Group, None] = {}
        """Groups that something happened to since they were last offered requests and asked for plans."""
        self._next_judgement = 0.0
        self.quarantine = Quarantine()
        self._condemned: list[Sequence] = []

    # ------------------------------------------------------------------------------------------- coming and going

    def refusal(self, register: Register) -> Refusal | None:
        """Why a group cannot join; None when it can."""
        if self._given_up.get(register.group) == register.incarnation:
            # Not final: the launcher is to kill it, and must not take it for a group that can never serve.
            return Refusal(f"incarnation {register.incarnation:#x} of group {register.group} was given up", False)
        try:
            GroupShape.of(register, self._settings.watermark)
        except UnusableGroup as error:
            return Refusal(str(error), True)
        model = self.models.get(register.model)
        conflict = model.conflict(register) if model else ""
        return Refusal(conflict, True) if conflict else None

    def join(self, session: SessionId, register: Register, now: float) -> Model:
        """A leader's session opened; its group has dropped every slot. ``refusal`` was asked before."""
        self._given_up.pop(register.group, None)
        for other in [group for group in self.groups.values() if group.name == register.group]:
            self.lose(other.session, "the group registered again", now)
        model = self.models.get(register.model)
        if model is None:
            queue = WaitingQueue(self._settings.tenant_quantum, self._settings.priority_aging)
            model = self.models[register.model] = new_model(register, queue)
        shape = GroupShape.of(register, self._settings.watermark)
        scheduler = GroupScheduler(shape, self._epoch, Incarnation(register.incarnation), self._settings.group)
        watch = StepWatch(self._settings.step_times)
        model.class_waits.saw(register.numerics_digest)
        group = Group(register.group, register.incarnation, session, register, scheduler, watch)
        self.groups[session] = model.groups[group.name] = group
        self._stir(group)
        model.without_group_since = None
        self._outbox.add(ToLeader(session, Reset(self._epoch, scheduler.next_step)))
        self._outbox.add(ToFrontends(ModelUp(model.describe())))
        logger.info("group %s serves %s: %s", group.name, model.name, shape)
        return model

    def lose(self, session: SessionId, reason: str, now: float) -> None:
        """A leader's session ended for whatever reason: its requests wait at the head, with the ids they have."""
        group = self.groups.get(session)
        if group is None:
            return
        self.losses += 1
        condemned = group_died(group.scheduler.in_flight(), group.scheduler.steps)
        self._remove(group, reason, now)
        for sequence in condemned:
            self.quarantine.add(sequence.request, now)
            logger.error("choice %d is given up: its group died whenever it ran, alone too", sequence.rid)
        self._condemned += condemned

    def _remove(self, group: Group, reason: str, now: float) -> None:
        del self.groups[group.session]
        self._stirred.pop(group, None)
        self._requeue(group.scheduler.reset(), now)
        model = self.models[group.register.model]
        del model.groups[group.name]
        model.open.pop(group, None)
        logger.warning("group %s of %s is gone: %s", group.name, model.name, reason)
        description = model.describe()
        if model.groups:
            self._outbox.add(ToFrontends(ModelUp(description)))
        else:
            model.without_group_since = now
            self._outbox.add(ToFrontends(ModelDown(model.name, reason[:4096])))

    def release_those_bound_in_vain(self, now: float) -> list[Sequence]:
        """What has waited long for a group of its numeric class goes on in another; returned if that must not be."""
        unresumable: list[Sequence] = []
        for model in self.models.values():
            for sequence in model.class_waits.overdue(model.queue, model.classes, self._settings.exact_wait, now):
                if self._settings.exact_only:
                    unresumable.append(sequence)
                    continue
                logger.warning("choice %d goes on in another numeric class: none of its own came", sequence.rid)
                sequence.numerics = b""
                self.resumed_inexact += 1
                model.queue.look_again()
        return unresumable

    def take_condemned(self) -> list[Sequence]:
        """Waiting choices that kill groups, since the last call: the caller ends them."""
        condemned, self._condemned = self._condemned, []
        return [sequence for sequence in condemned if sequence.state is State.QUEUED]

    def down(self, down: GroupDown, now: float) -> None:
        """The launcher's sentinel saw a rank go; the leader's session may not know yet."""
        for group in list(self.groups.values()):
            if (group.name, group.incarnation) == (down.group, down.incarnation):
                self._outbox.add(EndLeader(group.session, down.cause))
                self.lose(group.session, down.cause, now)

    def drain(self, drain: DrainGroup, now: float) -> None:
        """A group is to go: it gets nothing new, ends what it has, and is then told to stop."""
        for group in self.groups.values():
            if (group.name, group.incarnation) == (drain.group, drain.incarnation) and not group.draining:
                group.drain_ends, group.drain_reason = now + drain.remaining_ms / 1000, drain.reason
                self._outbox.add(ToFrontends(ModelUp(self.models[group.register.model].describe())))
                self._stir(group)
                logger.info("group %s is to go: %s", group.name, drain.reason)

    def _dismiss(self, group: Group, now: float) -> None:
        """A group that was to go is empty, or its time is up: what it still has goes on elsewhere."""
        self._outbox.add(ToLeader(group.session, Stop(group.drain_reason)))
        self._outbox.add(EndLeader(group.session, group.drain_reason or "drained"))
        self._remove(group, group.drain_reason or "drained", now)

    def given_up(self) -> list[KillGroup]:
        """Incarnations that must not live on, for a launcher that has just come."""
        return [KillGroup(name, incarnation, "given up earlier") for name, incarnation in self._given_up.items()]

    def give_up(self, group: Group, reason: str, now: float) -> None:
        """The group is DEAD: have it killed and relaunched; nothing of this incarnation counts any more."""
        self._given_up[group.name] = group.incarnation
        self._outbox.add(ToLaunchers(KillGroup(group.name, group.incarnation, reason[:4096])))
        self._outbox.add(EndLeader(group.session, reason))
        self.lose(group.session, reason, now)

    def judge_overdue_steps(self, now: float) -> None:
        """An overdue step makes its group suspect, and in the end dead."""
        if now < self._next_judgement:
            return
        self._next_judgement = now + BETWEEN_JUDGEMENTS
        for group in list(self.groups.values()):
            verdict = group.watch.verdict(now)
            if verdict is Verdict.DEAD:
                self.give_up(group, "a step took too long", now)
            elif verdict is Verdict.SUSPECT and not group.suspect:
                group.suspect = True
                logger.warning("group %s is suspect: its step is overdue", group.name)
            if group.drain_ends is not None and now >= group.drain_ends and group.session in self.groups:
                self._dismiss(group, now)

    # ------------------------------------------------------------------------------------------------------ steps

    def step_done(self, session: SessionId, done: StepDone, now: float) -> StepOutcome | None:
        """What a step returned; None when it answers no plan of ours. The caller then asks to ``refill`` the group."""
        group = self._answering(session, done)
        if group is None:
            return None
        try:
            outcome = group.scheduler.step_done(done)
        except BadStepDone as error:
            self._fail(group, f"step {done.step}: {error}", now)
            return None
        if outcome is None:
            self.stale_steps += 1
            return None
        group.watch.done(now)
        group.suspect, group.failures_in_a_row = False, 0
        if group.ward:
            group.ward.step_done(group.scheduler.steps)
        self._requeue(group.scheduler.take_requeued(), now)
        return outcome

    def step_failed(self, session: SessionId, failed: StepFailed, now: float) -> None:
        """A plan was not executed and later ones are discarded: every row is requeued and the tables start afresh."""
        group = self._answering(session, failed)
        if group is None:
            return
        if group.scheduler.is_out(failed.step):
            self._fail(group, f"step {failed.step}: {failed.kind} {failed.message}", now, failed.kv_survived)
        else:
            self.stale_steps += 1

    def _answering(self, session: SessionId, message: StepDone | StepFailed) -> Group | None:
        """The group that a message speaks for, if it is of this epoch and incarnation."""
        group = self.groups.get(session)
        if group is not None and (message.epoch, message.incarnation) == (self._epoch, group.incarnation):
            return group
        self.stale_steps += 1
        return None

    def _fail(self, group: Group, reason: str, now: float, kv_survived: bool = False) -> None:
        group.failures_in_a_row += 1
        logger.error("group %s failed (%d in a row): %s", group.name, group.failures_in_a_row, reason)
        if group.failures_in_a_row >= MOST_FAILURES:
            self.give_up(group, f"{MOST_FAILURES} failed steps in a row; the last: {reason}", now)
            return
        self._requeue(group.scheduler.reset(kv_survived=kv_survived), now)
        group.watch.reset()
        group.suspect = False
        self._stir(group)
        self._outbox.add(ToLeader(group.session, Reset(self._epoch, group.scheduler.next_step)))

    def _requeue(self, sequences: list[Sequence], now: float) -> None:
        self.requeues += len(sequences)
        for sequence in sequences:
            returns(sequence)
            self.models[sequence.request.model].queue.add(sequence, now)

    # -------------------------------------------------------------------------------------------------- placement

    def refill(self, session: SessionId, now: float) -> None:
        """Admit to one group and plan for it: what its StepDone made possible."""
        self._keep_busy(self.groups[session], now)

    def refill_stirred(self, now: float) -> None:
        """Admit and plan wherever something happened since the last time; a newcomer is offered to every group."""
        self.place_news(now)
        stirred, self._stirred = self._stirred, {}
        for group in stirred:
            self._keep_busy(group, now)

    def place_news(self, now: float) -> None:
        """Admit what came since the last time, as far as there is room; plans are not made here."""
        for model in self.models.values():
            if model.queue.take_news():
                model.open = {group: None for group in model.open if group.accepts or group.scheduler.pending_prefill}
                self._admit(model, model.open, now)

    def withdraw(self, sequence: Sequence) -> None:
        """Take a choice out of wherever it is; its output stays with it."""
        model = self.models[sequence.request.model]
        if sequence.state is State.QUEUED:
            model.queue.remove(sequence)
            sequence.state = State.FINISHED
        elif sequence.state is not State.FINISHED:
            group = model.groups[sequence.group]
            group.scheduler.end(sequence)
            self._stir(group)
        model.queue.accounts.ended(sequence)

    def ended(self, sequence: Sequence) -> None:
        """A choice ended by what its step returned."""
        self.models[sequence.request.model].queue.accounts.ended(sequence)

    def _stir(self, group: Group) -> None:
        """Something happened to a group that may give it room or work."""
        self._stirred[group] = None
        self.models[group.register.model].open[group] = None

    def _admit(self, model: Model, groups: Iterable[Group], now: float) -> None:
        """Place waiting requests in order, looking a little past those that do not fit."""
        if not model.queue:
            return
        offers = Offers(groups)
        if not offers:
            return
        passed: list[Sequence] = []
        parked = 0
        with contextlib.closing(model.queue.in_turn(now)) as in_turn:
            while offers and len(passed) <= LOOK_AHEAD and parked <= MOST_PARKED:
                sequence = next(in_turn, None)
                if sequence is None or any(other.passed_over >= LOOK_AHEAD for other in passed):
                    return
                if self._is_parked(model, sequence):
                    parked += 1
                    continue
                group = offers.cheapest(sequence)
                if group is None and is_suspect(sequence) and any(each.ward for each in model.groups.values()):
                    parked += 1  # its turn comes when those before it are cleared
                elif group is None:
                    passed.append(sequence)
                elif group.scheduler.parks(sequence):
                    sequence.parked_at = group.name
                    parked += 1
                else:
                    self._start(model, sequence, group, now)
                    offers.look_again(group)
                    for other in passed:
                        other.passed_over += 1

    def _is_parked(self, model: Model, sequence: Sequence) -> bool:
        """Whether it still waits for a group to compute its prefix; no other is offered it meanwhile."""
        if not sequence.parked_at:
            return False
        home = model.groups.get(sequence.parked_at)
        if home is not None and home.is_worth_waiting_for(sequence):
            return True
        sequence.parked_at = ""
        return False

    def _start(self, model: Model, sequence: Sequence, group: Group, now: float) -> None:
        model.queue.admit(sequence)
        if not is_returning(sequence):
            self.drain_rate.admitted(now)
        sequence.group, sequence.passed_over, sequence.parked_at = group.name, 0, ""
        sequence.admitted_at = group.scheduler.steps
        starts_on(sequence, group.register.numerics_digest)
        if is_suspect(sequence):
            group.ward.enter(sequence)
        group.scheduler.admit(sequence)
        self._stirred[group] = None
        if not sequence.started:
            sequence.started = True
            self._notes.start(sequence.request.session, _started(sequence, group))

    def _keep_busy(self, group: Group, now: float) -> None:
        """Keep two plans out, each filled with admissions; whoever a plan preempted waits at the head, once settled."""
        model = self.models[group.register.model]
        while group.scheduler.wants_plan:
            self._admit(model, (group,), now)
            plan = group.scheduler.plan()
            if plan is None:
                break
            self._outbox.add(ToLeader(group.session, plan))
            group.watch.planned(now, _prefill_tokens(plan))
        self._requeue(group.scheduler.take_requeued(), now)
        model.open[group] = None
        if group.draining and group.scheduler.idle:
            self._dismiss(group, now)


def _started(sequence: Sequence, group: Group) -> Started:
    return Started(sequence.rid, group.name, sequence.cached_tokens, group.register.numerics_digest)


def _prefill_tokens(plan: Plan) -> int:
    return int(unpack_u32(plan.chunks, 2)[:, 1].sum()) if plan.chunks else 0

"""A cell that keeps timelines: it does what any other does, and looks on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocol.frontend import FinishReason, Inquire, Submit, Told
from protocol.ids import Epoch, SessionId
from protocol.worker import StepDone
from scheduler.cell import Cell
from scheduler.directory import Group, Model
from scheduler.fleet import Fleet
from scheduler.frames import Notebook
from scheduler.intake import SubmitRefused
from scheduler.outbox import Outbox
from scheduler.requests import Sequence
from scheduler.results import StepOutcome
from scheduler.settings import CellSettings
from scheduler.timelines import Timelines


@dataclass(frozen=True)
class Watcher:
    """The timelines, and the clock they are kept by."""

    timelines: Timelines
    clock: Callable[[], float]


class WatchedFleet(Fleet):
    """Tells timelines what becomes of sequences."""

    def __init__(self, settings: CellSettings, epoch: Epoch, outbox: Outbox, notes: Notebook, watcher: Watcher) -> None:
        super().__init__(settings, epoch, outbox, notes)
        self._watcher = watcher
        self._losing = False
        """What is requeued now lost its step or its group."""

    def step_done(self, session: SessionId, done: StepDone, now: float) -> StepOutcome | None:
        outcome = super().step_done(session, done, now)
        if outcome is not None:
            self._watcher.timelines.delivered(self.groups[session].name, outcome.delivery, self._watcher.clock())
        return outcome

    def _start(self, model: Model, sequence: Sequence, group: Group, now: float) -> None:
        super()._start(model, sequence, group, now)
        self._watcher.timelines.started(sequence, group.name, self._watcher.clock())

    def _remove(self, group: Group, reason: str, now: float) -> None:
        self._losing = True
        super()._remove(group, reason, now)
        self._losing = False

    def _fail(self, group: Group, reason: str, now: float, kv_survived: bool = False) -> None:
        self._losing = True
        super()._fail(group, reason, now, kv_survived)
        self._losing = False

    def _requeue(self, sequences: list[Sequence], now: float) -> None:
        super()._requeue(sequences, now)
        for sequence in sequences:
            self._watcher.timelines.requeued(sequence, self._watcher.clock(), lost=self._losing)


class WatchedCell(Cell):
    """A cell that keeps timelines. They look on: what it answers does not depend on them, nor on their clock."""

    def __init__(self, settings: CellSettings, epoch: Epoch, clock: Callable[[], float]) -> None:
        self._watcher = Watcher(Timelines(), clock)
        super().__init__(settings, epoch)

    def timelines(self, session: SessionId, inquire: Inquire) -> Told:
        """Those of the choices that a frontend asks about, as far as they are known."""
        now = self._watcher.clock()
        found = (self._watcher.timelines.of(session, rid, now) for rid in inquire.rids)
        return Told(inquire.nonce, tuple(timeline for timeline in found if timeline is not None))

    def submit(self, session: SessionId, submit: Submit, now: float) -> None:
        self._watcher.timelines.submitted(session, submit, self._watcher.clock())
        super().submit(session, submit, now)

    def frontend_lost(self, session: SessionId) -> None:
        super().frontend_lost(session)
        self._watcher.timelines.left(session)

    def _new_fleet(self) -> Fleet:
        return WatchedFleet(self._settings, self.epoch, self._outbox, self._notes, self._watcher)

    def _finish(self, sequence: Sequence, reason: FinishReason, *, stop_id: int = -1, message: str = "") -> None:
        super()._finish(sequence, reason, stop_id=stop_id, message=message)
        self._watcher.timelines.finished(sequence, reason.name.lower(), message, self._watcher.clock())

    def _reject(self, session: SessionId, rids: list[int], refused: SubmitRefused) -> None:
        super()._reject(session, rids, refused)
        reason, now = f"rejected: {refused.code.name.lower()}", self._watcher.clock()
        self._watcher.timelines.rejected(session, rids, reason, refused.message, now)

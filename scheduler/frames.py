"""One frame per (step, frontend): ids, finishes and starts of all of its choices together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from protocol.frontend import Finish, Frame, PromptLogprobs, Started
from protocol.ids import SessionId
from protocol.packing import pack_u8, pack_u32, pack_u64
from scheduler.results import Delivery


@dataclass
class Notes:
    """What is to be said to one frontend beside ids."""

    finishes: list[Finish] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    judged: list[PromptLogprobs] = field(default_factory=list)


class Notebook:
    """Notes that wait for a frame, by frontend."""

    def __init__(self) -> None:
        self._notes: dict[SessionId, Notes] = {}

    def finish(self, session: SessionId, finish: Finish) -> None:
        """Goes out with the frontend's next frame, and so with the choice's last ids."""
        self._notes.setdefault(session, Notes()).finishes.append(finish)

    def start(self, session: SessionId, started: Started) -> None:
        """Goes out with the frontend's next frame."""
        self._notes.setdefault(session, Notes()).started.append(started)

    def judge(self, session: SessionId, judged: PromptLogprobs) -> None:
        """Goes out with the frontend's next frame, and so before or with the choice's first ids."""
        self._notes.setdefault(session, Notes()).judged.append(judged)

    def forget(self, session: SessionId) -> None:
        """The frontend is gone."""
        self._notes.pop(session, None)

    def take(self) -> dict[SessionId, Notes]:
        """Every note since the last call."""
        notes, self._notes = self._notes, {}
        return notes


@dataclass(frozen=True, slots=True)
class StepFrames:
    """All frames of one step, built when they are sent: the plan before them in the outbox does not wait for that."""

    group: str
    step: int
    delivery: Delivery
    notes: dict[SessionId, Notes]

    def build(self) -> Iterator[tuple[SessionId, Frame]]:
        """(frontend, its frame)."""
        delivery, unsaid = self.delivery, dict(self.notes)
        for session, rows in _by_session(delivery):
            notes = unsaid.pop(session, None) or Notes()
            counts, ids = delivery.counts[rows], delivery.ids[rows]
            yield (
                session,
                Frame(
                    group=self.group,
                    step=self.step,
                    rids=pack_u64(delivery.rid[rows]),
                    first=pack_u32(delivery.first[rows]),
                    counts=pack_u8(counts),
                    ids=pack_u32(ids[np.arange(ids.shape[1]) < counts[:, None]]),
                    finishes=tuple(notes.finishes),
                    started=tuple(notes.started),
                    logprobs=delivery.records(rows),
                    prompt_logprobs=tuple(notes.judged),
                ),
            )
        yield from note_frames(unsaid, self.group, self.step)


def note_frames(notes_by_session: dict[SessionId, Notes], group: str, step: int) -> Iterator[tuple[SessionId, Frame]]:
    """Frames without ids; group "" and step 0 when no step caused them."""
    for session, notes in notes_by_session.items():
        yield (
            session,
            Frame(
                group=group,
                step=step,
                finishes=tuple(notes.finishes),
                started=tuple(notes.started),
                prompt_logprobs=tuple(notes.judged),
            ),
        )


def _by_session(delivery: Delivery) -> Iterator[tuple[SessionId, slice | npt.NDArray[np.intp]]]:
    """(frontend, its rows); the usual case of one frontend takes no sorting."""
    sessions = delivery.session
    if not len(sessions):
        return
    if (sessions == sessions[0]).all():
        yield SessionId(int(sessions[0])), slice(None)
        return
    order = np.argsort(sessions, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(sessions[order])) + 1):
        yield SessionId(int(sessions[rows[0]])), rows

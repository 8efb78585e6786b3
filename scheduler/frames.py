"""One frame per (step, frontend): ids, finishes and starts of all of its choices together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from protocol.frontend import Finish, Frame, PromptLogprobs, Started
from protocol.ids import SessionId
from protocol.packing import pack_u8, pack_u32, pack_u64
from scheduler.results import Delivery, Int64Array


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


class StepFrames(msgspec.Struct, frozen=True, eq=False):
    """All frames of one step, built when they are sent: the plan before them in the outbox does not wait for that."""

    group: str
    step: int
    delivery: Delivery
    notes: dict[SessionId, Notes]

    def build(self) -> Iterator[tuple[SessionId, Frame]]:
        """(frontend, its frame). Rows are packed once, sorted by frontend; each frame is a slice of that."""
        unsaid = dict(self.notes)
        rows = self.delivery.by_session()
        rids, firsts, counts, ids = pack_u64(rows.rid), pack_u32(rows.first), pack_u8(rows.counts), rows.packed_ids()
        at = 0
        for session, start, end in _runs(rows.session):
            notes = unsaid.pop(session, None)
            ids_here = 4 * sum(counts[start:end])
            yield (
                session,
                Frame(
                    group=self.group,
                    step=self.step,
                    rids=rids[8 * start : 8 * end],
                    first=firsts[4 * start : 4 * end],
                    counts=counts[start:end],
                    ids=ids[at : at + ids_here],
                    finishes=tuple(notes.finishes) if notes else (),
                    started=tuple(notes.started) if notes else (),
                    logprobs=rows.records(start, end),
                    prompt_logprobs=tuple(notes.judged) if notes else (),
                ),
            )
            at += ids_here
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


def _runs(sessions: Int64Array) -> Iterator[tuple[SessionId, int, int]]:
    """(frontend, first row, end) of sorted rows."""
    if not len(sessions):
        return
    starts = [0, *((sessions[1:] != sessions[:-1]).nonzero()[0] + 1).tolist(), len(sessions)]
    for start, end in pairwise(starts):
        yield SessionId(int(sessions[start])), start, end

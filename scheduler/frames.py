"""One frame per (step, frontend): ids, finishes and starts of all of its choices together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from protocol.frontend import Finish, Frame, Started
from protocol.ids import SessionId
from protocol.packing import pack_u8, pack_u32, pack_u64
from scheduler.results import Delivery


@dataclass
class _Notes:
    finishes: list[Finish] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)


class FrameBuilder:
    """Collects what is to be said to each frontend, and puts it into as few frames as the rule allows."""

    def __init__(self) -> None:
        self._notes: dict[SessionId, _Notes] = {}

    def finish(self, session: SessionId, finish: Finish) -> None:
        """Goes out with the frontend's next frame."""
        self._notes.setdefault(session, _Notes()).finishes.append(finish)

    def start(self, session: SessionId, started: Started) -> None:
        """Goes out with the frontend's next frame."""
        self._notes.setdefault(session, _Notes()).started.append(started)

    def forget(self, session: SessionId) -> None:
        """The frontend is gone."""
        self._notes.pop(session, None)

    def step_frames(self, group: str, step: int, delivery: Delivery) -> Iterator[tuple[SessionId, Frame]]:
        """The frames of one step, with every note that waits."""
        for session, rows in _by_session(delivery):
            notes = self._notes.pop(session, None) or _Notes()
            counts, ids = delivery.counts[rows], delivery.ids[rows]
            yield (
                session,
                Frame(
                    group=group,
                    step=step,
                    rids=pack_u64(delivery.rid[rows]),
                    first=pack_u32(delivery.first[rows]),
                    counts=pack_u8(counts),
                    ids=pack_u32(ids[np.arange(ids.shape[1]) < counts[:, None]]),
                    finishes=tuple(notes.finishes),
                    started=tuple(notes.started),
                ),
            )
        yield from self._noted_frames(group, step)

    def stepless_frames(self) -> Iterator[tuple[SessionId, Frame]]:
        """What waits and no step caused."""
        yield from self._noted_frames("", 0)

    def _noted_frames(self, group: str, step: int) -> Iterator[tuple[SessionId, Frame]]:
        notes_by_session, self._notes = self._notes, {}
        for session, notes in notes_by_session.items():
            yield session, Frame(group, step, finishes=tuple(notes.finishes), started=tuple(notes.started))


def _by_session(delivery: Delivery) -> Iterator[tuple[SessionId, slice | np.ndarray]]:
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

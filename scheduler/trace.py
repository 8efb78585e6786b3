"""The last steps of a scheduler, kept in memory: what came in, when, and what went out.

A ring of bytes, bounded; keeping an event costs a microsecond or two. Dumped to a file it can be read, and replayed
through a fresh cell when it reaches back to the scheduler's start: the same plans and frames come out, byte for byte.
It holds prompts and answers as token ids, so its file is for its owner alone.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from protocol.frontend import Abort, Submit
from protocol.ids import Epoch, SessionId
from protocol.worker import DrainGroup, GroupDown, Register, StepDone, StepFailed
from scheduler import trace_events as events
from scheduler.cell import Cell
from scheduler.outbox import Outgoing
from scheduler.settings import CellSettings
from scheduler.watched_cell import WatchedCell

FORMAT = 1
MAGIC = b"headrace-trace\n"
ENTRY_OVERHEAD = 64
"""Bytes an entry takes beside its own."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[events.Entry] = msgspec.msgpack.Decoder(events.Entry)
_LENGTH = struct.Struct("<I")


class TraceError(ValueError):
    """A file that is no trace, or a trace that cannot be replayed; one line."""


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay must know beside the events."""

    format: int = FORMAT
    epoch: int
    settings: CellSettings
    written: str
    """Date and time."""
    entries: int
    lost: int
    """Older entries that had to make room; a trace that lost some cannot be replayed."""


class Trace:
    """The ring. ``most_bytes`` 0 keeps nothing."""

    def __init__(self, most_bytes: int) -> None:
        self.bytes = 0
        self.lost = 0
        self._most_bytes = most_bytes
        self._entries: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def on(self) -> bool:
        """Whether anything is kept."""
        return self._most_bytes > 0

    def keep(self, entry: events.Entry) -> None:
        """One more; the oldest make room."""
        encoded = _encoder.encode(entry)
        self._entries.append(encoded)
        self.bytes += len(encoded) + ENTRY_OVERHEAD
        while self.bytes > self._most_bytes:
            self.bytes -= len(self._entries.popleft()) + ENTRY_OVERHEAD
            self.lost += 1

    def dump(self, path: Path, epoch: Epoch, settings: CellSettings) -> None:
        """Write everything to a new file that only its owner can read. Raises OSError."""
        header = TraceHeader(
            epoch=epoch,
            settings=settings,
            written=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            entries=len(self._entries),
            lost=self.lost,
        )
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(MAGIC + msgspec.json.encode(header) + b"\n")
            for entry in self._entries:
                file.write(_LENGTH.pack(len(entry)) + entry)


class TracedCell(WatchedCell):
    """A cell whose events and answers are kept."""

    def __init__(self, settings: CellSettings, epoch: Epoch, clock: Callable[[], float], trace: Trace) -> None:
        self.trace = trace
        super().__init__(settings, epoch, clock)

    def frontend_joined(self, session: SessionId) -> None:
        self.trace.keep(events.FrontendJoined(session))
        super().frontend_joined(session)

    def frontend_lost(self, session: SessionId) -> None:
        self.trace.keep(events.FrontendLost(session))
        super().frontend_lost(session)

    def submit(self, session: SessionId, submit: Submit, now: float) -> None:
        self.trace.keep(events.Submitted(now, session, submit))
        super().submit(session, submit, now)

    def abort(self, session: SessionId, abort: Abort) -> None:
        self.trace.keep(events.Aborted(session, abort))
        super().abort(session, abort)

    def group_joined(self, session: SessionId, register: Register, now: float) -> None:
        self.trace.keep(events.GroupJoined(now, session, register))
        super().group_joined(session, register, now)

    def group_lost(self, session: SessionId, reason: str, now: float) -> None:
        self.trace.keep(events.GroupLost(now, session, reason))
        super().group_lost(session, reason, now)

    def group_down(self, down: GroupDown, now: float) -> None:
        self.trace.keep(events.Down(now, down))
        super().group_down(down, now)

    def drain_group(self, drain: DrainGroup, now: float) -> None:
        self.trace.keep(events.Drained(now, drain))
        super().drain_group(drain, now)

    def step_done(self, session: SessionId, done: StepDone, now: float) -> None:
        self.trace.keep(events.Done(now, session, done))
        super().step_done(session, done, now)

    def step_failed(self, session: SessionId, failed: StepFailed, now: float) -> None:
        self.trace.keep(events.Failed(now, session, failed))
        super().step_failed(session, failed, now)

    def advance(self, now: float) -> None:
        self.trace.keep(events.Advanced(now))
        super().advance(now)

    def restart_timers(self, now: float) -> None:
        self.trace.keep(events.TimersRestarted(now))
        super().restart_timers(now)

    def start_draining(self) -> None:
        self.trace.keep(events.DrainingStarted())
        super().start_draining()

    def take_outbox(self) -> list[Outgoing]:
        outbox = super().take_outbox()
        for outgoing in outbox:
            answer = events.answer_of(outgoing)
            if answer is not None:
                self.trace.keep(answer)
        return outbox


def read_trace(path: Path) -> tuple[TraceHeader, Iterator[events.Entry]]:
    """The header, and the entries as they are asked for. Raises TraceError, also later, and OSError."""
    data = path.read_bytes()
    head, newline, _ = data[len(MAGIC) :].partition(b"\n")
    if not data.startswith(MAGIC) or not newline:
        raise TraceError(f"{path} is not a trace")
    try:
        header = msgspec.json.decode(head, type=TraceHeader)
    except (msgspec.DecodeError, ValueError) as error:
        raise TraceError(f"{path}: {error}") from error
    if header.format != FORMAT:
        raise TraceError(f"{path} has format {header.format}; this reads {FORMAT}")
    return header, _entries(data, len(MAGIC) + len(head) + 1)


def _entries(data: bytes, at: int) -> Iterator[events.Entry]:
    while at < len(data):
        try:
            (length,) = _LENGTH.unpack_from(data, at)
            yield _decoder.decode(data[at + 4 : at + 4 + length])
        except (struct.error, msgspec.DecodeError, ValueError) as error:
            raise TraceError(f"the entry at byte {at} is damaged: {error}") from error
        at += 4 + length


def replay(header: TraceHeader, entries: Iterator[events.Entry]) -> Iterator[Outgoing]:
    """Let everything happen again to a fresh cell; yields what it sends.

    Raises TraceError when something else comes out than was kept, or when the trace has lost its beginning.
    """
    if header.lost:
        raise TraceError(f"the trace has lost its first {header.lost} entries; only a whole one can be replayed")
    cell = Cell(header.settings, Epoch(header.epoch))
    answers: deque[events.Answer] = deque()
    for number, entry in enumerate(entries):
        if isinstance(entry, events.Event):
            entry.apply(cell)
            for outgoing in cell.take_outbox():
                answer = events.answer_of(outgoing)
                if answer is not None:
                    answers.append(answer)
                yield outgoing
        else:
            given = answers.popleft() if answers else None
            if given != entry:
                raise TraceError(f"entry {number} differs: {_brief(given)} instead of {_brief(entry)}")
    # A trace is cut between an event and its answers only by its end.


def _brief(entry: object) -> str:
    return repr(entry)[:200]

"""A trace holds what a scheduler did: replayed through a fresh cell, the same plans and frames come out."""

from __future__ import annotations

import functools
import stat
from pathlib import Path

import pytest

from protocol.codec import encode
from protocol.ids import Epoch
from scheduler.frames import StepFrames
from scheduler.outbox import Outgoing, ToFrontend, ToLeader
from scheduler.settings import CellSettings
from scheduler.trace import Trace, TracedCell, TraceError, read_trace, replay
from scheduler.trace_events import Done, Planned
from tests.bench.storms import Storm

MEBIBYTE = 1 << 20


def told(outgoing: Outgoing) -> list[tuple[int, bytes]]:
    """The plans and frames in it, as they travel."""
    if isinstance(outgoing, StepFrames):
        return [(session, encode(frame)) for session, frame in outgoing.build()]
    if isinstance(outgoing, ToLeader | ToFrontend):
        return [(outgoing.session, encode(outgoing.message))]
    return []


class Telling(TracedCell):
    """Remembers every plan and frame that it sent."""

    def __init__(self, settings: CellSettings, epoch: Epoch, most_bytes: int) -> None:
        super().__init__(settings, epoch, lambda: 0.0, Trace(most_bytes))
        self.settings = settings
        self.told: list[tuple[int, bytes]] = []

    def take_outbox(self) -> list[Outgoing]:
        outbox = super().take_outbox()
        for outgoing in outbox:
            self.told += told(outgoing)
        return outbox


@functools.cache
def storm_of(seed: int, most_bytes: int = 64 * MEBIBYTE) -> tuple[Storm, Telling]:
    storm = Storm(seed, requests=60, make_cell=lambda settings, epoch: Telling(settings, epoch, most_bytes))
    storm.site.faults.step_fails, storm.site.faults.frame_is_lost = 0.01, 0.02
    storm.strike(deaths=2, slow=1)
    storm.run()
    assert isinstance(storm.site.cell, Telling)
    return storm, storm.site.cell


@pytest.mark.parametrize("seed", range(2))
def test_a_replay_gives_the_same_plans_and_frames_byte_for_byte(tmp_path: Path, seed: int) -> None:
    _, cell = storm_of(seed)
    cell.trace.dump(tmp_path / "t", cell.epoch, cell.settings)
    again = [message for outgoing in replay(*read_trace(tmp_path / "t")) for message in told(outgoing)]
    assert len(again) > 300 and again == cell.told


def test_a_scheduler_that_does_otherwise_is_found_out(tmp_path: Path) -> None:
    _, cell = storm_of(0)
    header, entries = _dumped(cell, tmp_path / "t")
    changed = list(entries)
    at = next(at for at, entry in enumerate(changed) if isinstance(entry, Planned) and entry.message().chunks)
    changed[at] = Planned(changed[at].session, changed[at].plan[:-1] + b"\xff")
    with pytest.raises(TraceError, match=f"entry {at} differs"):
        list(replay(header, iter(changed)))


def test_the_ring_is_bounded_and_says_what_it_lost(tmp_path: Path) -> None:
    _, cell = storm_of(0, most_bytes=20_000)
    assert cell.trace.bytes <= 20_000 and cell.trace.lost
    header, entries = _dumped(cell, tmp_path / "t")
    assert header.lost == cell.trace.lost
    kept = list(entries)
    assert len(kept) == header.entries and any(isinstance(entry, Done) for entry in kept)
    with pytest.raises(TraceError, match="lost its first"):
        next(replay(header, iter(kept)))


def test_a_trace_is_for_its_owner_alone(tmp_path: Path) -> None:
    _, cell = storm_of(0, most_bytes=20_000)
    cell.trace.dump(tmp_path / "t", cell.epoch, cell.settings)
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        cell.trace.dump(tmp_path / "t", cell.epoch, cell.settings)


@pytest.mark.parametrize("content", [b"", b"headrace-trace\n", b"headrace-trace\n{}\n", b"something else\n{}\n"])
def test_what_is_no_trace_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(TraceError):
        read_trace(tmp_path / "t")


def test_a_damaged_entry_is_named(tmp_path: Path) -> None:
    _, cell = storm_of(0, most_bytes=20_000)
    cell.trace.dump(tmp_path / "t", cell.epoch, cell.settings)
    whole = (tmp_path / "t").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-3])
    with pytest.raises(TraceError, match="damaged"):
        list(read_trace(tmp_path / "cut")[1])


def _dumped(cell: Telling, path: Path):  # type: ignore[no-untyped-def]
    cell.trace.dump(path, cell.epoch, cell.settings)
    return read_trace(path)

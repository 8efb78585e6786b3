"""Where a request's time went: phases without gaps, and every start, preemption and loss counted."""

from __future__ import annotations

import pytest

from protocol.frontend import Inquire, Phase, RejectCode, Timeline
from protocol.ids import Epoch, SessionId
from scheduler.settings import CellSettings
from scheduler.timelines import MOST_ENDED, MOST_SPANS, Timelines
from scheduler.watched_cell import WatchedCell
from tests.bench.storms import Storm
from tests.scheduler.rig import submit

SESSION = SessionId(1)
ROUNDING = 4
"""Microseconds: each of a few numbers is cut to a whole one."""


def watched(seed: int, **options: int) -> tuple[Storm, WatchedCell]:
    storms: list[Storm] = []

    def now() -> float:
        return storms[0].clock.now if storms else 0.0

    storm = Storm(seed, make_cell=lambda settings, epoch: WatchedCell(settings, epoch, now), **options)
    storms.append(storm)
    assert isinstance(storm.site.cell, WatchedCell)
    return storm, storm.site.cell


def timelines(storm: Storm, cell: WatchedCell) -> list[Timeline]:
    """Of every request's last submission."""
    told = []
    for session, frontend in storm.site.frontends.items():
        for asked in frontend.ended:
            (timeline,) = cell.timelines(session, Inquire(1, (asked.rid,))).timelines
            assert (timeline.output_tokens, timeline.prompt_tokens) == (len(asked.ids), asked.prompt_tokens)
            told.append(timeline)
    return told


def check(timeline: Timeline) -> None:
    assert (timeline.phase, timeline.ended) == (Phase.ENDED, "length")
    phases = timeline.queued_us + timeline.prefill_us + timeline.decode_us
    assert phases == pytest.approx(timeline.lasted_us, abs=ROUNDING)
    assert timeline.starts == 1 + timeline.preemptions + timeline.losses
    assert timeline.spans[0].phase is Phase.QUEUED and timeline.spans[0].at_us == 0
    for span, following in zip(timeline.spans, timeline.spans[1:], strict=False):
        assert span.at_us + span.us == pytest.approx(following.at_us, abs=ROUNDING)
        assert span.phase is not following.phase and bool(span.group) is (span.phase is not Phase.QUEUED)
    if len(timeline.spans) < MOST_SPANS:
        assert sum(span.us for span in timeline.spans) == pytest.approx(timeline.lasted_us, abs=4 * MOST_SPANS)


def test_phases_follow_each_other_and_preemptions_are_counted() -> None:
    storm, cell = watched(7, num_blocks=24)
    storm.run()
    told = timelines(storm, cell)
    for timeline in told:
        check(timeline)
    preempted = sum(group.preemptions for group in cell.load(0.0).groups)
    # One that is complete with the ids that were under way never waits again.
    assert preempted >= sum(timeline.preemptions for timeline in told) > 0


def test_what_a_lost_group_and_a_failed_step_cost_is_told() -> None:
    storm, cell = watched(1)
    storm.site.faults.step_fails = 0.01
    storm.strike(deaths=2)
    storm.run()
    told = timelines(storm, cell)
    for timeline in told:
        check(timeline)
    assert sum(timeline.losses for timeline in told) > 0


def test_a_request_that_waits_is_told_as_it_is_and_a_refused_one_says_why() -> None:
    clock = [10.0]
    cell = WatchedCell(CellSettings(), Epoch(1), lambda: clock[0])
    cell.frontend_joined(SESSION)
    cell.submit(SESSION, submit(1), 10.0)
    (refused,) = cell.timelines(SESSION, Inquire(1, (1, 2))).timelines
    assert refused.ended == f"rejected: {RejectCode.UNKNOWN_MODEL.name.lower()}" and "no group" in refused.message
    assert cell.timelines(SessionId(2), Inquire(1, (1,))).timelines == (), "another frontend's"


def test_they_are_bounded_and_go_with_their_frontend() -> None:
    kept = Timelines()
    for rid in range(MOST_ENDED + 50):
        kept.submitted(SESSION, submit(rid), 0.0)
        kept.rejected(SESSION, [rid], "rejected: invalid", "", 1.0)
    assert len(kept) == MOST_ENDED and kept.of(SESSION, 0, 1.0) is None
    kept.submitted(SESSION, submit(10_000), 0.0)
    assert kept.of(SESSION, 10_000, 2.0).queued_us == 2_000_000  # type: ignore[union-attr]
    kept.left(SESSION)
    assert len(kept) == 0

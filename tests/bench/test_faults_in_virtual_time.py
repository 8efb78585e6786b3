"""After any storm of faults no request is lost or doubled, each has its own ids, and the pools are full again."""

from __future__ import annotations

import pytest

from bench.simulation.virtual import check_at_rest
from protocol.frontend import FinishReason, RejectCode
from tests.bench.storms import Storm


def served(storm: Storm) -> int:
    return sum(one.finish is not None and one.finish.reason is FinishReason.LENGTH for one in storm.asked)


def check(storm: Storm, *, all_served: bool = True) -> None:
    storm.run()
    check_at_rest([storm.site], storm.asked)
    assert not all_served or served(storm) == len(storm.asked)


@pytest.mark.parametrize("seed", range(2))
def test_groups_die_and_their_requests_go_on_elsewhere(seed: int) -> None:
    storm = Storm(seed)
    storm.strike(deaths=3)
    check(storm)
    assert storm.site.statistics.deaths


def test_a_group_that_hangs_is_given_up_and_replaced() -> None:
    storm = Storm(3)
    storm.strike(hangs=2)
    check(storm)
    assert storm.site.statistics.kills


def test_a_slow_group_slows_only_itself() -> None:
    storm = Storm(4)
    storm.strike(slow=4)
    check(storm)


def test_frames_that_are_lost_are_asked_for_again() -> None:
    storm = Storm(5)
    storm.site.faults.frame_is_lost = 0.05
    check(storm)
    assert storm.site.statistics.frames_lost and sum(frontend.gaps_seen for frontend in storm.frontends)


def test_steps_that_fail_cost_time_alone() -> None:
    storm = Storm(6)
    storm.site.faults.step_fails = 0.01
    check(storm)
    assert storm.site.statistics.steps_failed


def test_a_pool_that_is_too_small_for_all_preempts_and_loses_nobody() -> None:
    storm = Storm(7, num_blocks=24)
    check(storm)
    assert sum(group.preemptions for group in storm.site.cell.load(0.0).groups)


def test_a_storm_of_admissions_is_served_or_refused_and_nothing_between() -> None:
    storm = Storm(8, requests=200, a_second=10_000.0, max_queue_requests=40)
    check(storm, all_served=False)
    refused = [one.reject for one in storm.asked if one.reject is not None]
    assert refused and all(reject.code is RejectCode.OVERLOADED and reject.retry_after_ms for reject in refused)
    assert served(storm) + len(refused) == len(storm.asked)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 13))
def test_everything_at_once(seed: int) -> None:
    storm = Storm(seed, num_blocks=30)
    storm.site.faults.frame_is_lost, storm.site.faults.step_fails = 0.02, 0.005
    storm.strike(deaths=4, hangs=1, slow=3)
    check(storm, all_served=False)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 120))
def test_everything_at_once_at_length(seed: int) -> None:
    storm = Storm(seed, requests=400, num_blocks=30)
    storm.site.faults.frame_is_lost, storm.site.faults.step_fails = 0.02, 0.005
    storm.strike(deaths=8, hangs=2, slow=6)
    check(storm, all_served=False)


def test_the_same_seed_is_the_same_run() -> None:
    runs = []
    for _ in range(2):
        storm = Storm(20)
        storm.strike(deaths=2)
        storm.run()
        runs.append([(one.rid, one.ended_at, one.first_id_at, list(one.ids)) for one in storm.asked])
    assert runs[0] == runs[1]

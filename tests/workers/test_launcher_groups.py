"""Groups are launched, announced, and launched again when, and only when, they should be."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol.ids import GroupId, Incarnation
from workers.launchers.base import Launch, RankEnded
from workers.launchers.groups import Action, Down, End, Groups, RestartPolicy, Start, Up

POLICY = RestartPolicy(first=1.0, most=8.0, stable=60.0)


def new_groups(tp: int = 1) -> Groups:
    return Groups("g", tp, policy=POLICY, mint=itertools.count(100).__next__)


def launch(name: str, incarnation: int, tp: int = 1) -> Launch:
    return Launch(GroupId(name), Incarnation(incarnation), tp)


def ended(which: Launch, rank: int = 0, cause: str = "it died", status: int | None = -9) -> RankEnded:
    return RankEnded(which.group, which.incarnation, rank, cause, status)


def started(groups: Groups, now: float = 0.0) -> list[Launch]:
    return [action.launch for action in groups.turn(now) if isinstance(action, Start)]


def test_wanted_groups_are_launched_and_announced_at_once() -> None:
    groups = new_groups()
    assert groups.want(2, 0.0) == []
    first, second = launch("g0", 100), launch("g1", 101)
    assert groups.turn(0.0) == [Start(first), Up(first), Start(second), Up(second)]
    assert groups.turn(100.0) == [] and groups.next_due() is None
    assert groups.announced() == [Up(first), Up(second)]


def test_a_dead_rank_takes_its_launch_down_and_a_new_incarnation_follows() -> None:
    groups = new_groups()
    groups.want(1, 0.0)
    (first,) = started(groups)
    assert groups.ended(ended(first), 100.0) == [Down(first, "it died"), End(first, 0.0)]
    (second,) = started(groups, 100.0)
    assert second.group == first.group and second.incarnation != first.incarnation
    assert groups.ended(ended(first), 101.0) == [], "news of an old incarnation"


def test_a_group_is_launched_again_only_when_all_its_ranks_are_gone() -> None:
    groups = new_groups(tp=3)
    groups.want(1, 0.0)
    (first,) = started(groups)
    assert groups.ended(ended(first, 1), 100.0) == [Down(first, "it died"), End(first, 0.0)]
    assert groups.ended(ended(first, 0, "killed"), 100.0) == [End(first, 0.0)], "announced once"
    assert started(groups, 200.0) == [] and groups.announced() == []
    groups.ended(ended(first, 2), 200.0)
    assert len(started(groups, 200.0)) == 1


def test_restarts_back_off_until_a_launch_was_stable() -> None:
    groups = new_groups()
    groups.want(1, 0.0)
    now, waits = 0.0, []
    for _ in range(7):
        (current,) = started(groups, now)
        groups.ended(ended(current), now + 1)
        due = groups.next_due()
        assert due is not None
        waits.append(due - (now + 1))
        now = due
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    (current,) = started(groups, now)
    groups.ended(ended(current), now + POLICY.stable)
    assert groups.next_due() == now + POLICY.stable


def test_kill_group_ends_that_incarnation_only() -> None:
    groups = new_groups()
    groups.want(1, 0.0)
    (first,) = started(groups)
    (down,) = groups.kill("g0", 99, "overdue")
    assert isinstance(down, Down) and down.launch.incarnation == 99
    assert groups.kill("g0", first.incarnation, "step 7 is overdue") == [End(first, 0.0)]
    assert groups.ended(ended(first), 100.0)[0] == Down(first, "killed: step 7 is overdue")
    assert len(started(groups, 100.0)) == 1


def test_a_rank_that_was_told_to_end_is_replaced_for_as_long_as_its_group_is_wanted() -> None:
    groups = new_groups()
    groups.want(1, 0.0)
    (first,) = started(groups)
    groups.ended(ended(first, status=0), 10.0)
    (second,) = started(groups, 1000.0)
    groups.want(0, 1000.0)
    groups.ended(ended(second, status=0), 1001.0)
    assert started(groups, 2000.0) == []


def test_an_unusable_first_launch_is_final_and_a_later_one_is_not() -> None:
    groups = new_groups()
    groups.want(1, 0.0)
    (first,) = started(groups)
    groups.ended(ended(first), 100.0)
    (second,) = started(groups, 100.0)
    groups.ended(ended(second, status=3), 100.0)
    assert not groups.unusable
    other = new_groups()
    other.want(1, 0.0)
    (first,) = started(other)
    other.ended(ended(first, cause="rank 0 exited with status 3", status=3), 1.0)
    assert other.unusable == "group g0: rank 0 exited with status 3"


def test_fewer_groups_end_the_highest() -> None:
    groups = new_groups()
    groups.want(3, 0.0)
    launches = started(groups)
    assert [(a.launch.group, a.grace > 0) for a in groups.want(1, 1.0) if isinstance(a, End)] == [
        ("g1", True),
        ("g2", True),
    ]
    groups.ended(ended(launches[2]), 2.0)
    groups.want(3, 3.0)
    assert [start.group for start in started(groups, 3.0)] == ["g2"], "g1 is still on its way out"
    groups.ended(ended(launches[1]), 1000.0)
    assert [start.group for start in started(groups, 1000.0)] == ["g1"]


def test_what_an_earlier_launcher_left_is_taken_over() -> None:
    groups = new_groups()
    groups.want(2, 0.0)
    kept, double, surplus = launch("g1", 7), launch("g1", 8), launch("g5", 9)
    assert groups.adopt([kept, double, surplus], 0.0) == [Up(kept), End(double, 0.0), End(surplus, 0.0)]
    assert [start.group for start in started(groups)] == ["g0"]
    assert groups.ended(ended(double), 1.0) == []
    assert Down(kept, "it died") in groups.ended(ended(kept), 1.0)


def test_stop_ends_everything_for_good() -> None:
    groups = new_groups()
    groups.want(2, 0.0)
    launches = started(groups)
    assert groups.stop(3.0) == [End(one, 3.0) for one in launches]
    for one in launches:
        assert Down(one, "stopped") in groups.ended(ended(one, status=0), 1.0)
    assert groups.running() == [] and started(groups, 1000.0) == []


def test_a_launch_that_fails_to_start_is_tried_again() -> None:
    groups = new_groups(tp=2)
    groups.want(1, 0.0)
    (first,) = started(groups)
    assert Down(first, "no more processes") in groups.failed_to_start(first, "no more processes", 0.0)
    assert groups.running() == [] and groups.next_due() == 0.0


def test_only_names_of_this_launcher_are_its_own() -> None:
    groups = Groups("east-g", 1)
    assert groups.owns("east-g12")
    assert not any(groups.owns(name) for name in ("g12", "east-gx", "east-g", "west-g1", "east-g1/0"))


class GroupsMachine(RuleBasedStateMachine):
    """Whatever happens: every launch gets one Up and at most one Down, and no group runs twice."""

    @initialize(tp=st.integers(1, 3))
    def begin(self, tp: int) -> None:
        self.now = 0.0
        self.tp = tp
        self.groups = new_groups(tp)
        self.ups: list[Launch] = []
        self.downs: list[Launch] = []
        self.alive: dict[Launch, set[int]] = {}

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self.alive[action.launch] = set(range(self.tp))
            elif isinstance(action, Up):
                self.ups.append(action.launch)
            elif isinstance(action, Down) and action.cause != "already ended":
                self.downs.append(action.launch)

    @rule(count=st.integers(0, 4))
    def want(self, count: int) -> None:
        self.do(self.groups.want(count, self.now))

    @rule(seconds=st.floats(0, 100))
    def turn(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.groups.turn(self.now))

    @rule(data=st.data(), status=st.sampled_from([None, 0, 1, 3, -9]))
    def end_rank(self, data: st.DataObject, status: int | None) -> None:
        pairs = [(one, rank) for one, ranks in self.alive.items() for rank in sorted(ranks)]
        if pairs:
            one, rank = data.draw(st.sampled_from(pairs))
            self.alive[one].discard(rank)
            self.do(self.groups.ended(ended(one, rank, status=status), self.now))

    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        if self.ups:
            one = data.draw(st.sampled_from(self.ups))
            self.do(self.groups.kill(one.group, one.incarnation, "overdue"))

    @invariant()
    def every_launch_is_told_once(self) -> None:
        assert len(set(self.ups)) == len(self.ups) and len(set(self.downs)) == len(self.downs)
        assert set(self.downs) <= set(self.ups)
        broken = {one for one, ranks in self.alive.items() if len(ranks) < self.tp}
        assert set(self.downs) == broken

    @invariant()
    def no_group_runs_twice(self) -> None:
        living = [one.group for one, ranks in self.alive.items() if ranks]
        assert len(set(living)) == len(living)
        assert sorted(living) == sorted(one.group for one in self.groups.running())


GroupsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestGroupsMachine = GroupsMachine.TestCase

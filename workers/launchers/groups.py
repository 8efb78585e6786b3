"""Which groups run, which are due for a launch, and what follows from each event.

Pure: events and times in, actions out. A group is launched again only when every rank of its last launch is gone, so
that two incarnations never share memory or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol.ids import GroupId, Incarnation, random_u64
from workers.launchers.base import Launch, RankEnded
from workers.rank import EXIT_UNUSABLE

STOP_GRACE = 5.0
"""Seconds a rank that was asked to finish has for its last step."""


@dataclass(frozen=True)
class RestartPolicy:
    """Seconds. The first failure after a stable life is answered at once, then the wait doubles."""

    first: float = 0.5
    most: float = 10.0
    stable: float = 10.0

    def delay(self, failures: int) -> float:
        """Wait before the launch that follows this many failures in a row, of which the last is not counted."""
        return 0.0 if failures == 0 else min(self.most, self.first * 2.0 ** (failures - 1))


@dataclass(frozen=True)
class Start:
    """Launch a group: all its ranks, with this incarnation."""

    launch: Launch


@dataclass(frozen=True)
class End:
    """End what is left of a launch."""

    launch: Launch
    grace: float


@dataclass(frozen=True)
class Up:
    """Tell the scheduler that a launch was made."""

    launch: Launch


@dataclass(frozen=True)
class Down:
    """Tell the scheduler that a launch is over."""

    launch: Launch
    cause: str


Action = Start | End | Up | Down


@dataclass
class _Group:
    wanted: bool = True
    launch: Launch | None = None
    alive: set[int] = field(default_factory=set)
    fallen: bool = False
    """The launch was announced as down; its last ranks are on their way out."""
    cause: str = ""
    launched_at: float = 0.0
    launches: int = 0
    failures: int = 0
    due: float | None = None


class Groups:
    """The groups of one model that this launcher keeps."""

    def __init__(
        self,
        prefix: str,
        tp: int,
        *,
        policy: RestartPolicy | None = None,
        mint: Callable[[], int] = random_u64,
    ) -> None:
        self._prefix = prefix
        self._tp = tp
        self._policy = policy or RestartPolicy()
        self._mint = mint
        self._groups: dict[GroupId, _Group] = {}
        self.unusable = ""
        """Set when a first launch showed that no launch can succeed: what it said."""

    def owns(self, group: str) -> bool:
        """Whether a group's name is one of ours."""
        return group.startswith(self._prefix) and group.removeprefix(self._prefix).isdigit()

    def want(self, count: int, now: float) -> list[Action]:
        """Keep groups 0 … count-1 running and end the others."""
        for index in range(count):
            group = self._groups.setdefault(GroupId(f"{self._prefix}{index}"), _Group(due=now))
            if not group.wanted:
                group.wanted = True
                group.due = now if group.launch is None else None
        surplus = [group for name, group in self._groups.items() if self._index(name) >= count]
        return [action for group in surplus for action in self._retire(group)]

    def adopt(self, launches: Sequence[Launch], now: float) -> list[Action]:
        """Take over what an earlier launcher started; a group's second launch and unwanted ones are ended."""
        actions: list[Action] = []
        for launch in launches:
            group = self._groups.get(launch.group)
            if group is None or not group.wanted or group.launch is not None or launch.tp != self._tp:
                actions.append(End(launch, 0.0))
                continue
            self._launched(group, launch, now)
            actions.append(Up(launch))
        return actions

    def turn(self, now: float) -> list[Action]:
        """Launches that are due."""
        actions: list[Action] = []
        for name, group in self._groups.items():
            if group.due is not None and group.due <= now:
                launch = Launch(name, Incarnation(self._mint()), self._tp)
                self._launched(group, launch, now)
                actions += [Start(launch), Up(launch)]
        return actions

    def next_due(self) -> float | None:
        """When ``turn`` has something to do."""
        return min((group.due for group in self._groups.values() if group.due is not None), default=None)

    def ended(self, event: RankEnded, now: float) -> list[Action]:
        """A rank is gone: the launch is down, its other ranks go too, and the group is due again once they have."""
        group = self._current(event.group, event.incarnation)
        if group is None or group.launch is None or event.rank not in group.alive:
            return []
        launch = group.launch
        group.alive.discard(event.rank)
        actions: list[Action] = []
        if not group.fallen:
            group.fallen = True
            actions.append(Down(launch, group.cause or event.cause))
        if event.status == EXIT_UNUSABLE and group.launches == 1:
            self.unusable = f"group {launch.group}: {event.cause}"
        actions.append(End(launch, 0.0))
        if not group.alive:
            self._gone(group, now)
        return actions

    def failed_to_start(self, launch: Launch, message: str, now: float) -> list[Action]:
        """Not even one rank came to be."""
        actions: list[Action] = []
        for rank in range(launch.tp):
            actions += self.ended(RankEnded(launch.group, launch.incarnation, rank, message), now)
        return actions

    def kill(self, group_name: str, incarnation: int, reason: str) -> list[Action]:
        """The scheduler gave a launch up. One that is already over is announced once more: the news may be lost."""
        group = self._current(group_name, incarnation)
        if group is None or group.launch is None:
            return [Down(Launch(GroupId(group_name), Incarnation(incarnation), self._tp), "already ended")]
        group.cause = f"killed: {reason}" if reason else "killed by the scheduler"
        return [End(group.launch, 0.0)]

    def stop(self, grace: float = STOP_GRACE) -> list[Action]:
        """End every group for good."""
        return [action for group in self._groups.values() for action in self._retire(group, grace)]

    def running(self) -> list[Launch]:
        """Launches with at least one rank left."""
        return [group.launch for group in self._groups.values() if group.launch is not None]

    def announced(self) -> list[Action]:
        """What a scheduler that knows nothing must be told."""
        return [Up(group.launch) for group in self._groups.values() if group.launch is not None and not group.fallen]

    def _launched(self, group: _Group, launch: Launch, now: float) -> None:
        group.launch = launch
        group.alive = set(range(launch.tp))
        group.fallen = False
        group.cause = ""
        group.launched_at = now
        group.launches += 1
        group.due = None

    def _gone(self, group: _Group, now: float) -> None:
        group.launch = None
        if not group.wanted:
            return
        if now - group.launched_at >= self._policy.stable:
            group.failures = 0
        group.due = now + self._policy.delay(group.failures)
        group.failures += 1

    def _retire(self, group: _Group, grace: float = STOP_GRACE) -> list[Action]:
        group.wanted = False
        group.due = None
        if group.launch is None:
            return []
        group.cause = group.cause or "stopped"
        return [End(group.launch, grace)]

    def _current(self, name: str, incarnation: int) -> _Group | None:
        group = self._groups.get(GroupId(name))
        if group is None or group.launch is None or group.launch.incarnation != incarnation:
            return None
        return group

    def _index(self, name: str) -> int:
        return int(name.removeprefix(self._prefix))

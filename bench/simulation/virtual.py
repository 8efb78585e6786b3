"""The simulation in virtual time: cells driven directly, on a clock that jumps from event to event.

Deterministic: the same seed gives the same run to the last id. The scheduler itself takes no time here; messages take
``LATENCY`` each way, steps what their model says.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from bench.simulation.frontend import Asked, SimulatedFrontend
from bench.simulation.group import SimulatedGroup
from protocol.base import Wire
from protocol.frontend import Abort, Frame, Submit
from protocol.ids import Epoch, SessionId
from protocol.worker import KillGroup, Register, StepDone, StepFailed
from scheduler.cell import Cell
from scheduler.frames import StepFrames
from scheduler.outbox import EndLeader, Outgoing, ToFrontend, ToFrontends, ToLaunchers, ToLeader
from scheduler.settings import CellSettings
from workers.simulated import StepTimes

LATENCY = 0.0002
"""Seconds a message travels."""
TICK = 0.05
"""Seconds between two turns of a scheduler that nothing happens to."""
RELAUNCH = 2.0
"""Seconds until a group that died registers again."""


class Clock:
    """Virtual seconds and what is to happen when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something at a time, after what was asked for earlier at the same time."""
        heapq.heappush(self._due, (max(when, self.now), next(self._count), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something in a while."""
        self.at(self.now + seconds, action)

    def run(self, *, until: Callable[[], bool], most: float) -> None:
        """Go from event to event until a condition holds. Raises TimeoutError after ``most`` virtual seconds."""
        while not until():
            if not self._due or self.now > most:
                raise TimeoutError(f"after {self.now:.1f} virtual seconds it is not over")
            self.now, _, action = heapq.heappop(self._due)
            action()


@dataclass
class Faults:
    """What goes wrong by chance at every step or frame of a site."""

    step_fails: float = 0.0
    """Of the steps."""
    frame_is_lost: float = 0.0
    """Of the frames with ids and no finish: after a lost finish nothing would come that shows the gap."""


@dataclass(eq=False)
class Running:
    """One group as a site sees it."""

    session: SessionId
    group: SimulatedGroup
    hanging: bool = False
    """Its step never ends."""


@dataclass
class SiteStatistics:
    """Counters since start."""

    frames_lost: int = 0
    steps_failed: int = 0
    deaths: int = 0
    kills: int = 0


class Site:
    """One cell with its groups and frontends."""

    def __init__(
        self,
        clock: Clock,
        settings: CellSettings | None = None,
        *,
        seed: int = 0,
        make_cell: Callable[[CellSettings, Epoch], Cell] = Cell,
        make_group: Callable[[Register, StepTimes], SimulatedGroup] = SimulatedGroup,
    ) -> None:
        self.clock = clock
        self._make_group = make_group
        self.cell = make_cell(settings or CellSettings(), Epoch(seed + 1))
        self.faults = Faults()
        self.statistics = SiteStatistics()
        self.frontends: dict[SessionId, SimulatedFrontend] = {}
        self.running: dict[SessionId, Running] = {}
        self._rng = random.Random(seed)
        self._sessions = itertools.count(1)
        self._incarnations = itertools.count(1)
        self._tick()

    # ------------------------------------------------------------------------------------------------------ peers

    def add_frontend(self) -> SimulatedFrontend:
        """A frontend joins."""
        session = SessionId(next(self._sessions))
        frontend = SimulatedFrontend(lambda message: self._from_frontend(session, message))
        self.frontends[session] = frontend
        self.cell.frontend_joined(session)
        return frontend

    def launch(self, register: Register, times: StepTimes) -> Running:
        """A group registers, as a new incarnation."""
        register = replace(register, incarnation=next(self._incarnations))
        session = SessionId(next(self._sessions))
        running = Running(session, self._make_group(register, times))
        refused = self.cell.refusal(register)
        assert refused is None, refused
        for old, other in list(self.running.items()):
            if other.group.register.group == register.group:
                del self.running[old]
        self.running[session] = running
        self.cell.group_joined(session, register, self.clock.now)
        self.turn()
        return running

    def die(self, running: Running) -> None:
        """A group ends, whatever it is doing, and comes back after a while."""
        if self.running.pop(running.session, None) is None:
            return
        self.statistics.deaths += 1
        self.cell.group_lost(running.session, "died", self.clock.now)
        self._relaunch_later(running)
        self.turn()

    def hang(self, running: Running) -> None:
        """Its running step, or the next, never ends: the scheduler must notice."""
        running.hanging = True

    def slow(self, running: Running, times: float, seconds: float) -> None:
        """Its steps take longer for a while."""
        running.group.slowness = times
        self.clock.after(seconds, lambda: setattr(running.group, "slowness", 1.0))

    def _relaunch_later(self, running: Running) -> None:
        group = running.group

        def relaunch() -> None:
            self.launch(group.register, group.times)

        self.clock.after(RELAUNCH, relaunch)

    # ----------------------------------------------------------------------------------------------------- events

    def _from_frontend(self, session: SessionId, message: Wire) -> None:
        def arrive() -> None:
            if isinstance(message, Submit):
                self.cell.submit(session, message, self.clock.now)
            elif isinstance(message, Abort):
                self.cell.abort(session, message)
            self.turn()

        self.clock.after(LATENCY, arrive)

    def turn(self) -> None:
        """What the scheduler's loop does after events."""
        self.cell.advance(self.clock.now)
        self._deliver()

    def _tick(self) -> None:
        self.turn()
        self.clock.after(TICK, self._tick)

    def _deliver(self) -> None:
        while outbox := self.cell.take_outbox():
            for outgoing in outbox:
                self._send(outgoing)

    def _send(self, outgoing: Outgoing) -> None:
        if isinstance(outgoing, ToLeader):
            self.clock.after(LATENCY, lambda: self._to_group(outgoing.session, outgoing.message))
        elif isinstance(outgoing, StepFrames):
            for session, frame in outgoing.build():
                self._to_frontend(session, frame)
        elif isinstance(outgoing, ToFrontend):
            self._to_frontend(outgoing.session, outgoing.message)
        elif isinstance(outgoing, ToFrontends):
            for session in self.frontends:
                self._to_frontend(session, outgoing.message)
        elif isinstance(outgoing, ToLaunchers) and isinstance(outgoing.message, KillGroup):
            self.statistics.kills += 1
        elif isinstance(outgoing, EndLeader) and outgoing.session in self.running:
            self._relaunch_later(self.running.pop(outgoing.session))

    def _to_frontend(self, session: SessionId, message: Wire) -> None:
        lossy = isinstance(message, Frame) and message.rids and not message.finishes
        if lossy and self._rng.random() < self.faults.frame_is_lost:
            self.statistics.frames_lost += 1
            return
        self.clock.after(LATENCY, lambda: self.frontends[session].receive(message, self.clock.now))

    def _to_group(self, session: SessionId, message: object) -> None:
        running = self.running.get(session)
        if running is not None:
            running.group.receive(message)
            self._begin(running)

    def _begin(self, running: Running) -> None:
        if running.group.plans and not running.group.busy and not running.hanging:
            seconds = running.group.begin()
            self.clock.after(seconds, lambda: self._end(running))

    def _end(self, running: Running) -> None:
        """A step is over; its answer arrives a little later, and the next step begins at once."""
        group, clock = running.group, self.clock
        if not group.busy or running.hanging or running.session not in self.running:
            return
        if self._rng.random() < self.faults.step_fails:
            self.statistics.steps_failed += 1
            failed = group.fail(kv_survived=self._rng.random() < 0.5)
            clock.after(LATENCY, lambda: self._failed(running, failed))
            return
        done = group.end()
        clock.after(LATENCY, lambda: self._done(running, done))
        self._begin(running)

    def _done(self, running: Running, done: StepDone) -> None:
        if running.session in self.running:
            self.cell.step_done(running.session, done, self.clock.now)
            self._deliver()
            self.turn()

    def _failed(self, running: Running, failed: StepFailed) -> None:
        if running.session in self.running:
            self.cell.step_failed(running.session, failed, self.clock.now)
            self.turn()


def check_at_rest(sites: list[Site], asked: list[Asked], vocab_size: int = 50_000) -> None:
    """Every request has exactly one end and its own ids, and every pool is full again."""
    ended = [one for site in sites for frontend in site.frontends.values() for one in frontend.ended]
    assert len(ended) == len(asked) and {id(one) for one in ended} == {id(one) for one in asked}, "lost or doubled"
    for one in asked:
        assert (one.finish is None) != (one.reject is None), "one end, of one kind"
        one.check(vocab_size)
    for site in sites:
        site.cell.check_integrity()
        load = site.cell.load(site.clock.now)
        assert (load.requests_running, load.requests_waiting, load.waiting_tokens) == (0, 0, 0)
        assert all(group.blocks_used == 0 for group in load.groups), "a pool is not full again"

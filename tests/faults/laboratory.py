"""A real server, hurt on purpose while its clients are watched."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.end_to_end.serve_process import Gauges, RunningServer
from tests.faults.ledger import Ask, Ledger, Verdict, follow_all
from tests.faults.scenarios import Fault, Phase, Role, Scenario

MISSING_SECONDS = 120.0
"""How long a process or a group may be missing."""


@dataclass
class Outcome:
    """One scenario as it went."""

    name: str
    verdicts: list[Verdict] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """Longest silence of each stream, in seconds."""
    noticed: list[float] = field(default_factory=list)
    """Seconds from each blow until a new process of the role was there."""
    struck: int = 0
    saved: list[Path] = field(default_factory=list)

    def count(self, verdict: Verdict) -> int:
        """Streams with this verdict."""
        return self.verdicts.count(verdict)


class Laboratory:
    """A server, the asks, and how they are answered when nothing happens."""

    def __init__(self, server: RunningServer, asks: Sequence[Ask], ledgers: Path, seed: int = 0) -> None:
        self.server = server
        self._asks = asks
        self._directory = ledgers
        self._random = random.Random(seed)
        self._undisturbed = [Ledger(ask) for ask in asks]
        asyncio.run(follow_all(server.url, self._undisturbed))
        for ledger in self._undisturbed:
            assert ledger.done == 1 and not ledger.error, f"{ledger.ask.name} fails without a fault: {ledger}"
        self._expected = [ledger.tokens for ledger in self._undisturbed]
        self._groups = len(server.gauges().used_blocks())
        self._base = self._held()
        self._base_resident = self._resident()

    def run(self, scenario: Scenario) -> Outcome:
        """The asks again, and processes are hurt meanwhile; then everything must be back to base."""
        outcome = Outcome(scenario.name)
        dead: list[str] = []

        def strike() -> None:
            for _ in range(scenario.fault.times):
                self._blow(scenario.fault, outcome, dead)

        return self._observe(outcome, scenario.phase, strike, dead)

    def hurt(self, name: str, phase: Phase, strike: Callable[[], None]) -> Outcome:
        """The asks again, while ``strike`` does what it does on a thread of its own; then everything must be back."""
        outcome = Outcome(name)

        def counted() -> None:
            outcome.struck += 1
            strike()

        return self._observe(outcome, phase, counted, [])

    def _observe(self, outcome: Outcome, phase: Phase, strike: Callable[[], None], dead: list[str]) -> Outcome:
        ledgers = [Ledger(ask) for ask in self._asks]
        over = threading.Event()
        striker = threading.Thread(target=self._strike_in_time, args=(phase, ledgers, strike, over))
        striker.start()
        try:
            asyncio.run(follow_all(self.server.url, ledgers))
        finally:
            over.set()
            striker.join()
        for ledger, undisturbed in zip(ledgers, self._undisturbed, strict=True):
            verdict = ledger.verdict(undisturbed, dead)
            outcome.verdicts.append(verdict)
            if not ledger.broken:
                outcome.pauses.append(ledger.longest_gap)
            if verdict is Verdict.LOST:
                outcome.saved.append(ledger.save(self._directory / outcome.name.replace(" ", "-"), undisturbed))
        self.check_quiescence()
        return outcome

    def memory(self) -> str:
        """Resident memory of those that lived since the start, then and now."""
        now = self._resident()
        grown = [
            f"{before / 2**20:.0f} → {now[pid] / 2**20:.0f} MiB"
            for pid, before in self._base_resident.items()
            if pid in now
        ]
        return f"resident memory of the schedulers and frontends that lived on: {', '.join(grown) or 'none did'}"

    def check_quiescence(self) -> None:
        """No request, no block, no process more or less than before; survivors hold no more descriptors or threads."""
        self.server.wait_for_gauges(self._at_rest, "at rest", MISSING_SECONDS)
        ends = time.monotonic() + 30
        while grown := self._grown():
            assert time.monotonic() < ends, f"held more than before: {grown}"
            time.sleep(0.1)

    def _strike_in_time(
        self, phase: Phase, ledgers: Sequence[Ledger], strike: Callable[[], None], over: threading.Event
    ) -> None:
        while not phase.reached(ledgers, self._expected):
            if over.wait(0.002):
                return
        strike()

    def _blow(self, fault: Fault, outcome: Outcome, dead: list[str]) -> None:
        alive = self.server.pids(fault.role.value)
        names = self._frontend_names() if fault.role is Role.FRONTEND else {}
        struck = alive if fault.every else [self._random.choice(alive)]
        at = time.monotonic()
        for pid in struck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, fault.number)
                outcome.struck += 1
        # A frontend that is only stopped keeps its connections; one that is killed breaks them.
        if fault.number is signal.SIGKILL:
            dead += [names[pid] for pid in struck if pid in names]
        if fault.stopped_seconds:
            time.sleep(fault.stopped_seconds)
            for pid in struck:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        elif fault.role is not Role.SUPERVISOR:
            while len(set(self.server.pids(fault.role.value)) - set(struck)) < len(alive):
                assert time.monotonic() - at < MISSING_SECONDS, f"no new {fault.role.name}"
                time.sleep(0.02)
            outcome.noticed.append(time.monotonic() - at)

    def _at_rest(self, gauges: Gauges) -> bool:
        used = gauges.used_blocks()
        return (
            len(used) == self._groups
            and not any(used)
            and gauges.total("headrace_requests_running") == 0
            and gauges.total("headrace_requests_waiting") == 0
        )

    def _frontend_names(self) -> dict[int, str]:
        """Pid → name of each frontend process, from its own settings."""
        names = {}
        for pid in self.server.pids(Role.FRONTEND.value):
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
                names[pid] = environment.partition('"name":"')[2].partition('"')[0]
        return names

    def _held(self) -> dict[int, tuple[int, int]]:
        """Pid → (descriptors, threads) of the scheduler and the frontends."""
        held = {}
        for role in (Role.SCHEDULER, Role.FRONTEND):
            for pid in self.server.pids(role.value):
                with contextlib.suppress(OSError):
                    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
                    held[pid] = (descriptors, len(list(Path(f"/proc/{pid}/task").iterdir())))
        return held

    def _resident(self) -> dict[int, int]:
        """Pid → bytes."""
        resident = {}
        for role in (Role.SCHEDULER, Role.FRONTEND):
            for pid in self.server.pids(role.value):
                with contextlib.suppress(OSError):
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                    resident[pid] = pages * os.sysconf("SC_PAGE_SIZE")
        return resident

    def _grown(self) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
        """Survivors that hold more than at the start: a few descriptors of slack for connections that close late."""
        now = self._held()
        return {
            pid: (self._base[pid], held)
            for pid, held in now.items()
            if pid in self._base and (held[0] > self._base[pid][0] + 4 or held[1] > self._base[pid][1] + 4)
        }

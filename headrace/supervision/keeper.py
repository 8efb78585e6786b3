"""One child process that is to run until told otherwise: started, restarted with backoff, stopped in good time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec

SETTINGS_VARIABLE = "HEADRACE_SETTINGS"
"""Carries a role's settings as JSON to a child of ours: exact, and not on its command line."""


@dataclass(frozen=True)
class Launch:
    """How to start a child."""

    command: tuple[str, ...]
    settings: Mapping[str, Any]
    fds: tuple[int, ...] = ()
    """Descriptors the child inherits under the same numbers."""
    handed_over: tuple[int, ...] = ()
    """Those of them that are closed on our side once the child has them."""
    environment: Mapping[str, str] = field(default_factory=dict)


def role_command(role: str) -> tuple[str, ...]:
    """The command line of a role of ours."""
    # -P: the folder one happens to stand in must not shadow our packages.
    return (sys.executable, "-P", "-m", "headrace", role)


class Backoff:
    """Seconds to wait before the next start: at once for a child that lived long, doubling for one that does not."""

    def __init__(self, first: float = 0.1, most: float = 2.0, long_life: float = 10.0) -> None:
        self._first, self._most, self._long_life = first, most, long_life
        self.failures = 0
        """Short lives in a row."""

    def after(self, lifetime: float) -> float:
        if lifetime >= self._long_life:
            self.failures = 0
        self.failures += 1
        return 0.0 if self.failures == 1 else min(self._most, self._first * 2.0 ** (self.failures - 2))


class Keeper:
    """Runs one child again and again. ``ended`` hears of every end that was not asked for."""

    def __init__(
        self,
        name: str,
        prepare: Callable[[], Awaitable[Launch]],
        ended: Callable[[Keeper, int], None],
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self.backoff = Backoff()
        self._prepare = prepare
        self._ended = ended
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.spawning = False
        """Between fork and the knowledge of a pid."""

    @property
    def pid(self) -> int | None:
        """The running child's, or None between two lives."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Keep the child until ``stop``; returns when it has ended for good."""
        clock = asyncio.get_running_loop().time
        while not self._stopping.is_set():
            launch = await self._prepared()
            if launch is None:
                return
            born = clock()
            self.spawning = True
            try:
                self._process = await self._spawn(launch)
            finally:
                self.spawning = False
            status = await self._process.wait()
            self._process = None
            if self._stopping.is_set():
                return
            delay = self.backoff.after(clock() - born)
            self._ended(self, status)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def stop(self, grace: float) -> None:
        """Ask the child to end, wait, and kill it after ``grace`` seconds."""
        self._stopping.set()
        if (process := self._process) is None:
            return
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), grace)
        except TimeoutError:
            self.kill()
            await process.wait()

    def signal(self, how: signal.Signals) -> None:
        """Signal the child if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(how)

    def kill(self) -> None:
        """End this life at once; the next begins unless stopping."""
        self.signal(signal.SIGKILL)

    async def _prepared(self) -> Launch | None:
        """What to start, or None when told to stop meanwhile."""
        preparing = asyncio.ensure_future(self._prepare())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({preparing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not self._stopping.is_set():
            return preparing.result()
        preparing.cancel()
        return None

    async def _spawn(self, launch: Launch) -> asyncio.subprocess.Process:
        settings = msgspec.json.encode(launch.settings).decode()
        try:
            return await asyncio.create_subprocess_exec(
                *launch.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),  # stdout is for what the command itself says
                env={**self._environment, **launch.environment, SETTINGS_VARIABLE: settings},
                pass_fds=launch.fds,
                process_group=0,  # Ctrl-C in the terminal reaches the supervisor alone, which ends the others in order
            )
        finally:
            for descriptor in launch.handed_over:
                os.close(descriptor)


def child_environment(flags: Set[str]) -> dict[str, str]:
    """This process's environment without the variables that are flags: children get settings instead."""
    return {key: value for key, value in os.environ.items() if key not in flags}

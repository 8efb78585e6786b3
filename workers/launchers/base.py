"""What every launcher does: start the ranks of one launch, tell of each one's end, end them.

A *launch* is one incarnation of a group. Deciding when to launch is ``groups.py``; how ranks come to be is
``local.py`` or ``ray_launcher.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.ids import GroupId, Incarnation
from workers.options import WorkerOptions


class LaunchError(RuntimeError):
    """Ranks could not be started; one line for people."""


@dataclass(frozen=True)
class Launch:
    """One incarnation of a group."""

    group: GroupId
    incarnation: Incarnation
    tp: int


@dataclass(frozen=True)
class RankEnded:
    """A rank is gone, for whatever reason. Told exactly once per rank that was started or adopted."""

    group: GroupId
    incarnation: Incarnation
    rank: int
    cause: str
    """One line, such as "rank 0 was killed by SIGKILL"."""
    status: int | None = None
    """Its exit status where one is known; see ``workers/rank.py``."""


@dataclass(frozen=True)
class LauncherFailed:
    """The launcher can no longer see its ranks: this process should end, and the next one take them over."""

    cause: str


Deliver = Callable[[RankEnded | LauncherFailed], None]
"""Called on a launcher's own threads; quick, and does not raise."""


class Launcher(Protocol):
    """How ranks come to be. Used from one thread; reports through ``Deliver``. Any method but ``close`` may raise
    LaunchError."""

    def adopt(self) -> Sequence[Launch]:
        """Launches of an earlier launcher process that still run; their ends will be told from now on."""

    def launch(self, ranks: Sequence[WorkerOptions]) -> None:
        """Start the ranks of one launch, rank 0 first; returns before they are ready. Raises LaunchError, with
        nothing left behind, when they cannot even be started."""

    def end(self, launch: Launch, grace: float) -> None:
        """End a launch: ask its ranks to finish and kill them after ``grace`` seconds, at once when it is 0.
        Idempotent; legal for a launch that is partly or wholly gone."""

    def close(self) -> None:
        """Let go of everything; ranks that still run go on."""

"""What a starting server still waits for, told by its children over the lease. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.lease import LeaseEvent, LeaseEventKind

FRONTEND, RANK = "frontend", "rank"


@dataclass
class Readiness:
    """Ready once every frontend is, and one group has registered."""

    frontends: frozenset[str]
    """Names of the frontends that must be ready."""
    _states: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    def observe(self, event: LeaseEvent) -> None:
        """Take every event of a lease server."""
        if event.kind is LeaseEventKind.GONE:
            self._states.pop((event.role, event.name), None)
        elif event.kind is LeaseEventKind.STATE:
            self._states[event.role, event.name] = event.details

    @property
    def ready_frontends(self) -> int:
        return sum(self._state(FRONTEND, name) == "ready" for name in self.frontends)

    @property
    def ready_ranks(self) -> int:
        return sum(role == RANK and details["state"] == "ready" for (role, _), details in self._states.items())

    @property
    def ready(self) -> bool:
        return self.ready_frontends == len(self.frontends) and self.ready_ranks > 0

    def waiting_for(self) -> str:
        """One phrase for the progress line: the slowest thing that is known."""
        if self.ready_ranks:
            return f"{self.ready_frontends} of {len(self.frontends)} frontends are ready"
        ranks = [details for (role, _), details in self._states.items() if role == RANK]
        if ranks:
            return _phrase(max(ranks, key=lambda details: _fraction(details)))
        if self._state("ray-head", "ray-head") == "starting":
            return "starting Ray"
        return "starting"

    def _state(self, role: str, name: str) -> str:
        return str(self._states.get((role, name), {}).get("state", ""))


def _fraction(details: dict[str, Any]) -> float:
    fraction = details.get("fraction", 0.0)
    return float(fraction) if isinstance(fraction, (int, float)) else 0.0


def _phrase(details: dict[str, Any]) -> str:
    stage = str(details.get("stage") or details["state"])[:60]
    return f"{stage} {_fraction(details):.0%}" if _fraction(details) else stage

"""Which requests' time is up: of the whole request, or of its waiting. Pure; the earliest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from scheduler.requests import Request

SPARE = 1024
"""Entries of finished requests are kept up to this many beyond twice the live ones, then swept."""


class Deadlines:
    """Times, and the requests to look at when they come; one that has finished by then is passed over."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, tuple[int, int], Request]] = []
        self._sweep_at = SPARE

    def __len__(self) -> int:
        return len(self._entries)

    def watch(self, request: Request, *times: float) -> None:
        """Look at a request at these times."""
        if len(self._entries) > self._sweep_at:
            self._entries = [entry for entry in self._entries if not entry[2].finished]
            heapq.heapify(self._entries)
            self._sweep_at = 2 * len(self._entries) + SPARE
        for nth, time in enumerate(times):
            heapq.heappush(self._entries, (time, (request.choices[0].arrival, nth), request))

    def next(self) -> float | None:
        """When the earliest time comes."""
        return self._entries[0][0] if self._entries else None

    def passed(self, now: float) -> Iterator[Request]:
        """Unfinished requests one of whose times has come."""
        while self._entries and self._entries[0][0] <= now:
            _, _, request = heapq.heappop(self._entries)
            if not request.finished:
                yield request

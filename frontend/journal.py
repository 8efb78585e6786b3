"""What became of the last requests in this process, for those who ask where the time went.

Times are monotonic seconds until they are told. Bounded: live requests, and the last ones that ended.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from frontend.answer.feed import Feed

MOST_KEPT = 1024
NEVER = -1.0


@dataclass(slots=True)
class Journey:
    """One request from its arrival to its end."""

    route: str
    began: float
    arrived: float = field(default_factory=time.time)
    """Wall clock."""
    id: str = ""
    """Of the answer, once there is one."""
    request_id: str = ""
    read: float = NEVER
    """Its body was read and checked."""
    prepared: float = NEVER
    """Scheduler and model were there; its prompts were rendered and tokenised."""
    submitted: float = NEVER
    first_token: float = NEVER
    first_written: float = NEVER
    """The first piece with text had left."""
    ended: float = NEVER
    outcome: str = ""
    """``answered``, ``client gone`` or the error's code; empty while it lives."""
    failure: str = ""
    """The error that a stream ended with."""
    feeds: list[Feed] = field(default_factory=list)
    """Its choices, while it lives."""
    rids: list[int] = field(default_factory=list)
    """Of its choices, when it has ended."""

    def end(self, outcome: str) -> None:
        """Its one end: the ids that were received are not kept."""
        self.ended, self.outcome = time.monotonic(), outcome
        self.rids = [feed.rid for feed in self.feeds]
        self.feeds = []

    def choices(self) -> list[int]:
        """The current request ids of its choices."""
        return self.rids or [feed.rid for feed in self.feeds]


class Journal:
    """Journeys by the answer's id, and by the request's."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Journey] = OrderedDict()
        self._count = 0

    def begin(self, route: str, began: float) -> Journey:
        """A request came. The oldest that has ended makes room."""
        self._count += 1
        journey = self._kept[self._count] = Journey(route, began)
        if len(self._kept) > MOST_KEPT:
            oldest = next((key for key, other in self._kept.items() if other.outcome), None)
            if oldest is not None:
                del self._kept[oldest]
        return journey

    def find(self, name: str) -> Journey | None:
        """The newest with this id, be it the answer's or the request's."""
        return next((one for one in reversed(self._kept.values()) if name in (one.id, one.request_id)), None)

    def __len__(self) -> int:
        return len(self._kept)

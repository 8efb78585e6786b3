"""One choice as the scheduler delivers it: the ids so far, and how it ended.

Knows nothing of text, of HTTP or of sockets. The ids are kept whole because a resume needs them; a slow reader
therefore costs four bytes a token and needs no queue.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from frontend.errors import ApiError
from protocol.frontend import Finish, Submit
from protocol.requests import Choice, Sampling

ID_BYTES = 4


@dataclass(frozen=True)
class Submission:
    """Everything of a Submit but its choices; kept for as long as one of them may have to be submitted again."""

    model: str
    tokens: bytes
    """The prompt's u32 ids."""
    max_tokens: int
    sampling: Sampling
    stop_ids: bytes
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens) // ID_BYTES

    def submit(self, choices: tuple[Choice, ...]) -> Submit:
        """The message that asks for these choices."""
        return Submit(
            choices,
            self.model,
            self.tokens,
            self.max_tokens,
            sampling=self.sampling,
            stop_ids=self.stop_ids,
            priority=self.priority,
        )


class Cancelled:
    """The frontend wanted no more of a choice."""


End = Finish | ApiError | Cancelled
"""How a choice ended: as the scheduler said, with an error, or because the frontend wanted no more."""


class Feed:
    """The receiving end of one choice. Used from the event loop's thread only, by one reader."""

    def __init__(self, submission: Submission, seed: int) -> None:
        self.submission = submission
        self.seed = seed
        self.ids = array("I")
        """All ids received, in order."""
        self.end: End | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache, as first told."""
        self.group = ""
        self.rid = 0
        """The current request id; kept by the client."""
        self.submissions = 0
        """How often it was submitted; kept by the client."""
        self.gaps = 0
        """How often ids of it were missing; kept by the client."""
        self.refused_since: float | None = None
        """Since when the scheduler has been refusing to take it up again; kept by the client."""
        self.read = 0
        """Ids the reader has taken; kept by the reader."""
        self.listener: Callable[[], None] | None = None
        """Called when something arrived, before a waiting reader runs; for streams that are matched on arrival."""
        self._waiter: asyncio.Future[None] | None = None

    def choice(self, rid: int) -> Choice:
        """This choice under a new request id, to go on after the last id received."""
        return Choice(rid, self.seed, resume=self.ids.tobytes())

    def accept(self, first: int, data: bytes) -> bool:
        """Take u32 ids whose first has index ``first``: overlap is dropped; False, and nothing taken, on a gap."""
        have = len(self.ids)
        if first > have:
            return False
        self.ids.frombytes(data[(have - first) * ID_BYTES :])
        return True

    def started(self, group: str, cached_tokens: int) -> None:
        """The choice was admitted; what was cached is kept from the first time."""
        self.group = group
        self.refused_since = None
        if self.cached_tokens is None:
            self.cached_tokens = cached_tokens

    def finish(self, end: End) -> None:
        """Set the end; the first one counts."""
        if self.end is None:
            self.end = end

    def notify(self) -> None:
        """Tell the reader that something arrived."""
        if self.listener is not None:
            self.listener()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return at the next arrival; at once when there is something that was not read, or the choice has ended."""
        if len(self.ids) > self.read or self.end is not None:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

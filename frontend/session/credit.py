"""What this frontend may still submit, as far as it knows: what it was granted, less what is on its way.

::

    granted at the last Load ─┬─ sent and not read by the scheduler then
                              ├─ being prepared: template, tokenizer
                              └─ left: the next request may come in

Between two Loads the account is optimistic. Whoever is refused here has cost nothing but the reading of a body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from frontend import errors
from protocol.frontend import Credit

RETRY_MS = 1_000
"""When to come back, while the scheduler has not said anything better."""


@dataclass(frozen=True)
class CreditStatistics:
    """Counters since start, and what is left now."""

    requests_left: int
    """Choices; below 0 when more was sent than was granted."""
    tokens_left: int
    preparing: int
    """Choices between their admission here and their Submit."""
    refused: int
    """Requests refused for want of credit."""


class CreditAccount:
    """The credit of one session after the other."""

    def __init__(self) -> None:
        self._granted = Credit(0, 0)
        self._sent_requests = self._sent_tokens = 0
        self._preparing = 0
        self._refused = 0

    def opened(self, credit: Credit) -> None:
        """A session opened: both sides count its Submits from 0."""
        self._granted = credit
        self._sent_requests = self._sent_tokens = 0

    def granted(self, credit: Credit) -> None:
        """The scheduler's newest word."""
        self._granted = credit

    def sent(self, choices: int, tokens: int) -> None:
        """A Submit left; ``tokens`` of its prompt."""
        self._sent_requests += choices
        self._sent_tokens += tokens

    @contextlib.contextmanager
    def reserved(self, choices: int, priority: int) -> Iterator[None]:
        """Hold credit for a request while it is prepared; its Submit follows at once.

        Without any left, only who displaces something less urgent comes in. Raises ApiError before anything was done.
        """
        left, tokens = self._left()
        if (left < 1 or tokens < 1) and priority >= self._granted.displaces:
            self._refused += 1
            raise errors.overloaded("The queue is full; try again later.", self._granted.retry_after_ms or RETRY_MS)
        self._preparing += choices
        try:
            yield
        finally:
            self._preparing -= choices

    def statistics(self) -> CreditStatistics:
        """A frozen view."""
        left, tokens = self._left()
        return CreditStatistics(left, tokens, self._preparing, self._refused)

    def _left(self) -> tuple[int, int]:
        """(choices, tokens)"""
        granted = self._granted
        on_the_way = self._sent_requests - granted.taken_requests
        tokens_on_the_way = self._sent_tokens - granted.taken_tokens
        return granted.requests - on_the_way - self._preparing, granted.tokens - tokens_on_the_way

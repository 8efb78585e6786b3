"""Who may still come in: the bounds of the queue, what gives way in a full one, and each frontend's credit.

Credit is how frontends refuse in time, before they spend work on a request. It is a promise on good faith: it counts
on what will have left the queue before the next Load, and while the queue is less than half full every frontend may
have all of it. From there on it is shared out by recent demand. What was promised twice is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.frontend import LOWEST_PRIORITY, Credit, RejectCode
from protocol.ids import SessionId
from scheduler.fleet import Fleet
from scheduler.intake import SubmitRefused
from scheduler.load import WHILE_CHANGING
from scheduler.queue import is_returning
from scheduler.requests import Request, Sequence, State
from scheduler.settings import CellSettings

MOST_DISPLACED = 64
"""Requests that one newcomer may displace."""

MOST_LOOKED_AT = 256
"""Waiting choices that are looked at for it."""

FORGETTING = 0.7
"""Per Load, what recent demand still counts."""


@dataclass
class Asked:
    """One frontend's Submits in this session."""

    choices: int = 0
    tokens: int = 0
    demand: float = 0.0
    """Choices it asked for lately."""


class Admission:
    """The door to the queues of all models."""

    def __init__(self, settings: CellSettings, fleet: Fleet) -> None:
        self.shed = 0
        """Choices that gave way to more urgent ones."""
        self._settings = settings
        self._fleet = fleet
        self._asked: dict[SessionId, Asked] = {}

    def joined(self, session: SessionId) -> None:
        """A frontend's session opened."""
        self._asked[session] = Asked()

    def left(self, session: SessionId) -> None:
        """A frontend's session ended."""
        self._asked.pop(session, None)

    def asked(self, session: SessionId, choices: int, tokens: int) -> None:
        """A Submit came, whatever becomes of it; ``tokens`` of its prompt, once."""
        asked = self._asked[session]
        asked.choices += choices
        asked.tokens += tokens
        asked.demand += choices

    def make_room(self, request: Request, now: float) -> list[Request]:
        """What gives way so that a request may wait. Raises SubmitRefused.

        The queue of fresh ones is bounded in choices and in tokens; an empty one takes any single Submit. Into a full
        one comes who is more urgent than the newest of the least urgent. A resume was accepted before and is never
        refused.
        """
        if any(is_returning(sequence) for sequence in request.choices) or self._fits(request):
            return []
        self._fleet.place_news(now)  # what came in this turn may not have to wait at all
        if self._fits(request):
            return []
        displaced = self._displaced_by(request)
        if displaced is None:
            waiting, tokens = self._fresh()
            raise SubmitRefused(
                RejectCode.OVERLOADED,
                f"{waiting} requests with {tokens} tokens are waiting",
                self._fleet.drain_rate.retry_after_ms(waiting, now),
            )
        return displaced

    def _fits(self, request: Request, choices_gone: int = 0, tokens_gone: int = 0) -> bool:
        waiting, tokens = self._fresh()
        waiting, tokens = waiting - choices_gone, tokens - tokens_gone
        return not waiting or (
            waiting + len(request.choices) <= self._settings.max_queue_requests
            and tokens + _tokens(request.choices) <= self._settings.max_queue_tokens
        )

    def _displaced_by(self, request: Request) -> list[Request] | None:
        """Whole requests, none of which has started, that are enough; None when there are not."""
        found: dict[Request, None] = {}
        choices = tokens = 0
        for sequence in self._displaceable(request.priority):
            victim = sequence.request
            if victim in found or not all(
                other.state is State.QUEUED and not is_returning(other) for other in victim.choices
            ):
                continue
            found[victim] = None
            choices, tokens = choices + len(victim.choices), tokens + _tokens(victim.choices)
            if self._fits(request, choices, tokens):
                return list(found)
            if len(found) >= MOST_DISPLACED:
                break
        return None

    def _displaceable(self, priority: int) -> Iterable[Sequence]:
        looked_at = 0
        for model in self._fleet.models.values():
            for sequence in model.queue.displaceable(priority):
                looked_at += 1
                if looked_at > MOST_LOOKED_AT:
                    return
                yield sequence

    def credit(self, session: SessionId | None, now: float) -> Credit:
        """What a frontend may still submit; ``None`` is the whole of it, for nobody in particular."""
        settings, (waiting, tokens) = self._settings, self._fresh()
        leaving = self._fleet.drain_rate.a_second(now) * WHILE_CHANGING
        requests_free = max(settings.max_queue_requests - waiting, 0) + min(leaving, waiting)
        tokens_free = max(settings.max_queue_tokens - tokens, 0) + min(leaving, waiting) * tokens / max(waiting, 1)
        share, asked = 1.0, Asked()
        if session is not None:
            asked = self._asked[session]
            crowded = 2 * waiting > settings.max_queue_requests or 2 * tokens > settings.max_queue_tokens
            share = self._share(asked) if crowded else 1.0
        return Credit(
            requests=math.ceil(requests_free * share),
            tokens=math.ceil(tokens_free * share),
            displaces=self._displaces(),
            retry_after_ms=self._fleet.drain_rate.retry_after_ms(waiting, now),
            taken_requests=asked.choices,
            taken_tokens=asked.tokens,
        )

    def _share(self, asked: Asked) -> float:
        """By recent demand; one that asked for nothing lately still gets the share of one choice."""
        return (asked.demand + 1) / sum(other.demand + 1 for other in self._asked.values())

    def _displaces(self) -> int:
        least = [model.queue.least_urgent() for model in self._fleet.models.values()]
        return max((priority for priority in least if priority is not None), default=LOWEST_PRIORITY)

    def forget_a_little(self) -> None:
        """A Load went out: demand is what came since, mostly."""
        for asked in self._asked.values():
            asked.demand *= FORGETTING

    def _fresh(self) -> tuple[int, int]:
        queues = [model.queue for model in self._fleet.models.values()]
        return sum(queue.fresh for queue in queues), sum(queue.fresh_tokens for queue in queues)

    def waiting(self) -> tuple[int, int]:
        """(choices, prefill tokens) in the queues, those that ran before included."""
        queues = [model.queue for model in self._fleet.models.values()]
        return sum(map(len, queues)), sum(queue.tokens for queue in queues)


def _tokens(sequences: list[Sequence]) -> int:
    return sum(sequence.length for sequence in sequences)

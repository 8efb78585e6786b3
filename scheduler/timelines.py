"""Where each request's time goes: one timeline a choice, while it lives and for the last ones that ended.

::

    QUEUED ──► PREFILL ──► DECODE ──► ended        preempted, failed or its group lost: QUEUED again
       from its Submit     from its first id

A cell that keeps them does the same as one that does not: it only looks on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from protocol.frontend import Phase, Span, Submit, Timeline
from protocol.ids import SessionId
from scheduler.requests import Sequence
from scheduler.results import Delivery

MOST_SPANS = 32
"""Of one timeline: what comes later is counted in its totals alone."""
MOST_ENDED = 4096
"""Timelines kept of choices that ended."""

Key = tuple[SessionId, int]


@dataclass(slots=True)
class Watched:
    """One choice's timeline, growing."""

    submitted: float
    prompt_tokens: int
    phase: Phase = Phase.QUEUED
    since: float = 0.0
    group: str = ""
    totals: dict[Phase, float] = field(default_factory=dict)
    spans: list[tuple[Phase, str, float, float]] = field(default_factory=list)
    """(phase, group, when, seconds)"""
    starts: int = 0
    preemptions: int = 0
    losses: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ended: str = ""
    """Why, once it has."""
    message: str = ""

    def enter(self, phase: Phase, group: str, now: float) -> None:
        """One phase ends and another begins."""
        lasted = max(now - self.since, 0.0)
        self.totals[self.phase] = self.totals.get(self.phase, 0.0) + lasted
        if len(self.spans) < MOST_SPANS:
            self.spans.append((self.phase, self.group, self.since, lasted))
        self.phase, self.group, self.since = phase, group, now

    def told(self, rid: int, now: float) -> Timeline:
        """As it travels, with the phase that it is in as if that ended now."""
        until = self.since if self.ended else now
        spans = [*self.spans, *([] if self.ended else [(self.phase, self.group, self.since, until - self.since)])]
        totals = dict(self.totals)
        if not self.ended:
            totals[self.phase] = totals.get(self.phase, 0.0) + until - self.since
        return Timeline(
            rid=rid,
            submitted_us_ago=_us(now - self.submitted),
            lasted_us=_us(until - self.submitted),
            phase=Phase.ENDED if self.ended else self.phase,
            queued_us=_us(totals.get(Phase.QUEUED, 0.0)),
            prefill_us=_us(totals.get(Phase.PREFILL, 0.0)),
            decode_us=_us(totals.get(Phase.DECODE, 0.0)),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            starts=self.starts,
            preemptions=self.preemptions,
            losses=self.losses,
            ended=self.ended,
            message=self.message,
            spans=tuple(
                Span(phase, group, _us(since - self.submitted), _us(lasted)) for phase, group, since, lasted in spans
            ),
        )


class Timelines:
    """All of them, by session and rid."""

    def __init__(self) -> None:
        self._live: dict[Key, Watched] = {}
        self._ended: OrderedDict[Key, Watched] = OrderedDict()
        self._prefilling: dict[str, dict[Key, Watched]] = {}
        """By group: those that wait for their next id."""

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def submitted(self, session: SessionId, submit: Submit, now: float) -> None:
        """A Submit came, whatever becomes of it."""
        for choice in submit.choices:
            self._live.setdefault((session, choice.rid), Watched(now, len(submit.tokens) // 4, since=now))

    def started(self, sequence: Sequence, group: str, now: float) -> None:
        """It holds a slot now."""
        watched = self._live.get(_key(sequence))
        if watched is not None:
            watched.enter(Phase.PREFILL, group, now)
            watched.starts += 1
            watched.cached_tokens = sequence.cached_tokens
            self._prefilling.setdefault(group, {})[_key(sequence)] = watched

    def delivered(self, group: str, delivery: Delivery, now: float) -> None:
        """Ids of a step go out: those that waited for their first one decode from now on."""
        waiting = self._prefilling.get(group)
        if not waiting:
            return
        rids = set(delivery.rid.tolist())
        for session, rid in [key for key in waiting if key[1] in rids]:
            if (delivery.session[delivery.rid == rid] == session).any():  # another frontend may use the same number
                waiting.pop((session, rid)).enter(Phase.DECODE, group, now)

    def requeued(self, sequence: Sequence, now: float, *, lost: bool) -> None:
        """It waits again: preempted, or its step or its group came to nothing."""
        watched = self._live.get(_key(sequence))
        if watched is not None:
            self._prefilling.get(watched.group, {}).pop(_key(sequence), None)
            watched.enter(Phase.QUEUED, "", now)
            watched.losses += lost
            watched.preemptions += not lost

    def finished(self, sequence: Sequence, reason: str, message: str, now: float) -> None:
        """Its one end."""
        self._end(_key(sequence), reason, message, len(sequence.output), now)

    def rejected(self, session: SessionId, rids: Iterable[int], reason: str, message: str, now: float) -> None:
        """They were not taken."""
        for rid in rids:
            self._end((session, rid), reason, message, 0, now)

    def left(self, session: SessionId) -> None:
        """A frontend is gone: nobody can ask for what was its."""
        for kept in (self._live, self._ended):
            for key in [key for key in kept if key[0] == session]:
                del kept[key]
        for waiting in self._prefilling.values():
            for key in [key for key in waiting if key[0] == session]:
                del waiting[key]

    def of(self, session: SessionId, rid: int, now: float) -> Timeline | None:
        """A choice's timeline, if it is still known."""
        key = (session, rid)
        watched = self._live.get(key) or self._ended.get(key)
        return None if watched is None else watched.told(rid, now)

    def _end(self, key: Key, reason: str, message: str, outputs: int, now: float) -> None:
        watched = self._live.pop(key, None)
        if watched is None:
            return
        self._prefilling.get(watched.group, {}).pop(key, None)
        watched.enter(Phase.ENDED, "", now)
        watched.ended, watched.message, watched.output_tokens = reason, message, outputs
        self._ended[key] = watched
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)


def _key(sequence: Sequence) -> Key:
    return sequence.request.session, sequence.rid


def _us(seconds: float) -> int:
    return int(max(seconds, 0.0) * 1e6)

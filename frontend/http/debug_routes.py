"""GET /debug/requests/{id}: where one request's time went, here and on the scheduler.

Each frontend knows its own requests; where several share a port, ask again until the one answers that answered then.
"""

from __future__ import annotations

import msgspec

from frontend.errors import ApiError
from frontend.journal import NEVER, Journey
from frontend.service import Frontend
from protocol.frontend import Timeline


class HereReport(msgspec.Struct):
    """This process's part. Milliseconds since the request came; null is not yet, or never."""

    received: float
    """Unix time."""
    read_ms: float | None
    """The body was read and checked."""
    prepared_ms: float | None
    """Scheduler and model were there; the prompts were rendered and tokenised."""
    submitted_ms: float | None
    first_token_ms: float | None
    first_written_ms: float | None
    """The first piece of a stream with text had left."""
    ended_ms: float | None
    outcome: str
    """``answered``, ``client gone`` or an error's code; empty while it lives."""


class SpanReport(msgspec.Struct):
    """A choice was in one phase: queued, prefill or decode. Milliseconds since its Submit."""

    phase: str
    group: str
    at_ms: float
    ms: float


class TimelineReport(msgspec.Struct):
    """The scheduler's part of one choice, since it was last submitted."""

    rid: int
    phase: str
    lasted_ms: float
    queued_ms: float
    prefill_ms: float
    decode_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    starts: int
    preemptions: int
    losses: int
    """Steps and groups that failed under it."""
    ended: str
    """Why, as the scheduler sees it; empty while it lives."""
    message: str
    spans: list[SpanReport]


class RequestReport(msgspec.Struct):
    """The answer of /debug/requests/{id}."""

    id: str
    request_id: str
    route: str
    frontend: str
    here: HereReport
    choices: list[TimelineReport | None]
    """By index; null when the scheduler does not know it any more."""


async def report(frontend: Frontend, name: str) -> RequestReport:
    """Everything known about a request. Raises ApiError."""
    journey = frontend.journal.find(name)
    if journey is None:
        here = f"this frontend, {frontend.settings.name}; another may have answered it (x-headrace-frontend)"
        raise ApiError(404, f"No request {name[:256]!r} is known to {here}.", code="request_not_found")
    rids = journey.choices()
    timelines = {timeline.rid: timeline for timeline in await frontend.client.inquire(rids)}
    return RequestReport(
        id=journey.id,
        request_id=journey.request_id,
        route=journey.route,
        frontend=frontend.settings.name,
        here=_here(journey),
        choices=[_told(timelines[rid]) if rid in timelines else None for rid in rids],
    )


def _here(journey: Journey) -> HereReport:
    def since(when: float) -> float | None:
        return None if when == NEVER else round(1000 * (when - journey.began), 3)

    return HereReport(
        received=journey.arrived,
        read_ms=since(journey.read),
        prepared_ms=since(journey.prepared),
        submitted_ms=since(journey.submitted),
        first_token_ms=since(journey.first_token),
        first_written_ms=since(journey.first_written),
        ended_ms=since(journey.ended),
        outcome=journey.outcome,
    )


def _told(timeline: Timeline) -> TimelineReport:
    return TimelineReport(
        rid=timeline.rid,
        phase=timeline.phase.name.lower(),
        lasted_ms=timeline.lasted_us / 1000,
        queued_ms=timeline.queued_us / 1000,
        prefill_ms=timeline.prefill_us / 1000,
        decode_ms=timeline.decode_us / 1000,
        prompt_tokens=timeline.prompt_tokens,
        cached_tokens=timeline.cached_tokens,
        output_tokens=timeline.output_tokens,
        starts=timeline.starts,
        preemptions=timeline.preemptions,
        losses=timeline.losses,
        ended=timeline.ended,
        message=timeline.message,
        spans=[
            SpanReport(span.phase.name.lower(), span.group, span.at_us / 1000, span.us / 1000)
            for span in timeline.spans
        ],
    )

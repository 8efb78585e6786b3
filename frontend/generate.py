"""The life of one request: read, check, wait for a model, tokenise, submit, answer in either transport.

Both transports read the same ``ChoiceStream``; the non-streaming answer is its fold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend import fields, shapes
from frontend.choice import ChoiceStream, Delta
from frontend.errors import ApiError
from frontend.exchange import JSON_HEADERS, STREAM_HEADERS, ClientGone, Exchange
from frontend.requests import CommonFields
from frontend.service import Frontend
from frontend.shapes import Answer, Ending, Usage, Whole

STALL_SECONDS = 0.25
"""A chunk that takes longer to leave has waited for its client."""


@dataclass(frozen=True)
class Route:
    """What differs between the routes."""

    request: type[CommonFields]
    answer: Callable[[str, int, str, str], Answer]
    id_prefix: str


@dataclass
class Timing:
    """Seconds of one answer, for the metrics."""

    began: float
    first: float = 0.0
    last: float = 0.0

    @classmethod
    def start(cls) -> Timing:
        return cls(time.perf_counter())


class Generation(Response):
    """The answer to one request; the work happens when it is sent, so that one scope owns it from start to end."""

    def __init__(self, frontend: Frontend, route: Route) -> None:
        super().__init__()
        self._frontend = frontend
        self._route = route
        self._timing = Timing.start()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            body = await exchange.json_body(self._frontend.settings.max_body_bytes)
            await exchange.while_connected(self._answer(exchange, body))
        except ClientGone:
            self._frontend.metrics.disconnects.inc()

    async def _answer(self, exchange: Exchange, body: bytes) -> None:
        frontend = self._frontend
        request, ignored = await frontend.read(body, self._route.request)
        prepared = await frontend.prepare(request)
        headers = _notes(ignored, prepared.notes)
        with frontend.open(prepared) as choice:
            answer = self._route.answer(
                f"{self._route.id_prefix}-{frontend.new_id()}", int(time.time()), frontend.name, prepared.fingerprint
            )
            await choice.first()
            self._timing.first = self._timing.last = time.perf_counter()
            frontend.metrics.ttft.observe(self._timing.first - self._timing.began)
            if request.stream:
                await exchange.start(200, {**STREAM_HEADERS, **headers})
                await self._stream(exchange, answer, choice, with_usage=request.wants_usage())
            else:
                whole = await self._fold(choice)
                done = answer.whole([whole], _usage(choice, whole.ending))
                await exchange.respond(200, {**JSON_HEADERS, **headers}, done)

    async def _fold(self, choice: ChoiceStream) -> Whole:
        parts: list[str] = []
        while True:
            delta = await choice.next()
            self._count(delta)
            parts.append(delta.text)
            if delta.ending is not None:
                return Whole("".join(parts), delta.ending)

    async def _stream(self, exchange: Exchange, answer: Answer, choice: ChoiceStream, *, with_usage: bool) -> None:
        """Send the events in the contract's order; an error from here on is an event too."""
        opening = answer.opening(0)
        chunk = answer.text_chunk(0)
        try:
            if opening:
                await exchange.send(opening)
            while True:
                delta = await choice.next()
                self._count(delta)
                if delta.ending is not None:
                    break
                await exchange.send(chunk.event(delta.text))
                if time.perf_counter() - self._timing.last > STALL_SECONDS:
                    self._frontend.metrics.stalls.inc()
        except ApiError as error:
            self._frontend.metrics.errors.labels(error.code or "none").inc()
            await exchange.send(shapes.event(error.body()) + shapes.DONE, more=False)
            return
        tail = answer.last(0, delta.text, delta.ending)
        if with_usage:
            tail += answer.usage(_usage(choice, delta.ending))
        await exchange.send(tail + shapes.DONE, more=False)

    def _count(self, delta: Delta) -> None:
        """Account for the tokens of a delta, and for the whole answer with the last one."""
        metrics, timing = self._frontend.metrics, self._timing
        now = time.perf_counter()
        if delta.tokens and timing.last != timing.first:
            metrics.gaps.observe(now - timing.last, delta.tokens)
        timing.last = now
        if delta.ending is None:
            return
        metrics.successes.labels(delta.ending.finish_reason).inc()
        metrics.e2e.observe(now - timing.began)
        if delta.ending.completion_tokens > 1:
            metrics.tpot.observe((now - timing.first) / (delta.ending.completion_tokens - 1))


def _notes(ignored: list[str], notes: Mapping[str, str]) -> dict[str, str]:
    return {"x-ignored-fields": fields.ignored_header(ignored), **notes} if ignored else dict(notes)


def _usage(choice: ChoiceStream, ending: Ending) -> Usage:
    return Usage.of(choice.prompt_tokens, ending.completion_tokens, choice.cached_tokens)

"""An answer on its way to the client: the fold of its deltas, or the events of a stream in the contract's order."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from msgspec import UNSET, UnsetType

from frontend.answer.answer_stream import AnswerStream
from frontend.answer.answers import DONE, PING, Answer, Asked, TextChunk, event
from frontend.answer.choice import Delta
from frontend.answer.shapes import Usage
from frontend.errors import ApiError
from frontend.http.exchange import Exchange
from frontend.journal import NEVER, Journey
from frontend.metrics import Metrics

STALL_SECONDS = 0.25
"""A chunk that takes longer to leave has waited for its client."""


@dataclass(frozen=True)
class StreamOptions:
    """How a stream is written. Seconds."""

    usage: bool = False
    """One last chunk has the usage."""
    continuous_usage: bool = False
    """Every chunk has it."""
    separate_finish: bool = False
    """A finish_reason always rides on an empty delta."""
    early_commit: float = 10.0
    """The status goes out after so long without a token."""
    ping_interval: float = 15.0
    """A comment goes out after so long without a chunk."""


class Timing:
    """What metrics and journal learn of one answer."""

    def __init__(self, metrics: Metrics, journey: Journey) -> None:
        self._metrics = metrics
        self._journey = journey
        self._began = time.perf_counter()
        self._first = 0.0
        self._last: dict[int, float] = {}

    def first_token(self) -> None:
        self._first = time.perf_counter()
        self._journey.first_token = time.monotonic()
        self._metrics.ttft.observe(self._first - self._began)

    def delta(self, index: int, delta: Delta) -> None:
        """Account for the tokens of a delta, and for the whole choice with its last one."""
        metrics = self._metrics
        now = time.perf_counter()
        last = self._last.get(index)
        if delta.tokens and last is not None:
            metrics.gaps.observe(now - last, delta.tokens)
        self._last[index] = now
        if delta.ending is None:
            return
        metrics.successes.labels(delta.ending.finish_reason).inc()
        metrics.e2e.observe(now - self._began)
        if delta.ending.completion_tokens > 1:
            metrics.tpot.observe((now - self._first) / (delta.ending.completion_tokens - 1))

    def sent(self, began: float) -> None:
        """A piece of the answer left that began to leave then."""
        if self._first and self._journey.first_written == NEVER:
            self._journey.first_written = time.monotonic()
        if time.perf_counter() - began > STALL_SECONDS:
            self._metrics.stalls.inc()

    def failed(self, error: ApiError) -> None:
        self._journey.failure = error.code or "error"
        self._metrics.errors.labels(error.code or "none").inc()


async def fold(stream: AnswerStream, answer: Answer, timing: Timing) -> bytes:
    """The body of a non-streaming answer. Raises ApiError."""
    await stream.first()
    timing.first_token()
    deltas: list[list[Delta]] = [[] for _ in range(len(stream))]
    while not stream.ended:
        for index, delta in await stream.next():
            timing.delta(index, delta)
            deltas[index].append(delta)
    folds = []
    for index, parts in enumerate(deltas):
        made = answer.begin(asked(stream, index))
        for delta in parts:
            answer.add(made, delta)
        folds.append(made)
    return answer.whole(folds, stream.usage())


def asked(stream: AnswerStream, index: int) -> Asked:
    """The prompt of a choice."""
    return Asked(stream.prompt(index), stream.choice(index).feed.scores)


class StreamDelivery:
    """Writes one stream. Errors raise ApiError up to the commit and are an event after it."""

    def __init__(
        self,
        exchange: Exchange,
        stream: AnswerStream,
        answer: Answer,
        options: StreamOptions,
        timing: Timing,
        headers: dict[str, str],
    ) -> None:
        self._exchange = exchange
        self._stream = stream
        self._answer = answer
        self._options = options
        self._timing = timing
        self._headers = headers
        self._plain = not (answer.details.of_tokens or options.continuous_usage)
        self._chunks: dict[int, TextChunk] = {}
        """Choices whose next chunk has nothing but text, unless it is the last one."""
        self._opened: set[int] = set()
        self._fresh: set[int] = set()
        """Opened choices whose first chunk, still to come, tells about the prompt."""

    async def run(self) -> None:
        """Send everything from the status to ``[DONE]``."""
        stream, options = self._stream, self._options
        begun = await stream.first(options.early_commit)
        if begun:
            self._timing.first_token()
        await self._exchange.start(200, self._headers)
        try:
            await self._send(self._openings())
            if not begun:
                await self._until_first()
            while not stream.ended:
                deltas = await stream.next(options.ping_interval)
                await self._send(b"".join([self._events(*one) for one in deltas]) if deltas else PING)
        except ApiError as error:
            self._timing.failed(error)
            await self._exchange.send(event(error.body()) + DONE, more=False)
            return
        tail = self._answer.usage(stream.usage()) if options.usage else b""
        await self._exchange.send(tail + DONE, more=False)

    async def _until_first(self) -> None:
        while not await self._stream.first(self._options.ping_interval):
            await self._send(PING)
        self._timing.first_token()

    async def _send(self, events: bytes) -> None:
        if events:
            began = time.perf_counter()
            await self._exchange.send(events)
            self._timing.sent(began)

    def _usage(self) -> Usage | UnsetType:
        return self._stream.usage() if self._options.continuous_usage else UNSET

    def _openings(self) -> bytes:
        """What opens the choices that can be opened and are not yet, in index order.

        A choice whose prompt is told with logprobs is opened when these are there.
        """
        return b"".join(self._opening(index) for index in range(len(self._stream)) if self._can_open(index))

    def _can_open(self, index: int) -> bool:
        scores = self._stream.choice(index).feed.scores
        return index not in self._opened and (scores is None or scores.complete)

    def _opening(self, index: int) -> bytes:
        self._opened.add(index)
        pieces = self._answer.opening(index, asked(self._stream, index), self._usage())
        if not pieces and self._answer.details.of_prompt:
            self._fresh.add(index)
        elif self._plain:
            self._chunks[index] = self._answer.text_chunk(index)
        return b"".join(pieces)

    def _events(self, index: int, delta: Delta) -> bytes:
        """The events of one delta."""
        self._timing.delta(index, delta)
        events = b"" if index in self._opened else self._openings()
        if delta.ending is not None and delta.text and self._options.separate_finish:
            events += self._event(index, replace(delta, ending=None))
            delta = Delta("", 0, delta.ending)
        return events + self._event(index, delta)

    def _event(self, index: int, delta: Delta) -> bytes:
        if delta.ending is None and index in self._chunks:
            return self._chunks[index].event(delta.text)
        told = None
        if index in self._fresh:
            self._fresh.discard(index)
            told = asked(self._stream, index)
            if self._plain:
                self._chunks[index] = self._answer.text_chunk(index)
        return self._answer.chunk(index, delta, asked=told, usage=self._usage())

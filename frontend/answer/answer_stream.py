"""All choices of one answer as one stream of deltas: what arrives first comes first, and they fail as one.

Choices stand in the order of their indexes: prompt · n + i. Knows nothing of HTTP or of the objects on the wire.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from types import TracebackType

from frontend import errors
from frontend.answer.choice import ChoiceStream, Delta
from frontend.answer.feed import Feed
from frontend.answer.shapes import Usage
from frontend.errors import ApiError
from frontend.request.prepare import Prepared
from frontend.request.prompts import Prompt, skips_special
from frontend.request.requests import CommonFields
from frontend.session.scheduler_client import SchedulerClient
from frontend.text.detokenizer import Detokenizer, TokenBytes


class AnswerStream:
    """Submits the prompts and reads their choices. A context manager: leaving it aborts what has not ended."""

    def __init__(self, client: SchedulerClient, prepared: Prepared, request: CommonFields, tokens: TokenBytes) -> None:
        self._client = client
        self._deadline = prepared.deadline
        self._prompts: list[Prompt] = []
        self._per_prompt = request.choices
        self._choices: list[ChoiceStream] = []
        tells_tokens = request.alternatives() >= 0 or bool(request.return_token_ids)
        for one in prepared.prompts:
            prompt = one.prompt
            self._prompts.append(prompt)
            for feed in client.submit(one.submission, one.seeds):
                detokenizer = Detokenizer(
                    tokens,
                    skip_special_tokens=skips_special(request),
                    continues_text=prepared.continues_text,
                    prompt_tail=prompt.tail,
                    echoed=prompt.echo is not None,
                )
                shown = len(prompt.echo or "")
                choice = ChoiceStream(
                    feed, one.rules, detokenizer, client.cancel, tells_tokens=tells_tokens, shown=shown
                )
                choice.listen(functools.partial(self._arrived, len(self._choices)))
                self._choices.append(choice)
        self._changed: set[int] = set()
        """Choices that may have something new."""
        self._news = False
        """Something arrived since the last look."""
        self._unscored = {at for at, choice in enumerate(self._choices) if choice.feed.scores is not None}
        """Choices that wait for the logprobs of their prompt."""
        self._running = len(self._choices)
        self._failure: ApiError | None = None
        self._first: list[tuple[int, Delta]] | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> AnswerStream:
        if self._deadline is not None:
            delay = max(0.0, self._deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._expire)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for feed in self.feeds:
            feed.listener = None
        self._client.cancel(*self.feeds)

    def __len__(self) -> int:
        return len(self._choices)

    @property
    def ended(self) -> bool:
        """Every choice's last delta was taken."""
        return self._running == 0 and not self._first

    @property
    def feeds(self) -> list[Feed]:
        """Every choice as the scheduler delivers it."""
        return [choice.feed for choice in self._choices]

    def prompt(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self._prompts[index // self._per_prompt]

    def choice(self, index: int) -> ChoiceStream:
        return self._choices[index]

    def usage(self) -> Usage:
        """Of the answer so far: every prompt counts once."""
        firsts = [choice.feed for choice in self._choices[:: self._per_prompt]]
        return Usage.of(
            sum(feed.submission.prompt_tokens for feed in firsts),
            sum(choice.completion_tokens for choice in self._choices),
            sum(feed.cached_tokens or 0 for feed in firsts),
        )

    async def first(self, seconds: float | None = None) -> bool:
        """Wait for the first token, or an end without one; False when it did not come within ``seconds``.

        Raises ApiError when nothing but an error came.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while not any(choice.has_token or choice.feed.end is not None for choice in self._choices):
            left = None if until is None else until - time.monotonic()
            if (left is not None and left <= 0) or not await self._arrival(left):
                return False
        self._first = self._take()
        return True

    async def next(self, seconds: float | None = None) -> Sequence[tuple[int, Delta]]:
        """New deltas, at least one unless ``seconds`` passed without any.

        Raises ApiError when a choice ended with an error: the answer is over.
        """
        if self._first:
            taken, self._first = self._first, None
            return taken
        until = None if seconds is None else time.monotonic() + seconds
        while not (taken := self._take()):
            left = None if until is None else until - time.monotonic()
            if (left is not None and left <= 0) or not await self._arrival(left):
                return []
        return taken

    def _take(self) -> list[tuple[int, Delta]]:
        """What there is now."""
        if self._failure is not None:
            raise self._failure
        self._news = False
        if any(self._choices[index].expired for index in self._changed):
            self._expire()
        changed = sorted(self._changed | self._unscored)
        self._changed.clear()
        taken: list[tuple[int, Delta]] = []
        for index in changed:
            try:
                self._take_one(index, taken)
            except ApiError as error:
                self._failure = error
                break
        if self._failure is not None and not taken:
            raise self._failure
        return taken

    def _take_one(self, index: int, taken: list[tuple[int, Delta]]) -> None:
        choice = self._choices[index]
        if index in self._unscored:
            if not self._is_scored(index):
                return
            self._unscored.discard(index)
        while (delta := choice.poll()) is not None:
            taken.append((index, delta))
            if delta.ending is not None:
                self._running -= 1
                choice.listen(lambda: None)
                return

    def _is_scored(self, index: int) -> bool:
        scores = self._choices[index].feed.scores
        assert scores is not None
        if scores.complete:
            return True
        start = index - index % self._per_prompt
        siblings = self._choices[start : start + self._per_prompt]
        if all(choice.feed.end is not None for choice in siblings):
            self._choices[index].poll()  # an error of its own comes first
            raise errors.engine_error("The engine gave no logprobs for some prompt tokens.")
        return False

    def _expire(self) -> None:
        has_tokens = any(choice.has_token for choice in self._choices)
        for choice in self._choices:
            choice.expire(has_tokens=has_tokens)

    def _arrived(self, index: int) -> None:
        self._changed.add(index)
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    async def _arrival(self, seconds: float | None) -> bool:
        """Return True at the next arrival, False after ``seconds`` without one."""
        if self._news:
            self._news = False
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        timer = None if seconds is None else loop.call_later(seconds, _too_late, waiter)
        try:
            return await waiter
        finally:
            self._news = False
            self._waiter = None
            if timer is not None:
                timer.cancel()


def _too_late(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)

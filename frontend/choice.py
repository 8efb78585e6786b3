"""One choice as its client gets it: ids in, text and an ending out. Both transports read this and nothing else.

What ends an output is decided here from the ids received, whatever the scheduler's own view: with ``k`` the least
number of tokens at which a rule holds, tokens beyond ``k`` are dropped, and at equal ``k`` a stop string beats the
length. So the answer does not depend on how the engine's steps cut the ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from frontend import errors
from frontend.errors import ApiError
from frontend.feed import Cancelled, Feed
from frontend.generation import StopRules
from frontend.shapes import Ending
from frontend.text.detokenizer import Detokenizer
from frontend.text.stops import StopMatcher
from protocol.frontend import Finish, FinishReason


@dataclass(frozen=True)
class Delta:
    """New text, the number of tokens that came with it, and the ending when this is the last one."""

    text: str
    tokens: int
    ending: Ending | None


class ChoiceStream:
    """Reads one feed. A context manager: leaving it aborts a choice that has not ended."""

    def __init__(self, feed: Feed, rules: StopRules, detokenizer: Detokenizer, cancel: Callable[[Feed], None]) -> None:
        self._feed = feed
        self._rules = rules
        self._stop_ids = rules.ids
        self._detokenizer = detokenizer
        self._cancel = cancel
        self._matcher = StopMatcher(rules.strings) if rules.strings else None
        self._parts: list[str] = []
        self._tokens = 0
        self._ending: Ending | None = None
        self._error: ApiError | None = None
        if self._matcher is not None:
            # Matched on arrival, so that a slow reader does not keep a finished choice running.
            feed.listener = self._advance

    def __enter__(self) -> ChoiceStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._feed.listener = None
        self._cancel(self._feed)

    @property
    def prompt_tokens(self) -> int:
        return self._feed.submission.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self._feed.cached_tokens or 0

    async def first(self) -> None:
        """Return at the first token, or an end without one. Raises ApiError when that end is an error."""
        while not self._feed.ids and self._feed.end is None:
            await self._feed.wait()
        self._advance()
        if self._error is not None and not self._parts:
            raise self._error

    async def next(self) -> Delta:
        """The next delta with text, or the last one. Raises ApiError when the choice ends with an error."""
        while True:
            self._advance()
            if self._parts or self._ending is not None:
                delta = Delta("".join(self._parts), self._tokens, self._ending)
                self._parts.clear()
                self._tokens = 0
                return delta
            if self._error is not None:
                raise self._error
            await self._feed.wait()

    def _advance(self) -> None:
        """Take what arrived since the last time."""
        if self._ending is not None or self._error is not None:
            return
        feed = self._feed
        start = feed.read
        new = feed.ids[start : self._rules.max_tokens]
        feed.read = len(feed.ids)
        if new:
            self._tokens += len(new)
            self._take(start, new)
        if self._ending is None and feed.end is not None:
            self._ended_by(feed.end)
        if self._ending is not None:
            feed.read = len(feed.ids)
            self._cancel(feed)

    def _take(self, start: int, new: Sequence[int]) -> None:
        """Append the text of new ids, the first of which has index ``start``; set the ending where a rule holds."""
        stop_at = self._first_stop_id(start, new)
        visible = new if stop_at is None else new[:stop_at]
        if self._matcher is None:
            self._add(self._detokenizer.push(visible))
        else:
            for count, token in enumerate(visible, start + 1):
                if self._matched(self._matcher, token, count):
                    return
        if stop_at is not None:
            token = new[stop_at]
            self._end("stop", token if token in self._rules.client_ids else None, start + stop_at + 1)
        elif start + len(new) >= self._rules.max_tokens:
            self._end("length", None, self._rules.max_tokens)

    def _first_stop_id(self, start: int, new: Sequence[int]) -> int | None:
        if self._stop_ids.isdisjoint(new):
            return None
        for at, token in enumerate(new):
            if token in self._stop_ids and start + at >= self._rules.min_tokens:
                return at
        return None

    def _matched(self, matcher: StopMatcher, token: int, count: int) -> bool:
        """Add one token's text as far as it cannot begin a stop string; True when it completes one."""
        text = self._detokenizer.push((token,))
        self._add(matcher.push(text, armed=count >= self._rules.min_tokens))
        if matcher.matched is None:
            return False
        self._ending = Ending("stop", matcher.matched, count)
        return True

    def _end(self, finish_reason: str, stop_reason: str | int | None, count: int) -> None:
        """Set the ending; text that was held back is due now."""
        self._ending = Ending(finish_reason, stop_reason, count)
        text = self._detokenizer.flush()
        self._add(text if self._matcher is None else self._matcher.flush(text))

    def _ended_by(self, end: Finish | ApiError | Cancelled) -> None:
        """The scheduler ended the choice, and no rule of ours did."""
        count = len(self._feed.ids)
        if isinstance(end, ApiError):
            self._error = end
        elif isinstance(end, Cancelled) or end.reason is FinishReason.ABORT:
            self._error = errors.unavailable("The server ended this request.")
        elif end.reason is FinishReason.ERROR:
            self._error = errors.engine_error(end.message or "The engine could not go on with this request.")
        elif end.reason is FinishReason.DEADLINE:
            if count:
                self._end("length", "timeout", count)
            else:
                self._error = errors.timed_out("The deadline passed before the first token.")
        elif end.reason is FinishReason.LENGTH:
            self._end("length", None, count)
        else:
            self._end("stop", end.stop_id if end.stop_id in self._rules.client_ids else None, count)

    def _add(self, text: str) -> None:
        if text:
            self._parts.append(text)

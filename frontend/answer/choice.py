"""One choice as its client gets it: ids in, text and an ending out. Both transports read this and nothing else.

What ends an output is decided here from the ids received, whatever the scheduler's own view: with ``k`` the least
number of tokens at which a rule holds, tokens beyond ``k`` are dropped, and at equal ``k`` a stop string beats the
length. So the answer does not depend on how the engine's steps cut the ids.

Tokens that are told one by one (logprobs, token ids) go out with the text they belong to: a token whose text is held
back is held back too, so that the tokens of a stop string can be left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from frontend import errors
from frontend.answer.feed import Cancelled, Feed
from frontend.answer.scores import Records, Scored
from frontend.answer.shapes import Ending
from frontend.errors import ApiError
from frontend.request.generation import StopRules
from frontend.text.detokenizer import Detokenizer
from frontend.text.stops import StopMatcher
from protocol.frontend import Finish, FinishReason
from protocol.packing import PackingError

_NO_ENTRY = -1


@dataclass(frozen=True)
class Delta:
    """New text, the number of tokens that arrived with it, and the ending when this is the last one."""

    text: str
    tokens: int
    ending: Ending | None
    ids: Sequence[int] = ()
    """Tokens that go out with the text, when they are told one by one."""
    scored: Sequence[Scored] = ()
    """Those of them that have a logprob entry."""
    records: Records | None = None
    """The records of ``scored``, when asked for."""


@dataclass
class _Told:
    """A token on its way out."""

    scored: Scored
    end: int
    """Characters of text, held back ones included, with which it is complete; _NO_ENTRY for a stop id not shown."""


class ChoiceStream:
    """Reads one feed. ``shown`` is the text that the client has already: an echoed prompt."""

    def __init__(
        self,
        feed: Feed,
        rules: StopRules,
        detokenizer: Detokenizer,
        cancel: Callable[[Feed], None],
        *,
        tells_tokens: bool = False,
        shown: int = 0,
    ) -> None:
        self._feed = feed
        self._rules = rules
        self._stop_ids = rules.ids
        self._detokenizer = detokenizer
        self._cancel = cancel
        self._matcher = StopMatcher(rules.strings, include_stop=rules.show_stop) if rules.strings else None
        self._parts: list[str] = []
        self._tokens = 0
        self._ending: Ending | None = None
        self._error: ApiError | None = None
        self._told: deque[_Told] | None = deque() if tells_tokens else None
        self._told_count = 0
        """Tokens that went out."""
        self._made = self._shown = shown
        """Characters made so far, held back ones included, and of them those that may go out."""
        self._arrived: Callable[[], None] = lambda: None
        feed.listener = self._on_arrival

    @property
    def feed(self) -> Feed:
        return self._feed

    @property
    def ended(self) -> bool:
        """Nothing more comes after what was read."""
        return self._ending is not None or self._error is not None

    @property
    def has_token(self) -> bool:
        return len(self._feed.ids) > 0

    @property
    def completion_tokens(self) -> int:
        """Tokens counted so far."""
        return self._ending.completion_tokens if self._ending is not None else self._feed.read

    def listen(self, arrived: Callable[[], None]) -> None:
        """Call ``arrived`` whenever there may be something new."""
        self._arrived = arrived

    def poll(self) -> Delta | None:
        """The next delta with text, or the last one; None when there is nothing yet.

        Raises ApiError when the choice ended with an error, once the text before it was read.
        """
        self._advance()
        if self._parts or self._ending is not None:
            return self._delta()
        if self._error is not None:
            raise self._error
        return None

    def expire(self, *, has_tokens: bool) -> None:
        """The deadline passed: a normal end, or an error when the answer has no token yet."""
        self._advance()
        if self.ended:
            return
        if has_tokens:
            self._end("length", "timeout", min(len(self._feed.ids), self._rules.max_tokens))
        else:
            self._error = errors.timed_out("The deadline passed before the first token.")
        self._cancel(self._feed)
        self._arrived()

    @property
    def expired(self) -> bool:
        """The scheduler ended the choice because of its deadline, and no rule of ours did."""
        end = self._feed.end
        return not self.ended and isinstance(end, Finish) and end.reason is FinishReason.DEADLINE

    def _on_arrival(self) -> None:
        if self._matcher is not None:
            # Matched on arrival, so that a slow reader does not keep a finished choice running.
            self._advance()
        self._arrived()

    def _advance(self) -> None:
        """Take what arrived since the last time."""
        if self.ended:
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
            self._cancel(feed)

    def _take(self, start: int, new: Sequence[int]) -> None:
        """Append the text of new ids, the first of which has index ``start``; set the ending where a rule holds."""
        stop_at = self._first_stop_id(start, new)
        visible = new if stop_at is None else new[:stop_at]
        if self._matcher is None and self._told is None:
            self._add(self._detokenizer.push(visible))
        else:
            for count, token in enumerate(visible, start + 1):
                if self._take_one(token, count):
                    return
        if stop_at is not None:
            token = new[stop_at]
            named = token in self._rules.client_ids
            self._end("stop", token if named else None, start + stop_at + 1, self._stop_text(token, named))
        elif start + len(new) >= self._rules.max_tokens:
            self._end("length", None, self._rules.max_tokens)

    def _first_stop_id(self, start: int, new: Sequence[int]) -> int | None:
        if self._stop_ids.isdisjoint(new):
            return None
        for at, token in enumerate(new):
            if token in self._stop_ids and start + at >= self._rules.min_tokens:
                return at
        return None

    def _take_one(self, token: int, count: int) -> bool:
        """Add one token's text as far as it cannot begin a stop string; True when it completes one."""
        if self._told is not None:
            self._told.append(_Told(Scored(token, self._made, self._detokenizer.leading_spaces), 0))
        text = self._detokenizer.push((token,))
        self._made += len(text)
        if self._told is not None:
            self._told[-1].end = self._made + self._detokenizer.pending
        if self._matcher is None:
            self._add(text)
            return False
        self._add(self._matcher.push(text, armed=count >= self._rules.min_tokens))
        if self._matcher.matched is None:
            return False
        self._ending = Ending("stop", self._matcher.matched, count)
        return True

    def _stop_text(self, token: int, named: bool) -> str:
        """The text of a stop id: shown only when asked for, and a special one only when the client named it."""
        text = ""
        if self._rules.show_stop:
            text = self._detokenizer.spell(token) if named else self._detokenizer.push((token,))
        if self._told is not None:
            self._told.append(_Told(Scored(token, self._made, special_too=named), self._made if text else _NO_ENTRY))
        return text

    def _end(self, finish_reason: str, stop_reason: str | int | None, count: int, tail: str = "") -> None:
        """Set the ending; text that was held back is due now, and after it ``tail``, the text of a stop id."""
        self._ending = Ending(finish_reason, stop_reason, count)
        text = tail + self._detokenizer.flush()
        if self._matcher is None or tail:
            # What stopped the output is not searched for another stop.
            self._add("" if self._matcher is None else self._matcher.flush())
            self._add(text)
            return
        self._add(self._matcher.flush(text))
        if self._matcher.matched is not None:
            self._ending = Ending("stop", self._matcher.matched, count)

    def _ended_by(self, end: Finish | ApiError | Cancelled) -> None:
        """The scheduler ended the choice, and no rule of ours did."""
        count = len(self._feed.ids)
        if isinstance(end, ApiError):
            self._error = end
        elif isinstance(end, Cancelled) or end.reason is FinishReason.ABORT:
            self._error = errors.unavailable("The server ended this request.")
        elif end.reason is FinishReason.ERROR:
            self._error = errors.engine_error(end.message or "The engine could not go on with this request.")
        elif end.reason is FinishReason.NO_TOKEN:
            self._error = errors.nothing_allowed()
        elif end.reason is FinishReason.DEADLINE:
            pass  # whether that is an end or an error depends on the answer's other choices: see ``expire``
        elif end.reason is FinishReason.LENGTH:
            self._end("length", None, count)
        else:
            self._end("stop", end.stop_id if end.stop_id in self._rules.client_ids else None, count)

    def _add(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._shown += len(text)

    def _delta(self) -> Delta:
        text = "".join(self._parts)
        tokens, self._tokens = self._tokens, 0
        self._parts.clear()
        if self._told is None:
            return Delta(text, tokens, self._ending)
        ids, scored = self._going_out(self._told)
        first, self._told_count = self._told_count, self._told_count + len(ids)
        return Delta(text, tokens, self._ending, ids, scored, self._records(first, len(scored)))

    def _going_out(self, told: deque[_Told]) -> tuple[list[int], list[Scored]]:
        """The tokens whose text is out; with the ending all, of which those of a stop string and a stop id not shown
        have no entry."""
        ids: list[int] = []
        scored: list[Scored] = []
        cut = self._matcher is not None and self._matcher.matched is not None and not self._rules.show_stop
        while told and (self._ending is not None or told[0].end <= self._shown):
            one = told.popleft()
            ids.append(one.scored.token)
            if one.end != _NO_ENTRY and not (cut and one.end > self._shown):
                scored.append(one.scored)
        return ids, scored

    def _records(self, first: int, count: int) -> Records | None:
        if not self._feed.submission.record_size:
            return None
        try:
            return self._feed.record(first, count)
        except PackingError as error:
            raise errors.engine_error("The engine gave no logprobs for some tokens.") from error

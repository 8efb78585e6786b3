"""The frontend's side of its session with the scheduler: what is open, what is available, and coming back after a loss.

Every open choice is in one table under its current request id. A lost session costs nothing but time: when the next
one opens, each choice is submitted again under a fresh id, to go on after the last id received. Runs in the event
loop; ``PeerLink`` has the I/O thread. Knows nothing of text or HTTP, except which error a rejected request becomes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from frontend import errors
from frontend.answer.feed import ID_BYTES, Cancelled, Feed, PromptScores, Submission
from frontend.session.credit import CreditAccount, CreditStatistics
from frontend.session.open_choices import ContradictoryFrame, OpenChoices
from frontend.session.rejections import error_of
from protocol import codec
from protocol.frontend import (
    Abort,
    Drain,
    Frame,
    Frames,
    Hello,
    Inquire,
    Load,
    ModelDown,
    ModelInfo,
    ModelUp,
    Reject,
    RejectCode,
    Timeline,
    Told,
    Welcome,
)
from protocol.ids import random_u64
from protocol.keys import ConnectorSecurity
from protocol.link import Closed, LinkEvent, LinkStatistics, LinkTimes, Opened, PeerLink, Received, Refused
from protocol.versions import NEWEST, OLDEST

log = logging.getLogger("headrace.frontend")

_PASSING = frozenset({RejectCode.OVERLOADED, RejectCode.UNAVAILABLE, RejectCode.DRAINING, RejectCode.UNKNOWN_MODEL})
"""Rejections that a choice already under way waits out: its client was promised a pause, not an error."""

_SHORTEST_RETRY = 0.1
_MAX_GAPS = 8
"""Gaps of one choice after which the scheduler is taken to be wrong, not unlucky."""
_ABORTS_PER_FRAME = 10_000
_INQUIRY_SECONDS = 2.0


@dataclass(frozen=True)
class ClientOptions:
    """What a client serves and how patient it is. Seconds."""

    address: str
    model: str
    """The one model this frontend has the tokenizer of, by its name on the wire."""
    tokenizer_digest: bytes
    security: Callable[[], ConnectorSecurity]
    grace: float = 30.0
    """How long requests wait for a scheduler and a model."""
    times: LinkTimes = field(default_factory=LinkTimes)


@dataclass(frozen=True)
class ClientStatistics:
    """Counters since start, and the state now."""

    link: LinkStatistics
    open_choices: int
    resubmitted: dict[str, int]
    """By cause: session, gap, rejected."""
    frames_malformed: int
    unread_bytes: int
    credit: CreditStatistics


class SchedulerClient:
    """Open choices, and the scheduler's word on models, load and credit."""

    def __init__(
        self,
        options: ClientOptions,
        *,
        progress: Callable[[], int],
        on_first_session: Callable[[], None] = lambda: None,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._options = options
        self._progress = progress
        self._on_first_session = on_first_session
        self._on_refused = on_refused
        self.instance = random_u64()
        self.model: ModelInfo | None = None
        """The served model as registered in this session or, until it is there again, in the one before."""
        self.load: Load | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: PeerLink | None = None
        self._session = 0
        self._ever = False
        self._registered = False
        self.draining = False
        """The scheduler takes nothing new."""
        self._digest_refusal = ""
        self.credit = CreditAccount()
        self._open = OpenChoices()
        self._changed = asyncio.Event()
        self._absent_since = 0.0
        self._unserved_since = 0.0
        """Since when there may be no ready group, within a session."""
        self._giving_up: asyncio.TimerHandle | None = None
        self._resubmitted: Counter[str] = Counter()
        self._malformed = 0
        self._inquiries: dict[int, asyncio.Future[tuple[Timeline, ...]]] = {}

    # Life

    def start(self) -> None:
        """Connect; call inside the event loop. Raises AddressError for an address that cannot be used."""
        self._loop = asyncio.get_running_loop()
        self._absent_since = self._loop.time()
        self._link = PeerLink(
            self._options.address,
            security=self._options.security,
            decoder=codec.scheduler_to_frontend,
            greet=lambda nonce: Hello(nonce, self.instance, OLDEST, NEWEST),
            deliver=self._deliver,
            progress=self._progress,
            times=self._options.times,
        )
        self._link.start()

    async def close(self) -> None:
        """End the session; choices still open end with an error."""
        self.fail_all(errors.unavailable("This server is shutting down."))
        self._cancel_giving_up()
        if self._link is not None:
            await asyncio.to_thread(self._link.close)

    # State

    @property
    def status(self) -> str:
        """Of the model: loading, ready or unavailable."""
        if self.model is None:
            return "loading"
        return "ready" if self._registered and self.model.ready_groups and not self._digest_refusal else "unavailable"

    def not_ready_because(self) -> str:
        """Why this frontend should get no new requests; empty when it should."""
        assert self._loop is not None
        if self._digest_refusal:
            return self._digest_refusal
        if not self._ever:
            return "no session with the scheduler yet"
        away = self._loop.time() - (self._unserved_since if self._session else self._absent_since)
        if self.status == "ready" or away < self._options.grace:
            return ""
        what = "no group of workers has been ready" if self._session else "the scheduler has been away"
        return f"{what} for {away:.0f} s"

    def statistics(self) -> ClientStatistics:
        """A frozen view of counters and state."""
        assert self._link is not None
        return ClientStatistics(
            link=self._link.statistics(),
            open_choices=len(self._open),
            resubmitted=dict(self._resubmitted),
            frames_malformed=self._malformed,
            unread_bytes=sum(len(feed.ids) - feed.read for feed in self._open.all()) * ID_BYTES,
            credit=self.credit.statistics(),
        )

    def open_feeds(self) -> list[Feed]:
        """The choices now open."""
        return self._open.all()

    async def available(self) -> ModelInfo:
        """The model, once scheduler and model are there; waits within the grace. Raises ApiError."""
        assert self._loop is not None
        until = self._loop.time() + self._options.grace
        while True:
            if self._digest_refusal:
                raise errors.unavailable(self._digest_refusal)
            # A scheduler that drains is about to be replaced: what comes now waits for its successor.
            if self._session and self._registered and not self.draining:
                assert self.model is not None
                return self.model
            limit = until if self._session else min(until, self._absent_since + self._options.grace)
            changed = self._changed
            try:
                async with asyncio.timeout_at(limit):
                    await changed.wait()
            except TimeoutError:
                what = "The model is still loading" if self._session else "The scheduler is away"
                if self.draining:
                    what = "The scheduler is shutting down"
                raise errors.unavailable(f"{what}; try again later.") from None

    # Choices

    def submit(self, submission: Submission, seeds: Sequence[int]) -> list[Feed]:
        """Open one choice per seed, admitted or rejected as one."""
        alternatives = submission.sampling.prompt_logprobs
        scores = PromptScores(submission.prompt_tokens, alternatives) if alternatives >= 0 else None
        feeds = [Feed(submission, seed, scores) for seed in seeds]
        rids = [self._open.enter(feed) for feed in feeds]
        if self._session and self._registered:
            self.credit.sent(len(feeds), submission.prompt_tokens)
            for feed in feeds:
                feed.submissions = 1
            self._send(submission.submit(tuple(feed.choice(rid) for feed, rid in zip(feeds, rids, strict=True))))
        else:
            self._give_up_later()
        return feeds

    def cancel(self, *feeds: Feed) -> None:
        """Want no more of these choices: abort those that have not ended."""
        running = [feed for feed in feeds if feed.end is None]
        if not running:
            return
        for feed in running:
            self._open.end(feed, Cancelled())
        self._send(Abort(tuple(feed.rid for feed in running)))
        for feed in running:
            feed.notify()

    def fail_all(self, error: errors.ApiError) -> None:
        """End every open choice with an error, and abort it."""
        feeds = self._open.all()
        for at in range(0, len(feeds), _ABORTS_PER_FRAME):
            self._send(Abort(tuple(feed.rid for feed in feeds[at : at + _ABORTS_PER_FRAME])))
        for feed in feeds:
            self._open.end(feed, error)
            feed.notify()

    async def inquire(self, rids: Sequence[int]) -> tuple[Timeline, ...]:
        """What the scheduler knows of these choices; nothing when it does not answer soon."""
        if not rids or not self._session:
            return ()
        nonce = random_u64()
        assert self._loop is not None
        told = self._inquiries[nonce] = self._loop.create_future()
        self._send(Inquire(nonce, tuple(rids)))
        try:
            return await asyncio.wait_for(told, _INQUIRY_SECONDS)
        except TimeoutError:
            return ()
        finally:
            del self._inquiries[nonce]

    def _resubmit(self, feed: Feed, cause: str) -> None:
        """Go on under a fresh id, as soon as there is somebody to ask."""
        rid = self._open.enter(feed)
        if self._session and self._registered:
            if feed.submissions:
                self._resubmitted[cause] += 1
            feed.submissions += 1
            self.credit.sent(1, feed.submission.prompt_tokens)
            score_prompt = feed.scores is not None and not feed.scores.complete
            self._send(feed.submission.submit((feed.choice(rid),), score_prompt=score_prompt))

    def _send(self, message: Any) -> None:
        # False means that the session is over: whatever is open is submitted again in the next one.
        if self._link is not None and self._session:
            self._link.send(message, self._session)

    # Events

    def _deliver(self, events: list[LinkEvent]) -> None:
        """On the link's thread: one hop into the loop for all events of a turn."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._handle, events)

    def _handle(self, events: list[LinkEvent]) -> None:
        touched: dict[Feed, None] = {}
        for event in events:
            if isinstance(event, Received):
                self._received(event.message, touched)
            elif isinstance(event, Opened):
                assert isinstance(event.welcome, Welcome)
                self._opened(event.session, event.welcome)
            elif isinstance(event, Closed):
                self._closed(event.reason)
            elif isinstance(event, Refused):
                self._on_refused(f"the scheduler refuses this frontend: {event.reason}")
        for feed in touched:
            feed.notify()

    def _opened(self, session: int, welcome: Welcome) -> None:
        self._session = session
        self._open.forget_dead()
        self.draining = False
        self.credit.opened(welcome.credit)
        self._registered = False
        assert self._loop is not None
        self._unserved_since = self._loop.time()
        if not self._ever:
            self._ever = True
            self._on_first_session()
        for model in welcome.models:
            self._model_up(model)
        if not self._registered:
            self._give_up_later()
        self._change()

    def _closed(self, reason: str) -> None:
        assert self._loop is not None
        log.warning("session with the scheduler lost: %s", reason)
        self._session = 0
        self._registered = False
        self._absent_since = self._loop.time()
        self._give_up_later()
        self._change()

    def _received(self, message: Any, touched: dict[Feed, None]) -> None:
        if isinstance(message, Frame):
            self._frame(message, touched)
        elif isinstance(message, Frames):
            for frame in message.frames:
                self._frame(frame, touched)
        elif isinstance(message, Load):
            self.load = message
            self.credit.granted(message.credit)
        elif isinstance(message, Reject):
            self._rejected(message, touched)
        elif isinstance(message, ModelUp):
            self._model_up(message.model)
            self._change()
        elif isinstance(message, ModelDown):
            if self.model is not None and message.name == self.model.name:
                assert self._loop is not None
                self._unserved_since = self._loop.time()
                self.model = msgspec.structs.replace(self.model, ready_groups=0)
        elif isinstance(message, Told):
            told = self._inquiries.get(message.nonce)
            if told is not None and not told.done():
                told.set_result(message.timelines)
        elif isinstance(message, Drain):
            self.draining = True
            self._change()

    def _model_up(self, model: ModelInfo) -> None:
        if model.name != self._options.model:
            return
        self.model = model
        ours = self._options.tokenizer_digest
        self._digest_refusal = ""
        if model.tokenizer_digest != ours:
            self._digest_refusal = (
                f"Model '{model.name}' is refused: its groups use tokenizer {model.tokenizer_digest.hex()} and this "
                f"frontend has {ours.hex()}."
            )
            log.error(self._digest_refusal)
            return
        if self._registered:
            return
        self._registered = True
        self._cancel_giving_up()
        for feed in self._open.all():
            self._resubmit(feed, "session")

    def _frame(self, frame: Frame, touched: dict[Feed, None]) -> None:
        try:
            applied = self._open.apply(frame)
        except ContradictoryFrame:
            self._malformed += 1
            return
        touched.update(dict.fromkeys(applied.touched))
        for feed in applied.gaps:
            self._send(Abort((feed.rid,)))
            feed.gaps += 1
            if feed.gaps <= _MAX_GAPS:
                self._resubmit(feed, "gap")
            else:
                self._open.end(feed, errors.engine_error("The scheduler keeps losing tokens of this request."))
                touched[feed] = None

    def _rejected(self, reject: Reject, touched: dict[Feed, None]) -> None:
        assert self._loop is not None
        now = self._loop.time()
        for rid in reject.rids:
            feed = self._open.get(rid)
            if feed is None:
                self._open.rejected(rid)
                continue
            if reject.code is RejectCode.DRAINING or (reject.code in _PASSING and feed.submissions > 1):
                feed.refused_since = now if feed.refused_since is None else feed.refused_since
                if now - feed.refused_since < self._options.grace:
                    delay = max(_SHORTEST_RETRY, reject.retry_after_ms / 1000)
                    self._loop.call_later(delay, self._retry, rid)
                    continue
            self._open.end(feed, error_of(reject))
            self._open.rejected(rid)
            touched[feed] = None

    def _retry(self, rid: int) -> None:
        feed = self._open.get(rid)
        if feed is not None:
            self._resubmit(feed, "rejected")

    # Waiting

    def _change(self) -> None:
        """Wake whoever waits for the scheduler or the model."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _give_up_later(self) -> None:
        """Nobody can serve what is open: end it when that lasts longer than the grace."""
        assert self._loop is not None
        if self._giving_up is None:
            error = errors.unavailable("The scheduler has been away for too long.")
            self._giving_up = self._loop.call_later(self._options.grace, self._give_up, error)

    def _give_up(self, error: errors.ApiError) -> None:
        self._giving_up = None
        self.fail_all(error)

    def _cancel_giving_up(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

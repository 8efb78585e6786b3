"""A frontend that only counts: it submits, notes when ids come, goes on after a gap, and knows each request's one end.

What a request must come to is a pure function of its seed, so nothing that is lost, doubled or mixed up goes unseen.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bench.simulation.group import ids_at
from protocol.base import Wire
from protocol.frontend import (
    Abort,
    Credit,
    Finish,
    FinishReason,
    Frame,
    Frames,
    Load,
    Reject,
    RejectCode,
    Submit,
    Welcome,
)
from protocol.packing import unpack_u8, unpack_u32, unpack_u64
from protocol.requests import Choice


@dataclass(eq=False)
class Asked:
    """One request from its arrival to its end. Seconds on the simulation's clock."""

    prompt: bytes
    """u32 ids"""
    max_tokens: int
    seed: int
    tenant: str = ""
    tells_tenant: bool = True
    """Whether the scheduler is told whose it is."""
    priority: int = 0
    block_hashes: bytes = b""
    block_size: int = 0
    salt: bytes = b""
    at: float = 0.0
    """When it arrived."""
    turn: int = 0
    """Of its conversation."""
    rid: int = 0
    ids: array[int] = field(default_factory=lambda: array("I"))
    first_id_at: float = -1.0
    last_id_at: float = -1.0
    gaps: array[float] = field(default_factory=lambda: array("f"))
    """Seconds between two deliveries."""
    cached_tokens: int = -1
    submissions: int = 0
    finish: Finish | None = None
    reject: Reject | None = None
    ended_at: float = -1.0
    on_end: Callable[[Asked], None] | None = None
    """Called once, at its end: a conversation goes on."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    def submit(self, model: str) -> Submit:
        """Ask for it, or for the rest of it."""
        return Submit(
            (Choice(self.rid, self.seed, self.ids.tobytes()),),
            model,
            self.prompt,
            self.max_tokens,
            tenant=self.tenant if self.tells_tenant else "",
            priority=self.priority,
            block_hashes=self.block_hashes,
            block_size=self.block_size,
            salt=self.salt,
        )

    def check(self, vocab_size: int) -> None:
        """Its ids are those of its seed, and as many as it asked for when it was served."""
        positions = np.arange(self.prompt_tokens, self.prompt_tokens + len(self.ids))
        expected = ids_at(np.array([self.seed], dtype=np.uint64), positions, vocab_size)
        assert list(self.ids) == expected.tolist(), f"request {self.rid} got ids that are not its own"
        if self.finish is not None and self.finish.reason is FinishReason.LENGTH:
            assert len(self.ids) == self.max_tokens, f"request {self.rid} ended after {len(self.ids)} ids"


class SimulatedFrontend:
    """One frontend's session. ``send`` takes what goes to the scheduler."""

    def __init__(self, send: Callable[[Wire], None], model: str = "m") -> None:
        self.open: dict[int, Asked] = {}
        self.ended: list[Asked] = []
        self.credit: Credit | None = None
        self.gaps_seen = 0
        self.deliveries = 0
        """Rows of frames that had ids for an open request."""
        self._send = send
        self._model = model
        self._next_rid = 1

    def ask(self, asked: Asked) -> None:
        """Submit under a fresh id."""
        asked.rid = self._next_rid
        self._next_rid += 1
        asked.submissions += 1
        self.open[asked.rid] = asked
        self._send(asked.submit(self._model))

    def ask_again(self) -> None:
        """The session is a new one: go on with everything that is open."""
        unfinished, self.open = list(self.open.values()), {}
        for asked in unfinished:
            self.ask(asked)

    def receive(self, message: object, now: float) -> None:
        """What the scheduler said."""
        if isinstance(message, Frame):
            self._frame(message, now)
        elif isinstance(message, Frames):
            for frame in message.frames:
                self._frame(frame, now)
        elif isinstance(message, Reject):
            for rid in message.rids:
                self._rejected(rid, message, now)
        elif isinstance(message, Load | Welcome):
            self.credit = message.credit

    def _frame(self, frame: Frame, now: float) -> None:
        for started in frame.started:
            asked = self.open.get(started.rid)
            if asked is not None and asked.cached_tokens < 0:
                asked.cached_tokens = started.cached_tokens
        if frame.rids:
            self._rows(frame, now)
        for finish in frame.finishes:
            asked = self.open.get(finish.rid)
            if asked is None:
                continue
            if finish.count > len(asked.ids):
                self._go_on(asked)
            else:
                asked.finish = finish
                self._end(asked, now)

    def _rows(self, frame: Frame, now: float) -> None:
        ids, counts = unpack_u32(frame.ids), unpack_u8(frame.counts)
        rows = zip(unpack_u64(frame.rids).tolist(), unpack_u32(frame.first).tolist(), counts.tolist(), strict=True)
        at = 0
        for rid, first, count in rows:
            asked = self.open.get(rid)
            if asked is not None:
                have = len(asked.ids)
                if first > have:
                    self._go_on(asked)
                else:
                    self.deliveries += 1
                    asked.ids.frombytes(ids[at + have - first : at + count].tobytes())
                    if asked.first_id_at < 0:
                        asked.first_id_at = now
                    else:
                        asked.gaps.append(now - asked.last_id_at)
                    asked.last_id_at = now
            at += count

    def _go_on(self, asked: Asked) -> None:
        """Ids are missing: drop this attempt and ask for the rest."""
        self.gaps_seen += 1
        del self.open[asked.rid]
        self._send(Abort((asked.rid,)))
        self.ask(asked)

    def _rejected(self, rid: int, reject: Reject, now: float) -> None:
        asked = self.open.get(rid)
        if asked is None:
            return
        assert asked.submissions == 1 or reject.code is not RejectCode.OVERLOADED, "a resume was refused"
        asked.reject = reject
        self._end(asked, now)

    def _end(self, asked: Asked, now: float) -> None:
        asked.ended_at = now
        del self.open[asked.rid]
        self.ended.append(asked)
        if asked.on_end is not None:
            asked.on_end(asked)

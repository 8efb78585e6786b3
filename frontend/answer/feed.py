"""One choice as the scheduler delivers it: the ids so far, their logprobs when asked for, and how it ended.

Knows nothing of text, of HTTP or of sockets. The ids are kept whole because a resume needs them; a slow reader
therefore costs four bytes a token and needs no queue.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from frontend.errors import ApiError
from protocol.frontend import Finish, Submit
from protocol.logprobs import record_size, unpack_records
from protocol.packing import PackingError
from protocol.requests import Choice, Sampling

ID_BYTES = 4


@dataclass(frozen=True)
class Submission:
    """Everything of a Submit but its choices; kept for as long as one of them may have to be submitted again."""

    model: str
    tokens: bytes
    """The prompt's u32 ids."""
    max_tokens: int
    sampling: Sampling
    stop_ids: bytes
    priority: int = 0
    tenant: str = ""
    salt: bytes = b""
    block_hashes: bytes = b""
    """Names of the prompt's full blocks (protocol/block_hashes.py), by which groups find what they computed before."""
    block_size: int = 0
    """Tokens of such a block; 0: no prefix is reused."""
    deadline: float | None = None
    """When the request must be over, as ``time.monotonic`` has it."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens) // ID_BYTES

    @property
    def record_size(self) -> int:
        """Bytes of the logprob record of one output token; 0 when none is asked for."""
        return record_size(self.sampling.logprobs) if self.sampling.logprobs >= 0 else 0

    def submit(self, choices: tuple[Choice, ...], *, score_prompt: bool = True) -> Submit:
        """The message that asks for these choices, and for prompt logprobs only as long as some are missing."""
        left = None if self.deadline is None else max(0, round((self.deadline - time.monotonic()) * 1000))
        sampling = self.sampling if score_prompt else msgspec.structs.replace(self.sampling, prompt_logprobs=-1)
        return Submit(
            choices,
            self.model,
            self.tokens,
            self.max_tokens,
            sampling=sampling,
            stop_ids=self.stop_ids,
            priority=self.priority,
            tenant=self.tenant,
            remaining_ms=left,
            salt=self.salt,
            block_hashes=self.block_hashes,
            block_size=self.block_size,
        )


class PromptScores:
    """Logprob records of one prompt, put together from whatever choices of it deliver them."""

    def __init__(self, prompt_tokens: int, alternatives: int) -> None:
        self._alternatives = alternatives
        self._records = bytearray((prompt_tokens - 1) * record_size(alternatives))
        self._known = np.zeros(prompt_tokens - 1, dtype=bool)

    @property
    def complete(self) -> bool:
        """Whether every prompt token but the first is judged."""
        return bool(self._known.all())

    @property
    def alternatives(self) -> int:
        return self._alternatives

    def accept(self, first: int, records: bytes) -> bool:
        """Take records of consecutive prompt positions; False, and nothing taken, when they do not fit."""
        size = record_size(self._alternatives)
        count = len(records) // size
        start = first - 1
        if len(records) % size or start < 0 or start + count > len(self._known):
            return False
        self._records[start * size : (start + count) * size] = records
        self._known[start : start + count] = True
        return True

    def records(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """The records of positions 1 … prompt_tokens - 1."""
        made: np.ndarray[tuple[int], np.dtype[np.void]] = unpack_records(bytes(self._records), self._alternatives)
        return made


class Cancelled:
    """The frontend wanted no more of a choice."""


End = Finish | ApiError | Cancelled
"""How a choice ended: as the scheduler said, with an error, or because the frontend wanted no more."""


class Feed:
    """The receiving end of one choice. Used from the event loop's thread only, by one reader."""

    def __init__(self, submission: Submission, seed: int, scores: PromptScores | None = None) -> None:
        self.submission = submission
        self.seed = seed
        self.scores = scores
        """Logprobs of the prompt, shared by its choices; None when not asked for."""
        self.rid = 0
        """Current request id; it changes with every re-submit."""
        self.ids = array("I")
        """Every id received, in order."""
        self.records = bytearray()
        """Their logprob records, when asked for."""
        self.end: End | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache, as told the first time."""
        self.group = ""
        self.numerics = b""
        """The numeric class that its ids come from; a resume asks for it again."""
        self.submissions = 0
        """Times this choice was sent to a scheduler; kept by the client."""
        self.gaps = 0
        """Times ids were missing; kept by the client."""
        self.refused_since: float | None = None
        """Since when the scheduler has been refusing to take it up again; kept by the client."""
        self.read = 0
        """Ids the reader has taken; kept by the reader."""
        self.listener: Callable[[], None] | None = None
        """Called when something arrived; set by the reader."""

    def choice(self, rid: int) -> Choice:
        """This choice under a new request id, to go on after the last id received."""
        return Choice(rid, self.seed, resume=self.ids.tobytes(), numerics=self.numerics if self.ids else b"")

    def accept(self, first: int, data: bytes, records: bytes = b"") -> bool:
        """Take u32 ids whose first has index ``first``, and their records.

        Overlap is dropped; False, and nothing taken, on a gap.
        """
        have = len(self.ids)
        if first > have:
            return False
        self.ids.frombytes(data[(have - first) * ID_BYTES :])
        self.records += records[(have - first) * self.submission.record_size :]
        return True

    def record(self, first: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """The records of ``count`` ids from index ``first``. Raises PackingError when there are not as many."""
        size = self.submission.record_size
        data = bytes(self.records[first * size : (first + count) * size])
        if len(data) != count * size:
            raise PackingError(f"{len(data)} bytes of logprobs for {count} ids")
        made: np.ndarray[tuple[int], np.dtype[np.void]] = unpack_records(data, self.submission.sampling.logprobs)
        return made

    def started(self, group: str, cached_tokens: int, numerics: bytes) -> None:
        """The choice was admitted; what was cached is kept from the first time."""
        self.group = group
        self.numerics = numerics
        self.refused_since = None
        if self.cached_tokens is None:
            self.cached_tokens = cached_tokens

    def finish(self, end: End) -> None:
        """Set the end; the first one counts."""
        if self.end is None:
            self.end = end

    def notify(self) -> None:
        """Tell the reader that something arrived."""
        if self.listener is not None:
            self.listener()

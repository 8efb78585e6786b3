"""What the ids of a step mean: where each row's output ends, and what goes out to frontends.

Pure array functions over rows; a row returns 0 … 8 ids. What is made at every step is a msgspec struct: those are made
several times faster than frozen dataclasses.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.frontend import FinishReason, PromptLogprobs
from protocol.ids import SessionId
from protocol.packing import PackingError, pack_u32, unpack_u8, unpack_u32
from protocol.worker import RowStatus, StepDone
from scheduler.requests import Sequence

ADVANCES = np.array([status in (RowStatus.OK, RowStatus.GRAMMAR_END) for status in RowStatus])
"""By status: a row with another one returns no ids."""

FILLER = -2
"""Right of a row's ids; equals no id and no padding of a stop matrix."""

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class BadStepDone(ValueError):
    """A StepDone that does not fit its plan: the group's tables can no longer be trusted."""


class Rows(msgspec.Struct, frozen=True, eq=False):
    """A StepDone's rows, in plan order."""

    counts: Int64Array
    """[rows]"""
    ids: Int64Array
    """[rows, width]: ids from the left, then filler; width is the largest count."""
    status: npt.NDArray[np.uint8]
    """[rows] of RowStatus"""
    failed: bool
    """Some row has a status other than OK."""


class Delivery(msgspec.Struct, frozen=True, eq=False):
    """Ids that go out: one row per sequence that got any."""

    session: Int64Array
    rid: npt.NDArray[np.uint64]
    first: Int64Array
    """Index of the row's first id within the choice's output."""
    counts: Int64Array
    ids: Int64Array
    """[rows, width]"""
    logprobs: list[bytes] | None = None
    """[rows]: a record per id, b"" for rows that asked for none; None when no row did."""

    def __len__(self) -> int:
        return len(self.counts)

    def records(self, start: int, end: int) -> bytes:
        """Logprob records of some rows, end to end."""
        return b"" if self.logprobs is None else b"".join(self.logprobs[start:end])

    def packed_ids(self) -> bytes:
        """All ids of all rows, u32."""
        if self.ids.size == len(self.counts):  # one each, or no row at all
            return pack_u32(self.ids)
        return pack_u32(self.ids[np.arange(self.ids.shape[1]) < self.counts[:, None]])

    def by_session(self) -> Delivery:
        """The same rows, those of a frontend together and in their order."""
        if not np.count_nonzero(self.session[1:] < self.session[:-1]):
            return self
        return self.of_rows(self.session.argsort(kind="stable"))

    def of_rows(self, rows: npt.NDArray[np.intp]) -> Delivery:
        """Some rows, in the order given."""
        return Delivery(
            session=self.session[rows],
            rid=self.rid[rows],
            first=self.first[rows],
            counts=self.counts[rows],
            ids=self.ids[rows],
            logprobs=None if self.logprobs is None else [self.logprobs[row] for row in rows],
        )

    def without_empty_rows(self) -> Delivery:
        """The rows that have ids: a choice of no output tokens has its finish alone."""
        return self.of_rows(self.counts.nonzero()[0])

    def joined(self, others: list[Delivery]) -> Delivery:
        """These rows, then the others'."""
        parts = [self, *others]
        width = max(part.ids.shape[1] for part in parts)
        recorded = any(part.logprobs is not None for part in parts)
        return Delivery(
            session=np.concatenate([part.session for part in parts]),
            rid=np.concatenate([part.rid for part in parts]),
            first=np.concatenate([part.first for part in parts]),
            counts=np.concatenate([part.counts for part in parts]),
            ids=np.concatenate(
                [np.pad(part.ids, ((0, 0), (0, width - part.ids.shape[1])), constant_values=FILLER) for part in parts]
            ),
            logprobs=[each for part in parts for each in part.logprobs or [b""] * len(part)] if recorded else None,
        )


class Finished(msgspec.Struct, frozen=True, eq=False):
    """A sequence that ended, and why."""

    sequence: Sequence
    reason: FinishReason
    count: int
    stop_id: int = -1
    message: str = ""


class StepOutcome(msgspec.Struct, frozen=True, eq=False):
    """What a StepDone means to everyone else."""

    delivery: Delivery
    finished: list[Finished]
    judged: list[tuple[SessionId, PromptLogprobs]]


def read_rows(done: StepDone, samples: BoolArray, max_ids: int, vocab_size: int) -> Rows:
    """Unpack and check a StepDone against its plan's rows. Raises BadStepDone."""
    rows = len(samples)
    try:
        counts, status, flat = unpack_u8(done.counts), unpack_u8(done.status), unpack_u32(done.ids)
    except PackingError as error:
        raise BadStepDone(str(error)) from error
    if len(counts) != rows or len(status) != rows or sum(done.counts) != len(flat):
        raise BadStepDone(f"{len(counts)} counts, {len(status)} statuses and {len(flat)} ids for {rows} rows")
    width = max(done.counts, default=0)
    if width > max_ids:
        raise BadStepDone(f"a row returned {width} ids of at most {max_ids}")
    failed = bool(np.count_nonzero(status))
    if failed and status.max() > max(RowStatus):
        raise BadStepDone(f"status {status.max()} is none")
    if np.count_nonzero((counts > 0) != (samples & ADVANCES[status] if failed else samples)):
        raise BadStepDone("a row that samples returned no id, or a row that failed or does not sample returned some")
    if len(flat) and flat.max() >= vocab_size:
        raise BadStepDone(f"id {flat.max()} outside the vocabulary of {vocab_size}")
    counts_wide = counts.astype(np.int64)
    return Rows(counts_wide, _pad(flat, counts_wide, width), status, failed)


def _pad(flat: npt.NDArray[np.uint32], counts: Int64Array, width: int) -> Int64Array:
    if len(flat) == len(counts) * width:
        return flat.reshape(len(counts), width).astype(np.int64)
    padded = np.full((len(counts), width), FILLER, dtype=np.int64)
    padded[np.arange(width) < counts[:, None]] = flat
    return padded


def first_stop(
    ids: Int64Array, counts: Int64Array, first: Int64Array, min_tokens: Int64Array, stops: Int64Array
) -> Int64Array | None:
    """Column of each row's first stop id, or the width when there is none; shape [rows]. None: there is none at all.

    ``stops`` is [rows, k], padded with what no id equals. An id before ``min_tokens`` outputs
    stops nothing.
    """
    hits = ids[:, :, None] == stops[:, None, :]
    if not np.count_nonzero(hits):
        return None
    width = ids.shape[1]
    columns = np.arange(width)
    found = hits.any(axis=2) & (columns < counts[:, None]) & (first[:, None] + columns >= min_tokens[:, None])
    columns_of_first: Int64Array = np.where(found.any(axis=1), found.argmax(axis=1), width)
    return columns_of_first


def deliver_one(sequence: Sequence, first: int, ids: Int64Array, logprobs: list[bytes] | None) -> Delivery:
    """A delivery of one row; ``logprobs`` as in Delivery."""
    return Delivery(
        session=np.array([sequence.request.session], dtype=np.int64),
        rid=np.array([sequence.rid], dtype=np.uint64),
        first=np.array([first], dtype=np.int64),
        counts=np.array([len(ids)], dtype=np.int64),
        ids=ids.reshape(1, -1),
        logprobs=logprobs,
    )

"""The table of open choices under their current request ids, and what a frame means to it.

Pure: no sockets, no session. A frame names choices by id; ids that are not in the table belong to choices that ended
or go on under another id, and what comes for them is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from frontend.answer.feed import ID_BYTES, End, Feed
from protocol.frontend import Finish, Frame
from protocol.packing import PackingError, unpack_u8, unpack_u32, unpack_u64


class ContradictoryFrame(ValueError):
    """A frame whose arrays do not agree with each other: it is dropped whole."""


@dataclass
class Applied:
    """What a frame did."""

    touched: list[Feed] = field(default_factory=list)
    """Choices that got ids or their end."""
    gaps: list[Feed] = field(default_factory=list)
    """Choices that miss ids: they must be submitted again. An end they were told does not count."""


class OpenChoices:
    """Choices by request id, in the order they came."""

    def __init__(self) -> None:
        self._feeds: dict[int, Feed] = {}
        self._dead_records: dict[int, int] = {}
        """By dead id that may still get rows: bytes of each of its logprob records, by which those rows are skipped."""
        self._next_rid = 1

    def __len__(self) -> int:
        return len(self._feeds)

    def all(self) -> list[Feed]:
        """Every open choice."""
        return list(self._feeds.values())

    def get(self, rid: int) -> Feed | None:
        """The choice with this id, unless it ended or goes on under another one."""
        return self._feeds.get(rid)

    def enter(self, feed: Feed) -> int:
        """Put a choice in the table under a fresh id; an earlier id of it is dead from now on."""
        self._take_out(feed)
        feed.rid = self._next_rid
        self._next_rid += 1
        self._feeds[feed.rid] = feed
        return feed.rid

    def end(self, feed: Feed, end: End) -> None:
        """Set a choice's end and take it out."""
        feed.finish(end)
        self._take_out(feed)

    def forget_dead(self) -> None:
        """Nothing more comes for ids of the past: the session is another one."""
        self._dead_records.clear()

    def rejected(self, rid: int) -> None:
        """Nothing more comes for this id."""
        self._dead_records.pop(rid, None)

    def _take_out(self, feed: Feed) -> None:
        size = feed.submission.record_size
        if self._feeds.pop(feed.rid, None) is not None and size:
            self._dead_records[feed.rid] = size

    def apply(self, frame: Frame) -> Applied:
        """Hand one step's ids and finishes to their choices. Raises ContradictoryFrame."""
        rows = self._rows(frame)
        feeds = self._feeds
        applied = Applied()
        for start in frame.started:
            if start.rid in feeds:
                feeds[start.rid].started(start.group, start.cached_tokens, start.numerics)
        for scored in frame.prompt_logprobs:
            feed = feeds.get(scored.rid)
            if feed is not None and feed.scores is not None:
                if not feed.scores.accept(scored.first, scored.records):
                    raise ContradictoryFrame(f"{len(scored.records)} bytes of prompt logprobs at {scored.first}")
                applied.touched.append(feed)
        at = records_at = 0
        for rid, first, count in rows:
            data = frame.ids[at : at + count * ID_BYTES]
            at += count * ID_BYTES
            feed = feeds.get(rid)
            size = self._record_size(rid) * count
            records = frame.logprobs[records_at : records_at + size]
            records_at += size
            if feed is None:
                continue
            (applied.touched if feed.accept(first, data, records) else applied.gaps).append(feed)
        for finish in frame.finishes:
            self._finish(finish, applied)
        return applied

    def _finish(self, finish: Finish, applied: Applied) -> None:
        feed = self._feeds.get(finish.rid)
        if feed is None:
            self._dead_records.pop(finish.rid, None)
            return
        if feed in applied.gaps:
            return
        if finish.count > len(feed.ids):
            applied.gaps.append(feed)
            return
        self.end(feed, finish)
        self._dead_records.pop(finish.rid, None)
        applied.touched.append(feed)

    def _rows(self, frame: Frame) -> list[tuple[int, int, int]]:
        """(rid, index of the first id, number of ids) of each row."""
        try:
            rids, firsts = unpack_u64(frame.rids).tolist(), unpack_u32(frame.first).tolist()
        except PackingError as error:
            raise ContradictoryFrame(str(error)) from error
        counts = unpack_u8(frame.counts).tolist()
        if not len(rids) == len(firsts) == len(counts) or sum(counts) * ID_BYTES != len(frame.ids):
            raise ContradictoryFrame(f"rows {len(rids)}, {len(firsts)}, {len(counts)}; {len(frame.ids)} bytes of ids")
        rows = list(zip(rids, firsts, counts, strict=True))
        sizes = sum(self._record_size(rid) * count for rid, _, count in rows)
        if sizes != len(frame.logprobs):
            raise ContradictoryFrame(f"{len(frame.logprobs)} bytes of logprobs where {sizes} were asked for")
        return rows

    def _record_size(self, rid: int) -> int:
        feed = self._feeds.get(rid)
        return self._dead_records.get(rid, 0) if feed is None else feed.submission.record_size

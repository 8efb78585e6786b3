"""The table of open choices under their current request ids, and what a frame means to it.

Pure: no sockets, no session. A frame names choices by id; ids that are not in the table belong to choices that ended
or go on under another id, and what comes for them is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from frontend.feed import ID_BYTES, End, Feed
from protocol.frontend import Frame
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
        self._feeds.pop(feed.rid, None)
        feed.rid = self._next_rid
        self._next_rid += 1
        self._feeds[feed.rid] = feed
        return feed.rid

    def end(self, feed: Feed, end: End) -> None:
        """Set a choice's end and take it out."""
        feed.finish(end)
        self._feeds.pop(feed.rid, None)

    def apply(self, frame: Frame) -> Applied:
        """Hand one step's ids and finishes to their choices. Raises ContradictoryFrame."""
        rows = _rows(frame)
        feeds = self._feeds
        applied = Applied()
        for start in frame.started:
            if start.rid in feeds:
                feeds[start.rid].started(start.group, start.cached_tokens)
        at = 0
        for rid, first, count in rows:
            data = frame.ids[at : at + count * ID_BYTES]
            at += count * ID_BYTES
            feed = feeds.get(rid)
            if feed is None:
                continue
            (applied.touched if feed.accept(first, data) else applied.gaps).append(feed)
        for finish in frame.finishes:
            feed = feeds.get(finish.rid)
            if feed is None or feed in applied.gaps:
                continue
            if finish.count > len(feed.ids):
                applied.gaps.append(feed)
                continue
            self.end(feed, finish)
            applied.touched.append(feed)
        return applied


def _rows(frame: Frame) -> zip[tuple[int, int, int]]:
    """(rid, index of the first id, number of ids) of each row."""
    try:
        rids, firsts = unpack_u64(frame.rids).tolist(), unpack_u32(frame.first).tolist()
    except PackingError as error:
        raise ContradictoryFrame(str(error)) from error
    counts = unpack_u8(frame.counts).tolist()
    if not len(rids) == len(firsts) == len(counts) or sum(counts) * ID_BYTES != len(frame.ids):
        raise ContradictoryFrame(f"rows {len(rids)}, {len(firsts)}, {len(counts)}; {len(frame.ids)} bytes of ids")
    return zip(rids, firsts, counts, strict=True)

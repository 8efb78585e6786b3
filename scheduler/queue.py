"""Requests that wait for a group, in the order they are considered.

Order is (priority, those that ran before, arrival): a request that was preempted or lost its group comes before the
fresh ones of its priority. Bounds are the caller's: a queue never refuses what already was accepted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.block_pool import IntegrityError
from scheduler.requests import Sequence, State

Key = tuple[int, bool, int]


class WaitingQueue:
    """A sorted list: a thousand entries at most by far, so insertion is a short memmove."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, Sequence]] = []
        self.tokens = 0
        """Prefill tokens of everything that waits."""
        self._news = False

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """Everything in order, as of now: entries may be removed on the way."""
        return iter([sequence for _, sequence in self._entries])

    def add(self, sequence: Sequence) -> None:
        """It waits from now on."""
        sequence.state = State.QUEUED
        insort(self._entries, (_key(sequence), sequence))
        self.tokens += sequence.length
        self._news = True

    def take_news(self) -> bool:
        """Whether anything was added since the last call."""
        news, self._news = self._news, False
        return news

    def remove(self, sequence: Sequence) -> None:
        """It was admitted, or it ended."""
        at = bisect_left(self._entries, (_key(sequence),))
        if at == len(self._entries) or self._entries[at][1] is not sequence:
            raise IntegrityError(f"choice {sequence.rid} is not in the queue")
        del self._entries[at]
        self.tokens -= sequence.length

    def check_integrity(self) -> None:
        """Raise IntegrityError unless order, states and the token count hold."""
        keys = [key for key, _ in self._entries]
        if keys != sorted(keys) or any(key != _key(sequence) for key, sequence in self._entries):
            raise IntegrityError("the queue is out of order")
        if any(sequence.state is not State.QUEUED or sequence.slot != -1 for sequence in self):
            raise IntegrityError("something in the queue does not wait")
        if self.tokens != sum(sequence.length for sequence in self):
            raise IntegrityError(f"{self.tokens} tokens are counted as waiting")


def _key(sequence: Sequence) -> Key:
    return (sequence.request.priority, not sequence.group, sequence.arrival)

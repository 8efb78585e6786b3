"""KV blocks of one group: which are free, which are in use and by how many, and which free ones are worth keeping.

Two free lists, both intrusive: every block carries its neighbours' numbers, and a sentinel closes each ring.

::

    plain:  sentinel → b3 → b7 → sentinel            contents that nobody can ask for: taken first
    cached: sentinel → b1 → b4 → b9 → sentinel       contents still addressable: taken from the left when no plain one
                       └ released longest ago        is left, and out of the middle, in O(1), by whoever asks for them

Knows nothing of sequences or of what a block holds, only whether it is worth keeping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class IntegrityError(AssertionError):
    """Accounts that do not add up: a bug of this package, never of a peer."""


class PoolExhausted(RuntimeError):
    """More blocks were asked for than are free; callers look at ``free`` first."""


@dataclass(frozen=True)
class PoolStatistics:
    """Blocks by state; they add up to the total."""

    total: int
    free: int
    cached: int
    """Free for taking, contents still addressable by hash."""
    used: int


class BlockPool:
    """A fixed number of blocks, each free or held by one owner or more.

    ``on_reuse`` is told each block whose contents stop being addressable because it is taken for something else.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[int], None] = lambda block: None) -> None:
        self.num_blocks = num_blocks
        self.free = num_blocks
        """Blocks that can be taken, cached ones included."""
        self._on_reuse = on_reuse
        self._plain, self._cached = num_blocks, num_blocks + 1
        self._next = [*range(1, num_blocks + 1), 0, self._cached]
        self._previous = [num_blocks, *range(num_blocks), self._cached]
        self._free_cached = 0
        self._owners = [0] * num_blocks
        self._worth_keeping = [False] * num_blocks
        self._generation = [0] * num_blocks

    def take(self, count: int) -> Int32Array:
        """The next ``count`` free blocks, those with nothing worth keeping first; [count]. Raises PoolExhausted."""
        if count > self.free:
            raise PoolExhausted(f"{count} blocks wanted, {self.free} free")
        plain = min(count, self.free - self._free_cached)
        taken = self._take_from(self._plain, plain)
        if count > plain:
            reused = self._take_from(self._cached, count - plain)
            self._free_cached -= len(reused)
            for block in reused:
                self._worth_keeping[block] = False
                self._on_reuse(block)
            taken += reused
        self.free -= count
        return np.array(taken, dtype=np.int32)

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for blocks whose contents are worth keeping, held or free."""
        for block in blocks:
            if not self._worth_keeping[block]:
                raise IntegrityError(f"block {block} is shared and holds nothing worth it")
            if not self._owners[block]:
                self._unlink(block)
                self.free -= 1
                self._free_cached -= 1
            self._owners[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One owner less for a sequence's blocks, given root first.

        The tail is freed first, so that leaves are reused before the roots they hang on. With its last owner a block's
        tenure ends and a new generation begins.
        """
        for block in reversed(list(blocks)):
            owners = self._owners[block]
            if not owners:
                raise IntegrityError(f"block {block} was freed twice")
            self._owners[block] = owners - 1
            if owners > 1:
                continue
            self._generation[block] += 1
            self.free += 1
            if self._worth_keeping[block]:
                self._free_cached += 1
                self._link_after(self._previous[self._cached], block)
            else:
                self._link_after(self._plain, block)

    def keep(self, block: int) -> None:
        """The contents of a held block are addressable from now on."""
        if not self._owners[block]:
            raise IntegrityError(f"block {block} is not held: what is in it is anybody's")
        self._worth_keeping[block] = True

    def drop_oldest(self) -> bool:
        """Give up the contents of the free block that would be reused first; False when there is none."""
        if not self._free_cached:
            return False
        block = self._next[self._cached]
        self._unlink(block)
        self._free_cached -= 1
        self._worth_keeping[block] = False
        self._link_after(self._plain, block)
        self._on_reuse(block)
        return True

    def is_held(self, block: int) -> bool:
        """Whether it has an owner."""
        return self._owners[block] > 0

    def owners(self, block: int) -> int:
        """How many hold it."""
        return self._owners[block]

    def generation(self, block: int) -> int:
        """How often a block lost its last owner: (block, generation) names one tenure of it."""
        return self._generation[block]

    def statistics(self) -> PoolStatistics:
        """A frozen view of the counts."""
        return PoolStatistics(
            total=self.num_blocks,
            free=self.free - self._free_cached,
            cached=self._free_cached,
            used=self.num_blocks - self.free,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless lists, flags and counts agree."""
        listed = 0
        for sentinel, worth_keeping in ((self._plain, False), (self._cached, True)):
            block, length = self._next[sentinel], 0
            while block != sentinel:
                if (
                    self._owners[block]
                    or self._worth_keeping[block] is not worth_keeping
                    or self._previous[self._next[block]] != block
                    or length > self.num_blocks
                ):
                    raise IntegrityError(f"a free list is broken at block {block}")
                length += 1
                block = self._next[block]
            if worth_keeping and length != self._free_cached:
                raise IntegrityError(f"{length} cached blocks listed, {self._free_cached} counted")
            listed += length
        held = sum(owners > 0 for owners in self._owners)
        if listed != self.free or listed + held != self.num_blocks:
            raise IntegrityError(f"{listed} blocks listed, {self.free} counted free, {held} held")

    def _take_from(self, sentinel: int, count: int) -> list[int]:
        following, owners, block = self._next, self._owners, self._next[sentinel]
        taken = []
        for _ in range(count):
            taken.append(block)
            owners[block] = 1
            block = following[block]
        following[sentinel] = block
        self._previous[block] = sentinel
        return taken

    def _link_after(self, neighbour: int, block: int) -> None:
        after = self._next[neighbour]
        self._next[block], self._previous[block] = after, neighbour
        self._previous[after] = self._next[neighbour] = block

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before

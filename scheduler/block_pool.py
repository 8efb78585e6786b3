"""KV blocks of one group: which are free, which are in use, and how often each has changed hands.

The free list is intrusive: every block carries its neighbours' numbers, and one sentinel closes the ring.

::

    sentinel → b3 → b7 → b1 → sentinel       next[b3] = b7, previous[b7] = b3: O(1) out of the middle, no allocation
               └ taken first      └ taken last

Knows nothing of sequences or of what a block holds.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """Free for taking, contents still addressable by hash. 0 until there is a prefix index."""
    used: int


class BlockPool:
    """A fixed number of blocks, each free or held once."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = num_blocks
        self._sentinel = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]
        self._held = [False] * num_blocks
        self._generation = [0] * num_blocks

    def take(self, count: int) -> Int32Array:
        """The next ``count`` blocks of the free list, shape [count]. Raises PoolExhausted."""
        if count > self.free:
            raise PoolExhausted(f"{count} blocks wanted, {self.free} free")
        following, held, block = self._next, self._held, self._next[self._sentinel]
        taken = []
        for _ in range(count):
            taken.append(block)
            held[block] = True
            block = following[block]
        following[self._sentinel] = block
        self._previous[block] = self._sentinel
        self.free -= count
        return np.array(taken, dtype=np.int32)

    def give_back(self, blocks: Iterable[int]) -> None:
        """Free one sequence's blocks, given root first.

        The tail is freed first, so that once blocks are cached, leaves are reused before the roots they hang on. A
        new generation begins: nothing registers a block's contents after its release.
        """
        for block in reversed(list(blocks)):
            if not self._held[block]:
                raise IntegrityError(f"block {block} was freed twice")
            self._held[block] = False
            self._generation[block] += 1
            self._link_first(block)

    def generation(self, block: int) -> int:
        """How often a block was released: (block, generation) names one tenure of it."""
        return self._generation[block]

    def statistics(self) -> PoolStatistics:
        """A frozen view of the counts."""
        return PoolStatistics(total=self.num_blocks, free=self.free, cached=0, used=self.num_blocks - self.free)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless list, flags and counts agree."""
        seen, block = 0, self._next[self._sentinel]
        while block != self._sentinel:
            if self._held[block] or self._previous[self._next[block]] != block or seen > self.num_blocks:
                raise IntegrityError(f"the free list is broken at block {block}")
            seen += 1
            block = self._next[block]
        if seen != self.free or seen + sum(self._held) != self.num_blocks:
            raise IntegrityError(f"{seen} blocks listed, {self.free} counted free, {sum(self._held)} held")

    def _link_first(self, block: int) -> None:
        """Uncached blocks go to the front: they are reused before anything worth keeping."""
        first = self._next[self._sentinel]
        self._next[block], self._previous[block] = first, self._sentinel
        self._previous[first] = self._next[self._sentinel] = block
        self.free += 1

"""Which blocks of a group hold which tokens, and which are being written right now.

A block is named by its hash (protocol/block_hashes.py), which names everything before it too. Whoever registers a
block holds the registered blocks before it, and blocks are given up leaves first; so what is registered of one chain is
always its beginning, and how much that is can be found by halving.

::

    chain      h0  h1  h2  h3  h4  h5
    index      ✓   ✓   ✓                 a newcomer with this chain takes three blocks …
    writers                A   A         … and waits for sequence A, which is computing the fourth

Knows nothing of slots or plans. Bounded: an entry is one block, and there are at most ``most_entries``.
"""

from __future__ import annotations

from collections.abc import Sequence as Chain
from dataclasses import dataclass

from protocol.ids import BlockHash
from scheduler.block_pool import BlockPool, IntegrityError
from scheduler.requests import Sequence

ENTRY_BYTES = 256
"""Memory of one entry, rounded up: the hash, and its places in two dictionaries."""


@dataclass(frozen=True)
class PrefixStatistics:
    """What is addressable now."""

    entries: int
    writing: int
    """Blocks that a sequence is computing and others may wait for."""
    bytes: int


class PrefixIndex:
    """Hash → block for one pool, and hash → the sequence that is about to fill such a block."""

    def __init__(self, num_blocks: int, most_bytes: int) -> None:
        self.most_entries = most_bytes // ENTRY_BYTES
        self.pool = BlockPool(num_blocks, on_reuse=self._forget)
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._writer_of: dict[BlockHash, Sequence] = {}

    def hit(self, chain: Chain[BlockHash], most: int) -> int:
        """How many leading blocks of a chain are registered, at most ``most``."""
        found = self._block_of
        if not most or chain[0] not in found:
            return 0
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in found:
                low = middle
            else:
                high = middle - 1
        return low

    def blocks(self, chain: Chain[BlockHash]) -> list[int]:
        """The blocks of registered hashes."""
        return [self._block_of[name] for name in chain]

    def register(self, names: Chain[BlockHash], blocks: Chain[int]) -> int:
        """Held blocks were filled and confirmed, a run of a chain; returns how many of its first are registered now.

        It ends where another block has the name, and where the index is full.
        """
        block_of, hash_of = self._block_of, self._hash_of
        for nth, (name, block) in enumerate(zip(names, blocks, strict=True)):
            known = block_of.get(name)
            if known is None:
                if len(block_of) >= self.most_entries and not self.pool.drop_oldest():
                    return nth
                self.pool.keep(block)
                block_of[name], hash_of[block] = block, name
            elif known != block:
                return nth
        return len(blocks)

    def name(self, block: int) -> BlockHash | None:
        """What a block is registered as."""
        return self._hash_of.get(block)

    @property
    def written(self) -> int:
        """Blocks that others may wait for."""
        return len(self._writer_of)

    def writers(self) -> set[int]:
        """Identities of all sequences that others may wait for."""
        return {id(sequence) for sequence in self._writer_of.values()}

    def writer(self, name: BlockHash) -> Sequence | None:
        """Who is computing a block of this name."""
        return self._writer_of.get(name)

    def writes(self, sequence: Sequence, names: Chain[BlockHash]) -> None:
        """A sequence is about to compute these; where another already is, that stays so."""
        for name in names:
            self._writer_of.setdefault(name, sequence)

    def wrote(self, sequence: Sequence, names: Chain[BlockHash]) -> None:
        """It has, or it never will."""
        for name in names:
            if self._writer_of.get(name) is sequence:
                del self._writer_of[name]

    def statistics(self) -> PrefixStatistics:
        """A frozen view of the counts."""
        entries = len(self._block_of)
        return PrefixStatistics(entries, len(self._writer_of), (entries + len(self._writer_of)) * ENTRY_BYTES)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless names and blocks are one to one, and every cached block has a name."""
        self.pool.check_integrity()
        if {block: name for name, block in self._block_of.items()} != self._hash_of:
            raise IntegrityError("names and blocks are not one to one")
        if len(self._block_of) > self.most_entries:
            raise IntegrityError(f"{len(self._block_of)} entries of at most {self.most_entries}")
        free = sum(not self.pool.is_held(block) for block in self._hash_of)
        if free != self.pool.statistics().cached:
            raise IntegrityError(f"{free} free blocks have a name, the pool counts {self.pool.statistics().cached}")

    def _forget(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]

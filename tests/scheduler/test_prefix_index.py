"""Names and blocks, whatever is taken, shared, filled and given back: what is found is always a beginning."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.block_hashes import block_hashes, root_hash
from protocol.ids import BlockHash
from protocol.packing import pack_u32
from scheduler.block_pool import IntegrityError
from scheduler.prefix_index import ENTRY_BYTES, PrefixIndex

Chain = list[BlockHash]
CHAINS = st.lists(st.integers(0, 1), max_size=5).map(lambda ids: block_hashes(root_hash(), pack_u32(ids), 1))
"""Blocks of one token of two: chains meet and part all the time."""


def walk(index: PrefixIndex, chain: Chain) -> int:
    """What a look at one name after the other finds."""
    found = 0
    while found < len(chain) and index.hit(chain[found:], 1):
        found += 1
    return found


@given(
    size=st.integers(1, 9),
    most=st.integers(1, 9),
    acts=st.lists(st.tuples(st.integers(0, 2), CHAINS, st.integers(0, 5), st.integers(0, 7)), max_size=60),
)
def test_what_is_found_by_halving_is_what_a_walk_finds(
    size: int, most: int, acts: list[tuple[int, Chain, int, int]]
) -> None:
    """Sequences come and take what is there, fill some of the rest, and leave, in any order."""
    index = PrefixIndex(size, most * ENTRY_BYTES)
    held: list[list[int]] = []
    for kind, chain, filled, number in acts:
        if kind and held:
            index.pool.give_back(held.pop(number % len(held)))
        found = index.hit(chain, len(chain))
        free_after = index.pool.free - sum(not index.pool.is_held(block) for block in index.blocks(chain[:found]))
        if len(chain) - found > free_after:
            continue
        shared = index.blocks(chain[:found])
        index.pool.share(shared)
        blocks = [*shared, *index.pool.take(len(chain) - found).tolist()]
        known = found
        while known < min(filled, len(chain)) and index.register(chain[known : known + 1], blocks[known : known + 1]):
            known += 1
        held.append(blocks)
        index.check_integrity()
        assert index.statistics().entries <= most
        for other in (chain, chain[::-1], *(block_hashes(root_hash(), pack_u32(ids), 1) for ids in ([0] * 5, [1] * 5))):
            assert index.hit(other, len(other)) == walk(index, other)
    for blocks in held:
        index.pool.give_back(blocks)
    index.check_integrity()
    statistics = index.pool.statistics()
    assert statistics.used == 0 and statistics.free + statistics.cached == size


def test_what_nobody_holds_is_not_registered() -> None:
    index = PrefixIndex(2, 1 << 20)
    (name,) = block_hashes(root_hash(), pack_u32([1]), 1)
    (block,) = index.pool.take(1).tolist()
    index.pool.give_back([block])
    with pytest.raises(IntegrityError):
        index.register([name], [block])

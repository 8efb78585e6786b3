"""Blocks are free or held, never both, and their generations tell tenures apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.block_pool import BlockPool, IntegrityError, PoolExhausted


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60))
def test_free_and_used_always_add_up_and_no_block_is_handed_out_twice(size: int, acts: list[tuple[bool, int]]) -> None:
    pool = BlockPool(size)
    held: list[list[int]] = []
    for take, number in acts:
        if take and number <= pool.free:
            taken = pool.take(number).tolist()
            assert len(set(taken)) == number and not set(taken) & {block for blocks in held for block in blocks}
            held.append(taken)
        elif held:
            pool.give_back(held.pop(number % len(held)))
        pool.check_integrity()
        statistics = pool.statistics()
        assert statistics.used == sum(map(len, held))
        assert statistics.free + statistics.cached + statistics.used == statistics.total == size


def test_a_sequences_root_is_reused_before_its_tail_was_freed_first() -> None:
    """Freed tail first onto the front: the root ends up foremost, the tail behind it."""
    pool = BlockPool(8)
    blocks = pool.take(3).tolist()
    pool.give_back(blocks)
    assert pool.take(8).tolist()[:3] == blocks


def test_every_release_begins_a_new_generation() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1).tolist()
    before = pool.generation(block)
    pool.give_back([block])
    assert pool.generation(block) == before + 1


def test_more_than_is_free_and_a_second_release_are_refused() -> None:
    pool = BlockPool(2)
    blocks = pool.take(2).tolist()
    with pytest.raises(PoolExhausted):
        pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(IntegrityError):
        pool.give_back(blocks)

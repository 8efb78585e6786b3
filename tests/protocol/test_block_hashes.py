"""A block's name tells every token up to its end, and whose prefix it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.block_hashes import HASH_BYTES, block_hashes, pack_hashes, root_hash, split_hashes
from protocol.packing import pack_u32

IDS = st.lists(st.integers(0, 3), max_size=24)
SIZES = st.integers(1, 6)


@given(IDS, IDS, SIZES)
def test_names_are_shared_as_far_as_whole_blocks_are(one: list[int], other: list[int], size: int) -> None:
    chains = [block_hashes(root_hash(), pack_u32(ids), size) for ids in (one, other)]
    assert [len(chain) for chain in chains] == [len(one) // size, len(other) // size]
    for block, names in enumerate(zip(*chains, strict=False)):
        end = (block + 1) * size
        assert (names[0] == names[1]) == (one[:end] == other[:end])


@given(IDS, SIZES, st.integers(0, 4))
def test_a_chain_goes_on_where_it_was_left(ids: list[int], size: int, left_at: int) -> None:
    whole = block_hashes(root_hash(), pack_u32(ids), size)
    first = block_hashes(root_hash(), pack_u32(ids[: left_at * size]), size)
    rest = block_hashes(first[-1] if first else root_hash(), pack_u32(ids[left_at * size :]), size)
    assert first + rest == whole


def test_salt_and_adapter_are_told_apart_and_from_nothing() -> None:
    extras = [(b"", ""), (b"a", ""), (b"", "a"), (b"a", "a"), (b"aa", ""), (b"b", "")]
    roots = [root_hash(*each) for each in extras]
    assert len(set(roots)) == len(roots)
    chains = [block_hashes(root, pack_u32([1, 2, 3, 4]), 2) for root in roots]
    assert len({name for chain in chains for name in chain}) == 2 * len(roots)


@given(IDS, SIZES)
def test_names_travel_end_to_end(ids: list[int], size: int) -> None:
    packed = pack_hashes(root_hash(b"s"), pack_u32(ids), size)
    assert len(packed) == HASH_BYTES * (len(ids) // size)
    assert split_hashes(packed) == block_hashes(root_hash(b"s"), pack_u32(ids), size)
    assert pack_hashes(root_hash(), pack_u32(ids), 0) == b""


def test_every_process_computes_the_same_names() -> None:
    assert root_hash(b"salt", "adapter").hex() == "1375038aade948a3b223781f23c8b0ec"
    chain = block_hashes(root_hash(), pack_u32([1, 2, 3, 4]), 2)
    assert [name.hex() for name in chain] == [
        "995c06853284bbb846771fbc0096230b",
        "ff63d260f4a1b10c17c2c5f79c1f6ca8",
    ]

"""Names of KV blocks: a hash chain over the full blocks of a sequence.

::

    root ──► h0 ──► h1 ──► h2 …        h[i] = blake2b-128(h[i-1], the u32 ids of block i)

so a hash names every token up to the end of its block, and equal hashes mean equal contents within one group. The root
is a hash of what else the contents depend on, each under a tag of its own: the adapter, and the salt that keeps
callers' prefixes apart. Frontends name the blocks of prompts; the scheduler goes on over the output.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

from protocol.ids import BlockHash

HASH_BYTES = 16
_ID_BYTES = 4
_SALT, _ADAPTER = 1, 2


def root_hash(salt: bytes = b"", adapter: str = "") -> BlockHash:
    """The parent of every first block."""
    extras = ((_SALT, salt), (_ADAPTER, adapter.encode()))
    tagged = b"".join(struct.pack("<BI", tag, len(value)) + value for tag, value in extras if value)
    return BlockHash(blake2b(tagged, digest_size=HASH_BYTES).digest())


def block_hashes(parent: BlockHash, ids: bytes, block_size: int) -> list[BlockHash]:
    """The hashes of the full blocks in ``ids`` (u32), which follow the block named ``parent``; about 1 µs each."""
    size, chain = block_size * _ID_BYTES, []
    for at in range(0, len(ids) - size + 1, size):
        parent = BlockHash(blake2b(parent + ids[at : at + size], digest_size=HASH_BYTES).digest())
        chain.append(parent)
    return chain


def pack_hashes(parent: BlockHash, ids: bytes, block_size: int) -> bytes:
    """The same end to end, as they travel; none when blocks have no size."""
    return b"".join(block_hashes(parent, ids, block_size)) if block_size else b""


def split_hashes(packed: bytes) -> list[BlockHash]:
    """Hashes that travelled end to end."""
    names: list[BlockHash] = [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]  # type: ignore[misc]
    return names

"""Identifiers that cross process boundaries, each a type of its own so that one cannot stand in for another."""

from __future__ import annotations

import hashlib
import secrets
from typing import NewType

InstanceId = NewType("InstanceId", int)
"""A process's name for itself: random u64, minted at its start."""

Rid = NewType("Rid", int)
"""A choice's id: a u64 counter of the frontend instance that submitted it, never reused.

Inside a session the instance is implied, so only the counter travels; the full identity is (instance, rid).
"""

Nonce = NewType("Nonce", int)
"""Random u64 in Hello or Register; Welcome repeats it, which binds the session to that greeting."""

Epoch = NewType("Epoch", int)
"""Random u64 of one scheduler start. Compared for equality only."""

SessionId = NewType("SessionId", int)
"""Counter of the sessions one scheduler has opened."""

GroupId = NewType("GroupId", str)
"""A group's name, stable over relaunches."""

Incarnation = NewType("Incarnation", int)
"""Random u64 of one launch of a group, minted by the launcher and handed to every rank."""

StepId = NewType("StepId", int)
"""Number of a plan within (epoch, incarnation, reset), rising by one."""

Slot = NewType("Slot", int)
"""Index of a sequence in a worker's tables, 0 <= slot < max_slots."""

BlockId = NewType("BlockId", int)
"""Index of a KV block in a group's pool, 0 <= block < num_blocks."""

BlockHash = NewType("BlockHash", bytes)
"""blake2b-128 over (parent hash, the block's tokens, tagged extras): 16 bytes."""

Digest = NewType("Digest", bytes)
"""blake2b-128 of something both sides must agree on (a tokenizer, a model's numerics): 16 bytes."""


def random_u64() -> int:
    """A u64 that no other process will draw; never 0, so that 0 can mean "none yet"."""
    return secrets.randbits(64) or 1


def hash64(*values: int) -> int:
    """A u64 that depends on every one of some u64s and on nothing else: blake2b-64 of their little-endian bytes.

    Choice i of a prompt has the seed ``hash64(seed, i)``, choice 0 the seed itself.
    """
    data = b"".join(value.to_bytes(8, "little") for value in values)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

"""Frames that are almost messages."""

from __future__ import annotations

import random
from collections.abc import Iterator

from protocol.codec import encode
from tests.protocol.examples import DIRECTIONS

MOST_BYTES = 20_000


def frames(seed: int) -> Iterator[bytes]:
    """For ever: examples of every direction, bent in one to four places, and now and then plain noise."""
    chance = random.Random(seed)
    whole = [encode(message) for _, messages in DIRECTIONS.values() for message in messages]
    while True:
        frame = bytearray(chance.choice(whole))
        for _ in range(chance.randint(1, 4)):
            frame = _bent(frame, whole, chance)
        yield bytes(frame[:MOST_BYTES])


def _bent(frame: bytearray, whole: list[bytes], chance: random.Random) -> bytearray:
    at = chance.randrange(len(frame) + 1)
    kind = chance.randrange(7)
    if kind == 0 and frame:  # another byte
        frame[at % len(frame)] = chance.randrange(256)
    elif kind == 1 and frame:  # another bit
        frame[at % len(frame)] ^= 1 << chance.randrange(8)
    elif kind == 2:  # the end is missing
        return frame[:at]
    elif kind == 3:  # something in between
        return frame[:at] + chance.randbytes(chance.randint(1, 16)) + frame[at:]
    elif kind == 4:  # the beginning of one and the end of another
        return frame[:at] + chance.choice(whole)[at:]
    elif kind == 5:  # lists in lists, or a length that promises the world
        return frame[:at] + chance.choice(
            [b"\x91" * chance.choice([9, 4000]), b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
        )
    else:
        return bytearray(chance.randbytes(chance.choice([0, 1, 30, 300])))
    return frame

"""What every wire struct has in common."""

from __future__ import annotations

from typing import Annotated

import msgspec

U64 = Annotated[int, msgspec.Meta(ge=0)]
"""An id or a counter of up to 64 bits; msgpack itself has no larger integers."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
"""A size, a length or an index that fits u32."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
"""A model, group or adapter name."""

Text = Annotated[str, msgspec.Meta(max_length=4096)]
"""A reason meant for a person."""


class Wire(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of every message and of every struct inside one.

    Fields are positional: new ones go last and have defaults, so that versions N and N-1 read each other.
    """

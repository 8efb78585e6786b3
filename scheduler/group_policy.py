"""How a group's scheduler behaves, as far as an operator may choose."""

from __future__ import annotations

import msgspec


class GroupPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The same for every group of a cell."""

    prefix_caching: bool = True
    """Finished blocks stay addressable, and requests that begin alike share them."""
    prefix_index_bytes: int = 64 << 20
    """Most memory of one group's index; a block that would exceed it is not kept, or an older one is given up."""
    growth_blocks: int = 2
    """Blocks that each running sequence can still grow by when another is admitted beside it."""
    prefill_stretch: float = 4.0
    """A step with decodes takes at most so many times as long for the prefill in it, as steps were measured; 0: no
    bound but the step's tokens."""
    long_prefill_threshold: int = 0
    """Most tokens of one prompt in a step that others have a part in; 0: no bound."""

    @property
    def index_bytes(self) -> int:
        """Memory for the index; 0: there is none."""
        return self.prefix_index_bytes if self.prefix_caching else 0

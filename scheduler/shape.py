"""What a group registered, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from protocol.worker import Register

PLANS_IN_FLIGHT = 2
"""Step N+1 is planned before the ids of step N are known; a third would only add latency."""

SHORTEST_CONTEXT = 2
"""A prompt token and an output token."""


class UnusableGroup(ValueError):
    """A registration that cannot serve: its pool is too small for a single short request."""


@dataclass(frozen=True)
class GroupShape:
    """Bounds of one group's tables."""

    num_blocks: int
    block_size: int
    max_slots: int
    max_tokens_per_step: int
    max_ids_per_row: int
    vocab_size: int
    context: int
    watermark: int
    """Blocks an admission leaves free, so that running sequences can grow before one must be preempted."""

    @classmethod
    def of(cls, register: Register, watermark_fraction: float) -> GroupShape:
        """The shape of a registered group. Raises UnusableGroup."""
        shape = cls(
            num_blocks=register.num_blocks,
            block_size=register.block_size,
            max_slots=register.max_slots,
            max_tokens_per_step=register.max_tokens_per_step,
            max_ids_per_row=register.max_ids_per_row,
            vocab_size=register.vocab_size,
            context=register.context,
            watermark=max(1, round(register.num_blocks * watermark_fraction)),
        )
        if shape.effective_context < SHORTEST_CONTEXT:
            raise UnusableGroup(
                f"{shape.num_blocks} blocks of {shape.block_size} tokens, {shape.watermark} of them kept free, "
                f"hold no request at {shape.max_ids_per_row} ids a row; give the group more KV memory"
            )
        return shape

    @cached_property
    def usable_slots(self) -> int:
        """Never more sequences than tokens in a step: all decodes fit the budget, and a prefill gets its share."""
        return min(self.max_slots, self.max_tokens_per_step)

    @cached_property
    def effective_context(self) -> int:
        """Longest sequence, prompt and output, that completes when it runs alone.

        The last plan of a sequence that ends at length E is made when it has E - PLANS_IN_FLIGHT tokens and each
        outstanding plan may return the most ids; blocks must reach that far although the output is cut at E.
        """
        overshoot = max(PLANS_IN_FLIGHT * (self.max_ids_per_row - 1) - 1, 0)
        return min(self.context, (self.num_blocks - self.watermark) * self.block_size - overshoot)

    @cached_property
    def blocks_per_slot(self) -> int:
        """Most blocks one sequence can be given."""
        return self.blocks_for(self.effective_context + PLANS_IN_FLIGHT * self.max_ids_per_row)

    def blocks_to_prefill(self, tokens: int) -> int:
        """Blocks for a sequence's prefill and for what its last chunk may sample."""
        return self.blocks_for(tokens + self.max_ids_per_row - 1)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

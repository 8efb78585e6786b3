"""How large a rank's tables and KV pool are, from what was asked for and what the memory leaves."""

from __future__ import annotations

from dataclasses import dataclass

from workers.engine import ModelDoesNotFit
from workers.model.config import ModelConfig
from workers.model.errors import ModelError
from workers.model.memory import MemoryNeeds, human_bytes
from workers.options import WorkerOptions
from workers.slots import PoolShape

CPU_KV_BYTES = 512 << 20
_USEFUL_TOKENS = 256
"""A pool that cannot hold a sequence of this many tokens is of no use."""


@dataclass(frozen=True)
class Limits:
    """What a device is given unless the options say otherwise."""

    slots: int
    tokens: int
    """Of a step."""


CPU_LIMITS = Limits(slots=64, tokens=512)
CUDA_LIMITS = Limits(slots=256, tokens=8192)


@dataclass(frozen=True)
class Tables:
    """The sizes that do not depend on memory."""

    context: int
    slots: int
    tokens: int
    block_size: int

    def needs(self, *, weights: int, step: int, block: int) -> MemoryNeeds:
        """With bytes of weights, of a step, and of a KV block."""
        useful = -(-min(self.context, _USEFUL_TOKENS) // self.block_size)
        return MemoryNeeds(weights=weights, step=step, block=block, least_blocks=useful)

    def shape(self, num_blocks: int, vocab_size: int) -> PoolShape:
        return PoolShape(
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_slots=self.slots,
            max_tokens_per_step=self.tokens,
            max_ids_per_row=1,
            vocab_size=vocab_size,
            context=self.context,
        )

    @property
    def most_blocks(self) -> int:
        """More than all slots can fill is of no use."""
        return self.slots * -(-(self.context + 1) // self.block_size)

    @property
    def positions(self) -> int:
        """A plan may run on for a step or two past the end it does not know of yet."""
        return self.context + 2


def plan_tables(options: WorkerOptions, config: ModelConfig, limits: Limits) -> Tables:
    """Raises ModelError when the options contradict the model."""
    slots = options.max_num_seqs or limits.slots
    tokens = max(options.max_num_batched_tokens or limits.tokens, slots)
    return Tables(_context(options, config), slots, tokens, options.block_size)


def plan_blocks(options: WorkerOptions, tables: Tables, needs: MemoryNeeds, bound: int, default: int) -> int:
    """KV blocks of a pool of the size asked for, else of ``default`` bytes or what ``bound`` leaves.

    Raises ModelDoesNotFit when weights and pool exceed ``bound``.
    """
    if options.kv_cache_memory is None:
        wanted = min(default, needs.left(bound))
        needs.check(bound, needs.least_blocks)
        return max(needs.least_blocks, min(wanted // needs.block, tables.most_blocks))
    blocks = options.kv_cache_memory // needs.block
    if not blocks:
        pool, block = human_bytes(options.kv_cache_memory), human_bytes(needs.block)
        raise ModelDoesNotFit(f"a KV pool of {pool} holds no block: {options.block_size} tokens take {block}")
    needs.check(bound, blocks)
    return blocks


def _context(options: WorkerOptions, config: ModelConfig) -> int:
    if options.max_model_len is None:
        return config.context
    if not 0 < options.max_model_len <= config.context:
        raise ModelError(
            f"--max-model-len {options.max_model_len} is not within the model's context of {config.context} tokens"
        )
    return options.max_model_len

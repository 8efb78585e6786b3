"""Attention over a paged KV pool in plain torch operations, and in fp32 whatever the pool's precision.

Work is cut into tiles: some query tokens of one row against a whole number of KV tiles of KV_TILE tokens, aligned to
absolute position. Tiles of like shape form a group that runs as one batched product. Two rules make a token's result
independent of what else is in the step and of how its prompt was chunked:

- the sum over KV goes tile by tile in position order, so masked tiles after a row's end add exact zeros;
- every product has at least ``min_query_rows`` query rows: below that, BLAS libraries change their order of
  summation (``smallest_stable_rows`` finds the number for this machine).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.backends.base import Int64Array, StepInputs
from workers.slots import Int32Array

KV_TILE = 128
"""Tokens, rounded up to whole blocks."""

_QUERY_TILES = (1, 16, 64)
"""Query tokens of a tile; a shorter rest is padded."""
_SCORES_AT_ONCE = 1 << 24
"""Scores held at once: bounds the fp32 intermediates of a group to 64 MiB."""


@dataclass(frozen=True)
class TileGroup:
    """Tiles of one shape. ``tiles`` of them, ``queries`` tokens each, over ``context`` padded KV tokens."""

    tiles: int
    queries: int
    context: int
    take: Tensor
    """int64 [tiles * queries]: token of the step; padding repeats token 0."""
    put: Tensor
    """int64 [tiles * queries]: row of the output; padding goes to the row after the last token."""
    lines: Tensor
    """int64 [kv_heads * tiles * blocks]: lines of the pool, seen from a layer's first one."""
    mask: Tensor
    """fp32 [tiles, queries, context]: 0 where a query sees a position, else -inf."""


class KVPool:
    """K and V in blocks: [num_blocks + 2, layers, K or V, kv_heads, block_size * head_dim].

    A block holds all layers, so that memory is taken block by block as they are first written. Of the two extra blocks
    the first stays zero (padding reads it) and the second takes the writes of padding tokens.

    A *line* is the last dimension: one block of one KV head. Lines of a block are ``lines_per_block`` apart from those
    of the next, in every layer: so one index serves all layers, each seen from its own first line.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kv_heads, self.head_dim, self.block_size = kv_heads, head_dim, block_size
        self.lines_per_block = layers * 2 * kv_heads
        self.zero_block, self.scratch_block = num_blocks, num_blocks + 1
        self.blocks = _zeros((num_blocks + 2, layers, 2, kv_heads, block_size * head_dim), dtype, device)
        self._lines = self.blocks.view(-1, block_size * head_dim)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Lines of K and of V from a layer's first one on, each [lines, block_size * head_dim]."""
        first = index * 2 * self.kv_heads
        return self._lines[first:], self._lines[first + self.kv_heads :]

    def clear(self, blocks: Tensor) -> None:
        self.blocks[blocks] = 0


def plan_tiles(
    inputs: StepInputs, pool: KVPool, heads: int, padded_tokens: int, device: torch.device
) -> list[TileGroup]:
    """Cut a step into tile groups. ``padded_tokens`` is the number of token rows the backend computes."""
    unit = kv_tile(pool.block_size)
    grouped: dict[tuple[int, int], list[_Tile]] = {}
    for tile in _cut(inputs):
        kv_tiles = _ladder(-(-(tile.position + tile.count) // unit))
        grouped.setdefault((tile.queries, kv_tiles), []).append(tile)
    groups = []
    for (queries, kv_tiles), tiles in sorted(grouped.items()):
        at_once = max(1, _SCORES_AT_ONCE // (heads * queries * kv_tiles * unit))
        for first in range(0, len(tiles), at_once):
            part = tiles[first : first + at_once]
            groups.append(_group(part, queries, kv_tiles * unit, inputs.block_tables, pool, padded_tokens, device))
    return groups


def write_positions(inputs: StepInputs, positions: Int64Array, pool: KVPool, padded_tokens: int) -> Int64Array:
    """Where each token's K and V go: int64 [padded_tokens * kv_heads], in a layer's lines viewed as [.., head_dim]."""
    row = np.repeat(np.arange(len(inputs.lengths)), inputs.lengths)
    block = np.full(padded_tokens, pool.scratch_block, dtype=np.int64)
    block[: len(row)] = inputs.block_tables[row, positions // pool.block_size]
    offset = np.zeros(padded_tokens, dtype=np.int64)
    offset[: len(row)] = positions % pool.block_size
    line = block[:, None] * pool.lines_per_block + np.arange(pool.kv_heads)
    return (line * pool.block_size + offset[:, None]).reshape(-1)


def attend(q: Tensor, keys: Tensor, values: Tensor, group: TileGroup, pool: KVPool, min_query_rows: int) -> Tensor:
    """One group: q fp32 [tokens, heads, head_dim] already scaled → [tiles * queries, heads * head_dim]."""
    kv_heads, width = pool.kv_heads, pool.head_dim
    batch, shared = kv_heads * group.tiles, q.shape[1] // kv_heads
    rows = group.queries * shared
    q = q.index_select(0, group.take).view(group.tiles, group.queries, kv_heads, shared, width)
    q = q.permute(2, 0, 1, 3, 4).reshape(batch, rows, width)
    if rows < min_query_rows:
        q = F.pad(q, (0, 0, 0, min_query_rows - rows))
    k = keys.index_select(0, group.lines).view(batch, group.context, width).float()
    scores = torch.bmm(q, k.transpose(1, 2))[:, :rows]  # [batch, queries * shared, context]
    scores = scores.reshape(kv_heads, group.tiles, group.queries, shared, group.context)
    weights = torch.softmax(scores.add_(group.mask[None, :, :, None]), dim=-1).view(batch, rows, group.context)
    if rows < min_query_rows:
        weights = F.pad(weights, (0, 0, 0, min_query_rows - rows))
    v = values.index_select(0, group.lines).view(batch, group.context, width).float()
    out = _weighted_sum(weights, v, kv_tile(pool.block_size))[:, :rows]
    out = out.reshape(kv_heads, group.tiles, group.queries, shared, width).permute(1, 2, 0, 3, 4)
    return out.reshape(group.tiles * group.queries, kv_heads * shared * width)


def kv_tile(block_size: int) -> int:
    """Tokens of a KV tile: KV_TILE in whole blocks."""
    return -(-KV_TILE // block_size) * block_size


def smallest_stable_rows(shared: int, head_dim: int, block_size: int) -> int:
    """Fewest query rows whose products have the bits of a large tile's, tried on this machine's BLAS."""
    generator = torch.Generator().manual_seed(0)
    unit = kv_tile(block_size)
    q = torch.randn(2, 64, head_dim, generator=generator)
    k = torch.randn(2, 2 * unit, head_dim, generator=generator)
    v = torch.randn(2, 2 * unit, head_dim, generator=generator)

    def products(rows: int) -> tuple[Tensor, Tensor]:
        scores = torch.bmm(q[:, :rows].contiguous(), k.transpose(1, 2))
        return scores, _weighted_sum(torch.softmax(scores, dim=-1), v, unit)

    scores, out = products(64)
    for rows in (shared, 4, 8, 16, 32):
        if rows >= shared:
            fewer_scores, fewer_out = products(rows)
            if torch.equal(fewer_scores, scores[:, :rows]) and torch.equal(fewer_out, out[:, :rows]):
                return rows
    return 64


@dataclass(frozen=True)
class _Tile:
    row: int
    token: int
    """First token, counted over the step."""
    position: int
    count: int
    queries: int
    """Padded count."""


def _cut(inputs: StepInputs) -> Iterator[_Tile]:
    token = 0
    for row, (start, length) in enumerate(zip(inputs.starts.tolist(), inputs.lengths.tolist(), strict=True)):
        done = 0
        while done < length:
            queries = next((size for size in _QUERY_TILES if size >= length - done), _QUERY_TILES[-1])
            count = min(queries, length - done)
            yield _Tile(row, token + done, start + done, count, queries)
            done += count
        token += length


def _ladder(tiles: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16 …: few groups for little padding."""
    power = 1 << (tiles - 1).bit_length()
    return power * 3 // 4 if power >= 4 and tiles <= power * 3 // 4 else power


def _group(
    tiles: list[_Tile],
    queries: int,
    context: int,
    block_tables: Int32Array,
    pool: KVPool,
    padded_tokens: int,
    device: torch.device,
) -> TileGroup:
    first = np.array([tile.token for tile in tiles], dtype=np.int64)
    position = np.array([tile.position for tile in tiles], dtype=np.int64)
    count = np.array([tile.count for tile in tiles], dtype=np.int64)
    rows = np.array([tile.row for tile in tiles], dtype=np.int64)
    step = np.arange(queries)
    real = step < count[:, None]  # [tiles, queries]
    take = np.where(real, first[:, None] + step, 0)
    put = np.where(real, take, padded_tokens)
    last_seen = np.where(real, position[:, None] + step, 0)
    mask = np.where(np.arange(context) <= last_seen[:, :, None], np.float32(0), np.float32(-np.inf))
    wanted = context // pool.block_size
    width = min(wanted, block_tables.shape[1])
    table = np.full((len(tiles), wanted), pool.zero_block, dtype=np.int64)
    used = -(-(position + count) // pool.block_size)
    table[:, :width] = np.where(np.arange(width) < used[:, None], block_tables[rows, :width], pool.zero_block)
    lines = table * pool.lines_per_block + np.arange(pool.kv_heads)[:, None, None]
    return TileGroup(
        tiles=len(tiles),
        queries=queries,
        context=context,
        take=torch.from_numpy(take.reshape(-1)).to(device),
        put=torch.from_numpy(put.reshape(-1)).to(device),
        lines=torch.from_numpy(lines.reshape(-1)).to(device),
        mask=torch.from_numpy(mask).to(device),
    )


def _weighted_sum(weights: Tensor, v: Tensor, unit: int) -> Tensor:
    """weights [batch, rows, context] @ v [batch, context, head_dim], one KV tile after another."""
    out = torch.bmm(weights[..., :unit], v[:, :unit])
    for start in range(unit, weights.shape[-1], unit):
        out = torch.baddbmm(out, weights[..., start : start + unit], v[:, start : start + unit])
    return out


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU from calloc, so that the kernel gives pages only as they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)

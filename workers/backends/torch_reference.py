"""The decoder in plain torch operations, on any device: what other backends are compared with.

On the CPU the bits of a row's fp32 logits do not depend on the rest of the step, on chunking or on preemption: matrix
products come from a checked ladder of row counts (``row_ladder``), attention sums in one order (``paged_attention``),
everything else works on rows one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.backends.base import Int64Array, StepInputs
from workers.backends.paged_attention import (
    KVPool,
    TileGroup,
    attend,
    plan_tiles,
    smallest_stable_rows,
    write_positions,
)
from workers.backends.row_ladder import LADDER, REFERENCE_ROWS, CpuLinear, agree_on_rows, padded_rows
from workers.model.checkpoint import Checkpoint
from workers.model.config import ModelConfig
from workers.model.decoder import Decoder, Linear
from workers.slots import BoolArray, Int32Array

_JUDGED_AT_ONCE = 64
"""Prompt tokens whose logits exist at a time."""


@dataclass(frozen=True)
class TorchOutputs:
    """What a step gave; see ``StepOutputs``."""

    logits: Tensor
    broken: BoolArray
    judged: Iterator[Tensor]


class TorchReference:
    """Backend of plain torch."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        positions: int,
        progress: Callable[[float], None],
    ) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._linears: list[CpuLinear] = []
        with torch.inference_mode():
            self._decoder = Decoder(
                config,
                checkpoint,
                self._make_linear,
                dtype=dtype,
                device=device,
                positions=positions,
                progress=progress,
            )
        self._pool: KVPool | None = None
        self._body_rows: tuple[int, ...] = LADDER
        self._head_rows: tuple[int, ...] = LADDER
        self._query_rows = 1

    @property
    def name(self) -> str:
        return f"torch reference, {self._device}, {_name(self._dtype)}"

    @property
    def numeric_class(self) -> dict[str, str]:
        device = torch.cuda.get_device_name(self._device) if self._on_cuda else torch.backends.cpu.get_cpu_capability()
        return {
            "backend": "torch reference 1",
            "torch": torch.__version__,
            "device": f"{self._device.type} {device}",
            "dtype": _name(self._dtype),
            "kv dtype": _name(self._dtype),
            "query rows": str(self._query_rows),
        }

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        config = self._config
        self._pool = KVPool(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            num_blocks,
            block_size,
            self._dtype,
            self._device,
        )

    def warm_up(self, max_tokens: int, max_rows: int) -> None:
        """Choose row counts that agree, which also prepares the library's kernels, and run one small step."""
        pool = self._allocated()
        if not self._on_cuda:
            with torch.inference_mode():
                self._body_rows = agree_on_rows(self._linears[:-1], max_tokens)
                # The head is as fast in pieces of the reference count, and trying more of it takes long.
                self._head_rows = agree_on_rows(self._linears[-1:], min(max_rows, REFERENCE_ROWS))
            self._query_rows = smallest_stable_rows(self._config.group_size, self._config.head_dim, pool.block_size)
        zeros = np.zeros(1, dtype=np.int32)
        self._step(
            StepInputs(
                tokens=np.zeros(1, dtype=np.int64),
                starts=zeros,
                lengths=np.ones(1, dtype=np.int32),
                block_tables=np.full((1, 1), pool.scratch_block, dtype=np.int32),
                samples=np.ones(1, dtype=np.bool_),
            )
        )

    def step(self, inputs: StepInputs) -> TorchOutputs:
        return self._step(inputs)

    def clear_blocks(self, blocks: Int32Array) -> None:
        self._allocated().clear(torch.from_numpy(blocks.astype(np.int64)).to(self._device))

    def close(self) -> None:
        self._pool = None
        self._linears.clear()
        del self._decoder

    @property
    def _on_cuda(self) -> bool:
        return self._device.type == "cuda"

    def _allocated(self) -> KVPool:
        assert self._pool is not None, "allocate_kv comes first"
        return self._pool

    def _make_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self._on_cuda:
            return partial(F.linear, weight=weight, bias=bias)
        linear = CpuLinear(weight, bias)
        self._linears.append(linear)
        return linear

    def _padded(self, rows: int, ladder: tuple[int, ...]) -> int:
        return rows if self._on_cuda else padded_rows(rows, ladder)

    @torch.inference_mode()
    def _step(self, inputs: StepInputs) -> TorchOutputs:
        pool, device = self._allocated(), self._device
        count = len(inputs.tokens)
        padded = self._padded(count, self._body_rows)
        positions = _positions(inputs)
        groups = plan_tiles(inputs, pool, self._config.num_heads, padded, device)
        write = torch.from_numpy(write_positions(inputs, positions, pool, padded)).to(device)
        attention = _Attention(pool, groups, write, self._query_rows, self._config.head_dim**-0.5)
        hidden = self._decoder.forward(
            _padded_to(inputs.tokens, padded, device), _padded_to(positions, padded, device), attention
        )
        last = np.cumsum(inputs.lengths, dtype=np.int64) - 1
        rows = hidden[torch.from_numpy(last).to(device)]  # [rows, hidden]
        normed = self._decoder.normed(self._with_company(rows))[: len(last)]
        broken = ~torch.isfinite(normed).all(dim=-1).cpu().numpy()
        logits = self._logits(normed[torch.from_numpy(inputs.samples).to(device)])
        return TorchOutputs(logits, broken, self._judged(hidden[torch.from_numpy(inputs.judged).to(device)]))

    def _judged(self, hidden: Tensor) -> Iterator[Tensor]:
        """Logits of hidden states [judged, hidden], a few rows at a time: a long prompt's do not fit a memory."""
        for rows in hidden.split(_JUDGED_AT_ONCE) if len(hidden) else ():
            with torch.inference_mode():
                yield self._logits(self._decoder.normed(self._with_company(rows))[: len(rows)])

    def _with_company(self, rows: Tensor) -> Tensor:
        """A lone row gets a second one: torch reduces a single row another way than several."""
        return F.pad(rows, (0, 0, 0, 1)) if rows.shape[0] == 1 else rows

    def _logits(self, normed: Tensor) -> Tensor:
        rows = normed.shape[0]
        if not rows:
            return normed.new_empty(0, self._config.vocab_size)
        padded = self._padded(rows, self._head_rows)
        return self._decoder.logits(F.pad(normed, (0, 0, 0, padded - rows)))[:rows]


class _Attention:
    """Attention of one step: the same tiles for every layer."""

    def __init__(self, pool: KVPool, groups: list[TileGroup], write: Tensor, min_query_rows: int, scale: float) -> None:
        self._pool, self._groups, self._write = pool, groups, write
        self._min_query_rows, self._scale = min_query_rows, scale

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool = self._pool
        keys, values = pool.layer(layer)
        width = pool.head_dim
        keys.view(-1, width).index_copy_(0, self._write, k.reshape(-1, width).to(keys.dtype))
        values.view(-1, width).index_copy_(0, self._write, v.reshape(-1, width).to(values.dtype))
        q = q * self._scale
        tokens = q.shape[0]
        out = q.new_zeros(tokens + 1, q.shape[1] * width)
        for group in self._groups:
            out.index_copy_(0, group.put, attend(q, keys, values, group, pool, self._min_query_rows))
        return out[:tokens]


def _positions(inputs: StepInputs) -> Int64Array:
    """Position of every token, int64 [tokens]."""
    ends = np.cumsum(inputs.lengths, dtype=np.int64)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - inputs.lengths, inputs.lengths)
    return within + np.repeat(inputs.starts, inputs.lengths)


def _padded_to(values: Int64Array, count: int, device: torch.device) -> Tensor:
    padded = np.zeros(count, dtype=np.int64)
    padded[: len(values)] = values
    return torch.from_numpy(padded).to(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""The transformer itself: token ids and positions in, hidden states out. Knows nothing of caches, batches or plans:
attention and matrix products are handed in by a backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.checkpoint import EMBEDDING, FINAL_NORM, HEAD, ROPE_FACTORS, Checkpoint, layer_prefix
from workers.model.config import ModelConfig
from workers.model.rope import inverse_frequencies, rope_tables


class Linear(Protocol):
    """x [rows, in] → [rows, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class MakeLinear(Protocol):
    """Prepares weight [out, in] and bias [out] for a backend; may keep copies of its own and drop these."""

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Linear: ...


class Attention(Protocol):
    """Writes K/V of the step's tokens into a layer's cache, then attends from it.

    q fp32 [tokens, heads, head_dim]; k fp32 and v [tokens, kv_heads, head_dim] → [tokens, heads * head_dim].
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, fused where two products share an input."""

    input_norm: Tensor
    qkv: Linear
    attention_out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Embedding, layers, final norm and head."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        make_linear: MakeLinear,
        *,
        dtype: torch.dtype,
        device: torch.device,
        positions: int,
        progress: Callable[[float], None],
    ) -> None:
        self.config = config
        self.dtype = dtype
        loader = _Loader(checkpoint, make_linear, dtype, device)
        self.layers = []
        for index in range(config.num_layers):
            self.layers.append(loader.layer(layer_prefix(index)))
            progress((index + 1) / config.num_layers)
        self.embedding = loader.tensor(EMBEDDING)
        self.final_norm = loader.tensor(FINAL_NORM, torch.float32)
        head = EMBEDDING if config.tied_embeddings else HEAD
        self.head = loader.linear([head], dtype=torch.float32)
        factors = checkpoint.tensor(ROPE_FACTORS).numpy() if ROPE_FACTORS in checkpoint.shapes() else None
        tables = rope_tables(inverse_frequencies(config.rope, config.head_dim, factors), positions)
        cos, sin = map(torch.from_numpy, tables)
        # For both halves of a head; sin is negated in the first, see ``rotate``.
        self.cos, self.sin = torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """tokens, positions int64 [tokens] → hidden states before the final norm [tokens, hidden]."""
        config = self.config
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]  # [tokens, 1, head_dim]
        x = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            h = self._norm(x, layer.input_norm)
            qkv = layer.qkv(h).view(-1, heads + 2 * kv_heads, width)
            rotated = rotate(qkv[:, : heads + kv_heads].float(), cos, sin)
            mixed = attend(index, rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :])
            x = x + layer.attention_out(mixed.to(self.dtype))
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return x

    def normed(self, hidden: Tensor) -> Tensor:
        """Final norm, fp32."""
        return F.rms_norm(hidden.float(), (self.config.hidden_size,), self.final_norm, self.config.norm_eps)

    def logits(self, normed: Tensor) -> Tensor:
        """fp32 [rows, hidden] → fp32 [rows, vocab]."""
        return self.head(normed)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.norm_eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate fp32 heads x [tokens, heads, head_dim] by tables taken at their positions [tokens, 1, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((high, low), dim=-1).mul_(sin).add_(x * cos)


class _Loader:
    """Reads, casts, fuses and places weights."""

    def __init__(
        self, checkpoint: Checkpoint, make_linear: MakeLinear, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._names = checkpoint.shapes().keys()
        self._make_linear = make_linear
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of its own, so that the mapped file can be let go."""
        return self._checkpoint.tensor(name).to(self._device, dtype or self._dtype, copy=True)

    def linear(self, names: list[str], *, dtype: torch.dtype | None = None) -> Linear:
        """Matrices with one input, stacked by output rows."""
        parts = [self._checkpoint.tensor(name).to(self._device, dtype or self._dtype) for name in names]
        biases = [name.removesuffix("weight") + "bias" for name in names]
        present = [name in self._names for name in biases]
        bias = None
        if any(present):
            bias = torch.cat([self.tensor(name, dtype) for name in biases])
        return self._make_linear(parts[0] if len(parts) == 1 else torch.cat(parts), bias)

    def layer(self, prefix: str) -> Layer:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return Layer(
            input_norm=self.tensor(f"{prefix}input_layernorm.weight"),
            qkv=self.linear([f"{attention}{name}_proj.weight" for name in "qkv"]),
            attention_out=self.linear([f"{attention}o_proj.weight"]),
            mlp_norm=self.tensor(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self.linear([f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"]),
            down=self.linear([f"{mlp}down_proj.weight"]),
        )

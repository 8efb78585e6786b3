"""What a decoder is built from: the part of config.json that decides arithmetic and shapes.

Reads both spellings in use: ``rope_theta`` with ``rope_scaling``, and transformers 5's ``rope_parameters``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from workers.model.errors import ModelError

FAMILIES = {"LlamaForCausalLM": "llama"}
"""Architectures this decoder computes, by the name in config.json."""

ROPE_TYPES = ("default", "linear", "llama3")

_Value = TypeVar("_Value", int, float, str, bool)


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: the base, and how it is stretched beyond the trained context."""

    theta: float
    kind: str = "default"
    """One of ROPE_TYPES."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    """Tokens of context before stretching; llama3 only."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer: RMSNorm, rotary embedding, grouped-query attention, SwiGLU."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context: int
    """Longest sequence the model was made for, in tokens."""
    rope: RopeConfig
    tied_embeddings: bool
    attention_bias: bool = False
    """q, k, v and o projections have biases."""
    mlp_bias: bool = False
    dtype: str = ""
    """Precision named in config.json; empty when it names none."""

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """K and V of all layers for one token, in bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read config.json; raises ModelError naming the field or the architecture that is not understood."""
        family = _family(config)
        heads = _field(config, "num_attention_heads", int)
        hidden = _field(config, "hidden_size", int)
        result = cls(
            family=family,
            vocab_size=_field(config, "vocab_size", int),
            hidden_size=hidden,
            intermediate_size=_field(config, "intermediate_size", int),
            num_layers=_field(config, "num_hidden_layers", int),
            num_heads=heads,
            num_kv_heads=_field(config, "num_key_value_heads", int, heads),
            head_dim=_field(config, "head_dim", int, hidden // max(heads, 1)),
            norm_eps=_field(config, "rms_norm_eps", float, 1e-6),
            context=_field(config, "max_position_embeddings", int, 2048),
            rope=_rope(config),
            tied_embeddings=_field(config, "tie_word_embeddings", bool, False),
            attention_bias=_field(config, "attention_bias", bool, False),
            mlp_bias=_field(config, "mlp_bias", bool, False),
            dtype=_field(config, "dtype", str, _field(config, "torch_dtype", str, "")),
        )
        _check(result, _field(config, "hidden_act", str, "silu"))
        return result


def _family(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or []
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    if not architectures and config.get("model_type") in FAMILIES.values():
        return str(config["model_type"])
    found = ", ".join(map(str, architectures)) or config.get("model_type") or "none named in config.json"
    raise ModelError(f"architecture not supported: {found}; supported: {', '.join(sorted(FAMILIES))}")


def _field(config: Mapping[str, Any], name: str, kind: type[_Value], default: _Value | None = None) -> _Value:
    value = config.get(name)
    if value is None:
        if default is None:
            raise ModelError(f"config.json has no {name}")
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return kind(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ModelError(f"config.json: {name} is {value!r}, not a value of type {kind.__name__}")
    return value


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    nested = config.get("rope_parameters") or {}
    scaling = nested or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"config.json: the rope parameters are {scaling!r}, not an object")
    theta = _field(nested or config, "rope_theta", float, 10000.0)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope type not supported: {kind}; supported: {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=_field(scaling, "factor", float))
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=_field(scaling, "factor", float),
        low_freq_factor=_field(scaling, "low_freq_factor", float),
        high_freq_factor=_field(scaling, "high_freq_factor", float),
        original_context=_field(scaling, "original_max_position_embeddings", int),
    )


def _check(config: ModelConfig, activation: str) -> None:
    sizes = (
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.context,
    )
    if min(sizes) < 1:
        raise ModelError("config.json: a size is less than 1")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"config.json: {config.num_heads} heads do not divide over {config.num_kv_heads} KV heads")
    if config.head_dim % 2:
        raise ModelError(f"config.json: head_dim {config.head_dim} is odd")
    if activation not in ("silu", "swish"):
        raise ModelError(f"activation not supported: {activation}; supported: silu")

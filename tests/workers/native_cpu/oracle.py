"""The same decoder in plain numpy, one sequence at a time: fp64 but for what the library keeps in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.workers.native_cpu.rig import TinyModel
from workers.backends.native_cpu.library import Activation, Matrix, Vector

Array = npt.NDArray[np.float64]


def oracle_logits(model: TinyModel, tokens: Sequence[int]) -> Array:
    """[tokens, vocab]"""
    shape = model.shape
    weight = {key: values.astype(np.float64) for key, values in model.matrices.items()}
    x = weight[Matrix.EMBEDDING, 0, 0][list(tokens)] * shape.embedding_multiplier
    for layer in range(shape.layers):
        h = _norm(x, model.vectors[Vector.INPUT_NORM, layer])
        qkv = np.concatenate([h @ weight[Matrix.QKV, layer, part].T for part in range(3)], axis=1)
        mixed = _attend(model, qkv + model.vectors.get((Vector.QKV_BIAS, layer), 0), layer)
        branch = mixed @ weight[Matrix.ATTENTION_OUT, layer, 0].T
        branch = branch + model.vectors.get((Vector.ATTENTION_OUT_BIAS, layer), 0)
        if shape.branch_norms:
            branch = _norm(branch, model.vectors[Vector.POST_ATTENTION_NORM, layer])
        x = x + shape.residual_multiplier * branch
        h = _norm(x, model.vectors[Vector.MLP_NORM, layer])
        bias = model.vectors.get((Vector.GATE_UP_BIAS, layer), np.zeros(2 * shape.inner))
        gate = h @ weight[Matrix.GATE_UP, layer, 0].T + bias[: shape.inner]
        up = h @ weight[Matrix.GATE_UP, layer, 1].T + bias[shape.inner :]
        branch = (_activated(gate, shape.activation) * up) @ weight[Matrix.DOWN, layer, 0].T
        branch = branch + model.vectors.get((Vector.DOWN_BIAS, layer), 0)
        if shape.branch_norms:
            branch = _norm(branch, model.vectors[Vector.POST_MLP_NORM, layer])
        x = x + shape.residual_multiplier * branch
    head = weight[Matrix.EMBEDDING if shape.tied else Matrix.HEAD, 0, 0]
    return _capped(_norm(x, model.vectors[Vector.FINAL_NORM, 0]) @ head.T, shape.logit_softcap)


def _attend(model: TinyModel, qkv: Array, layer: int) -> Array:
    shape, count = model.shape, len(qkv)
    heads = qkv.reshape(count, -1, shape.head_dim)
    q, k, v = np.split(heads, [shape.heads, shape.heads + shape.kv_heads], axis=1)
    if shape.qk_norm:
        q, k = _norm(q, model.vectors[Vector.Q_NORM, layer]), _norm(k, model.vectors[Vector.K_NORM, layer])
    q, k = _rotated(model, q), _bf16(_rotated(model, k))
    v = _bf16(v)
    position = np.arange(count)
    seen = position[:, None] >= position
    window = shape.windows[layer] if shape.windows else 0
    if window:
        seen &= position[:, None] - position < window
    out = np.empty_like(q)
    for head in range(shape.heads):
        kv_head = head // (shape.heads // shape.kv_heads)
        scores = _capped(q[:, head] @ k[:, kv_head].T * shape.head_dim**-0.5, shape.attention_softcap)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, kv_head]
    return out.reshape(count, -1)


def _rotated(model: TinyModel, x: Array) -> Array:
    cos, sin = model.cos[: len(x), None].astype(np.float64), model.sin[: len(x), None].astype(np.float64)
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


def _norm(x: Array, weight: npt.NDArray[np.float32]) -> Array:
    result: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * weight
    return result


def _activated(x: Array, activation: Activation) -> Array:
    if activation is Activation.SILU:
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _capped(x: Array, cap: float) -> Array:
    return cap * np.tanh(x / cap) if cap else x


def _bf16(x: Array) -> Array:
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)

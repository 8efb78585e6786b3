"""Weights by name: which tensors a decoder needs, and where they come from.

Tensors have Hugging Face names here, whatever the file calls them. Torch is needed by those who ask for tensors only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.model_files.artefact_error import ArtefactError
from headrace.model_files.cache import publish_file
from workers.model.config import ModelConfig
from workers.model.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
ROPE_FACTORS = "rope_freqs"
"""Optional, fp32 [head_dim / 2]: see ``rope.inverse_frequencies``."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAMED_AT_MOST = 4


class Checkpoint(Protocol):
    """Tensors of one model."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by name."""

    def stored_dtype(self) -> torch.dtype:
        """Precision of the embedding as stored."""

    def tensor(self, name: str) -> Tensor:
        """One tensor; the caller does not write to it."""


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder needs, by name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        for name, shape in matrices.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if config.attention_bias if name.startswith("self_attn") else config.mlp_bias:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def check_tensors(config: ModelConfig, found: Mapping[str, Sequence[int]], source: Path) -> None:
    """Raise ModelError naming missing, unexpected or misshapen tensors."""
    expected = expected_shapes(config)
    if missing := sorted(expected.keys() - found.keys()):
        raise ModelError(f"{source}: missing tensors: {_some(missing)}")
    if unexpected := sorted(name for name in found.keys() - expected.keys() if not _harmless(config, name)):
        raise ModelError(f"{source}: unexpected tensors: {_some(unexpected)}")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ModelError(f"{source}: {name} has shape {list(found[name])}; config.json means {list(shape)}")


def safetensors_files(directory: Path) -> list[Path]:
    """The weight files of a Hugging Face directory, in the order of their names. Raises ModelError."""
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index}: not an index of safetensors files") from error
        if outside := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
            raise ModelError(f"{index}: names a file outside its directory: {outside[0]}")
    else:
        names = [_SINGLE]
    for name in names:
        if not (directory / name).is_file():
            raise ModelError(f"{directory} has no {name}" + (f", which {_INDEX} names" if index.is_file() else ""))
    return [directory / name for name in names]


def content_id(files: Sequence[Path], cache: Path) -> bytes:
    """blake2b-128 of the files' bytes.

    Read once per file version: the digest is kept in the cache by path, inode, size and time of change.
    """
    with ThreadPoolExecutor(max_workers=8) as pool:
        digests = list(pool.map(lambda file: _file_digest(file, cache), files))
    return hashlib.blake2b(b"".join(digests), digest_size=16).digest()


def _file_digest(file: Path, cache: Path) -> bytes:
    status = file.stat()
    identity = f"{file.resolve()}\0{status.st_ino}\0{status.st_size}\0{status.st_mtime_ns}".encode()
    kept = cache / "content-ids" / hashlib.blake2b(identity, digest_size=16).hexdigest()
    if kept.is_file() and len(digest := kept.read_bytes()) == 16:
        return digest
    with file.open("rb") as data:
        digest = hashlib.file_digest(data, lambda: hashlib.blake2b(digest_size=16)).digest()
    try:
        publish_file(kept, digest)
    except ArtefactError:
        return digest  # an unwritable cache costs the next start this reading again, nothing else
    return digest


def _harmless(config: ModelConfig, name: str) -> bool:
    """Tensors that some checkpoints carry and nobody needs."""
    return name == ROPE_FACTORS or name.endswith(".rotary_emb.inv_freq") or (name == HEAD and config.tied_embeddings)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED_AT_MOST])
    return shown if len(names) <= _NAMED_AT_MOST else f"{shown} and {len(names) - _NAMED_AT_MOST} more"

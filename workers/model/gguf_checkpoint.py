"""Weights out of a GGUF file: names, row order and block formats turned into what the decoder expects.

Tensors are decoded from the mapped file when asked for. ``open_gguf`` keeps a whole decoded file in the cache, so that
only the first start in a precision pays for decoding.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.model_files.artefact_error import ArtefactError
from headrace.model_files.cache import private_directory
from headrace.model_files.gguf_metadata import GgufMetadata, TensorEntry, read_metadata
from workers.model.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ROPE_FACTORS,
    Checkpoint,
    SafetensorsCheckpoint,
    check_tensors,
    layer_prefix,
)
from workers.model.config import ModelConfig
from workers.model.dequantise import dequantise
from workers.model.errors import ModelError

_log = logging.getLogger(__name__)

_CONVERTER_VERSION = 1
"""Raise it when the same file should be decoded differently than before."""

_TOP_LEVEL = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": HEAD,
    "rope_freqs.weight": ROPE_FACTORS,
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_SLAB_VALUES = 1 << 22
"""Values decoded at once: bounds the fp32 intermediates to a few tens of megabytes."""

_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class GgufCheckpoint:
    """A GGUF file of the Llama architecture."""

    def __init__(self, metadata: GgufMetadata, config: ModelConfig) -> None:
        self.path = metadata.path
        self._config = config
        self._entries = {_hugging_face_name(entry.name): entry for entry in metadata.tensors}
        try:
            # Copy-on-write: torch wants writable memory, and nobody writes to it.
            self._data = np.memmap(metadata.path, dtype=np.uint8, mode="c")
        except (OSError, ValueError) as error:
            raise ModelError(f"{metadata.path}: cannot be read: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def stored_dtype(self) -> torch.dtype:
        return torch.float32

    def tensor(self, name: str) -> Tensor:
        """Decoded, fp32."""
        return self.decoded(name, torch.float32)

    def decoded(self, name: str, dtype: torch.dtype) -> Tensor:
        entry = self._entries[name]
        rows = self._raw_rows(entry)
        if heads := self._interleaved_heads(name):
            rows = _deinterleave(rows, heads)
        kind = _type_name(entry)
        slab = max(1, _SLAB_VALUES // entry.shape[-1])
        parts = [dequantise(part, kind).to(dtype) for part in rows.split(slab)]
        return torch.cat(parts).reshape(entry.shape)

    def _raw_rows(self, entry: TensorEntry) -> Tensor:
        """The tensor's bytes, uint8 [rows, bytes of a row]; a vector is a column of rows."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[_type_name(entry)]]
        shape = (*entry.shape, 1) if len(entry.shape) == 1 and block == 1 else entry.shape
        width, rows = shape[-1], int(np.prod(shape[:-1]))
        if width % block:
            raise ModelError(f"{self.path}: {entry.name} has rows of {width} values, not whole blocks of {block}")
        row_bytes = width // block * size
        end = entry.offset + rows * row_bytes
        if end > len(self._data):
            raise ModelError(f"{self.path}: the file ends inside {entry.name}")
        return torch.from_numpy(self._data[entry.offset : end]).reshape(rows, row_bytes)

    def _interleaved_heads(self, name: str) -> int:
        """Heads whose rows GGUF stores with the rotary pairs side by side; 0 for other tensors."""
        if "q_proj" in name:
            return self._config.num_heads
        return self._config.num_kv_heads if "k_proj" in name else 0


def open_gguf(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    content: bytes,
    cache: Path,
    progress: Callable[[float], None],
) -> Checkpoint:
    """The file decoded to ``dtype``: from the cache, where the first call puts it.

    ``content`` names the file's bytes. When the cache cannot be written, tensors are decoded as they are asked for.
    """
    kept = cache / "weights" / f"gguf-{_CONVERTER_VERSION}-{content.hex()}-{_SAFETENSORS_NAMES[dtype]}.safetensors"
    if not kept.is_file():
        checkpoint = GgufCheckpoint(read_metadata(path), config)
        check_tensors(config, checkpoint.shapes(), path)
        try:
            _write_safetensors(checkpoint, dtype, kept, progress)
        except (OSError, ArtefactError) as error:
            _log.warning("decoded weights are not kept: %s", error)
            return checkpoint
    decoded = SafetensorsCheckpoint([kept])
    check_tensors(config, decoded.shapes(), kept)
    return decoded


def _write_safetensors(
    checkpoint: GgufCheckpoint, dtype: torch.dtype, target: Path, progress: Callable[[float], None]
) -> None:
    """Decode into a safetensors file, one tensor in memory at a time; it appears whole or not at all."""
    private_directory(target.parent)
    shapes = checkpoint.shapes()
    header, end = {}, 0
    for name, shape in shapes.items():
        kind = torch.float32 if name == ROPE_FACTORS else dtype
        start, end = end, end + int(np.prod(shape)) * kind.itemsize
        header[name] = {"dtype": _SAFETENSORS_NAMES[kind], "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    handle, made = tempfile.mkstemp(prefix=".making-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for done, name in enumerate(shapes):
                tensor = checkpoint.decoded(name, torch.float32 if name == ROPE_FACTORS else dtype)
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                progress((done + 1) / len(shapes))
        Path(made).replace(target)
    finally:
        Path(made).unlink(missing_ok=True)


def _hugging_face_name(name: str) -> str:
    """A name this module does not know is kept, and reported with the unexpected ones."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        return name
    return f"{layer_prefix(int(match[1]))}{_IN_LAYER[match[2]]}.{match[3]}"


def _type_name(entry: TensorEntry) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(entry.ggml_type).name
    except ValueError:
        return f"number {entry.ggml_type}"


def _deinterleave(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of q and k rows: pairs side by side → first halves of all pairs, then second halves."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)

"""Tensors out of a GGUF file of the Llama architecture: names and row order turned into what the decoder expects.

Data stays as it lies in the mapped file, block formats included.
"""

from __future__ import annotations

import re

import numpy as np

from headrace.model_files.gguf_metadata import GgufMetadata, TensorEntry
from workers.model.checkpoint import EMBEDDING, FINAL_NORM, HEAD, ROPE_FACTORS, layer_prefix
from workers.model.config import ModelConfig
from workers.model.errors import ModelError
from workers.model.raw_tensors import RawTensor, deinterleaved

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


class GgufTensors:
    """A mapped GGUF file."""

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

    def raw(self, name: str) -> RawTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        entry = self._entries[name]
        kind = _type_name(entry)
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        if entry.shape[-1] % block:
            raise ModelError(
                f"{self.path}: {entry.name} has rows of {entry.shape[-1]} values, not whole blocks of {block}"
            )
        end = entry.offset + int(np.prod(entry.shape, dtype=np.int64)) // block * size
        if end > len(self._data):
            raise ModelError(f"{self.path}: the file ends inside {entry.name}")
        heads = self._interleaved_heads(name)
        order = deinterleaved(entry.shape[0], heads) if heads else None
        return RawTensor(kind, entry.shape, self._data[entry.offset : end], order)

    def _interleaved_heads(self, name: str) -> int:
        """Heads whose rows GGUF stores with the rotary pairs side by side; 0 for other tensors."""
        if "q_proj" in name:
            return self._config.num_heads
        return self._config.num_kv_heads if "k_proj" in name else 0


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
        raise ModelError(f"GGUF tensor type not supported: number {entry.ggml_type} of {entry.name}") from None

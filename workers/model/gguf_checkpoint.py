"""Weights of a GGUF file decoded to plain precisions.

Tensors are decoded from the mapped file when asked for. ``open_gguf`` keeps a whole decoded file in the cache, so that
only the first start in a precision pays for decoding.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.model_files.artefact_error import ArtefactError
from headrace.model_files.cache import private_directory
from headrace.model_files.gguf_metadata import GgufMetadata, read_metadata
from workers.model.checkpoint import ROPE_FACTORS, Checkpoint, check_tensors
from workers.model.config import ModelConfig
from workers.model.dequantise import dequantise
from workers.model.gguf_tensors import GgufTensors
from workers.model.safetensors_checkpoint import SafetensorsCheckpoint

_log = logging.getLogger(__name__)

_CONVERTER_VERSION = 1
"""Raise it when the same file should be decoded differently than before."""

_SLAB_VALUES = 1 << 22
"""Values decoded at once: bounds the fp32 intermediates to a few tens of megabytes."""

_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class GgufCheckpoint:
    """A GGUF file of the Llama architecture, decoded tensor by tensor."""

    def __init__(self, metadata: GgufMetadata, config: ModelConfig) -> None:
        self._tensors = GgufTensors(metadata, config)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._tensors.shapes()

    def stored_dtype(self) -> torch.dtype:
        return torch.float32

    def tensor(self, name: str) -> Tensor:
        """Decoded, fp32."""
        return self.decoded(name, torch.float32)

    def decoded(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._tensors.raw(name)
        width = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        rows = torch.from_numpy(tensor.data).reshape(int(np.prod(tensor.shape)) // width, -1)
        if tensor.row_order is not None:
            rows = rows[torch.from_numpy(tensor.row_order)]
        slab = max(1, _SLAB_VALUES // width)
        parts = [dequantise(part, tensor.kind).to(dtype) for part in rows.split(slab)]
        return torch.cat(parts).reshape(tensor.shape)


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

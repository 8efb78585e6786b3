"""GGUF files give the same weights as the model they were made from, in every block format."""

from __future__ import annotations

import math
import stat
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.model_files.gguf_metadata import read_metadata
from tests.workers.model_rig import LLAMA3_ROPE, ignore_progress, tiny_llama
from workers.model.checkpoint import ROPE_FACTORS, Checkpoint
from workers.model.config import ModelConfig, RopeConfig
from workers.model.dequantise import SUPPORTED, dequantise
from workers.model.errors import ModelError
from workers.model.gguf_checkpoint import GgufCheckpoint, open_gguf
from workers.model.rope import Float32Array, inverse_frequencies

SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
SCALES |= {"Q6_K": (208,)}
"""Byte offsets of a block's fp16 scales, by type; random bytes there could be infinite."""


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_type_decodes_random_blocks_as_gguf_does(kind: str) -> None:
    generator = np.random.default_rng(5)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if block == 1:
        rows = gguf.quantize(generator.standard_normal((7, 96), dtype=np.float32), gguf.GGMLQuantizationType[kind])
        rows = rows.view(np.uint8)
    else:
        rows = generator.integers(0, 256, (7, 5 * size), dtype=np.uint8)
        blocks = rows.reshape(-1, size)
        for offset in SCALES[kind]:
            scales = generator.standard_normal((len(blocks), 1)).astype(np.float16)
            blocks[:, offset : offset + 2] = scales.view(np.uint8)
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(dequantise(torch.from_numpy(rows), kind).numpy(), expected)


def test_a_type_that_is_not_supported_is_named_with_those_that_are() -> None:
    with pytest.raises(ModelError, match="IQ4_XS; supported: F32, F16, BF16, Q4_0"):
        dequantise(torch.zeros(1, 136, dtype=torch.uint8), "IQ4_XS")


def test_names_row_order_and_scaling_come_back(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=False, attention_bias=True)
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = _write(tmp_path, model, extra={"rope_freqs.weight": factors})
    config = _config(model)
    checkpoint = GgufCheckpoint(read_metadata(path), config)
    expected = model.state_dict()
    assert checkpoint.shapes().keys() - {ROPE_FACTORS} == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
    assert torch.equal(checkpoint.tensor(ROPE_FACTORS), torch.from_numpy(factors))


def test_factors_in_the_file_scale_as_llama3_does() -> None:
    rope = ModelConfig.from_dict(tiny_llama(rope_parameters=LLAMA3_ROPE).config.to_dict()).rope
    plain = inverse_frequencies(RopeConfig(theta=rope.theta), 64)
    scaled = inverse_frequencies(rope, 64)
    factors = _llama_cpp_factors(plain)
    assert factors[0] == 1 and factors[-1] == 8 and ((factors > 1) & (factors < 8)).any()
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(theta=rope.theta), 64, factors), scaled, rtol=1e-5)


def _llama_cpp_factors(frequencies: Float32Array) -> Float32Array:
    """What llama.cpp's converter writes as rope_freqs.weight for LLAMA3_ROPE."""
    factor, low, high, original = 8.0, 1.0, 4.0, 64
    factors = []
    for frequency in frequencies.tolist():
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_a_decoded_file_is_kept_whole_private_and_by_precision(tmp_path: Path) -> None:
    model = tiny_llama()
    path, cache = _write(tmp_path, model), tmp_path / "cache"
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(_weight(_open(path, model, dtype, cache)), _weight(model.state_dict()).to(dtype))
    kept = sorted((cache / "weights").iterdir())
    assert [file.suffix for file in kept] == [".safetensors"] * 2
    assert stat.S_IMODE((cache / "weights").stat().st_mode) == 0o700


def test_a_kept_file_is_used_without_reading_the_original(tmp_path: Path) -> None:
    model = tiny_llama()
    path, cache = _write(tmp_path, model), tmp_path / "cache"
    _open(path, model, torch.float32, cache)
    path.unlink()
    assert torch.equal(_weight(_open(path, model, torch.float32, cache)), _weight(model.state_dict()))


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    model = tiny_llama()
    path, cache = _write(tmp_path, model), tmp_path / "cache"
    cache.write_text("a file, not a directory")
    assert torch.equal(_weight(_open(path, model, torch.float32, cache)), _weight(model.state_dict()))


def test_tensors_nobody_knows_are_named(tmp_path: Path) -> None:
    model = tiny_llama()
    path = _write(tmp_path, model, extra={"blk.0.attn_q_norm.weight": np.ones(16, dtype=np.float32)})
    with pytest.raises(ModelError, match=r"unexpected tensors: blk\.0\.attn_q_norm\.weight"):
        _open(path, model, torch.float32, tmp_path / "cache")


def _open(path: Path, model: Any, dtype: torch.dtype, cache: Path) -> Checkpoint:
    return open_gguf(path, _config(model), dtype, b"name of the content", cache, ignore_progress)


def _weight(tensors: Any) -> Tensor:
    name = "model.layers.1.self_attn.k_proj.weight"
    return tensors[name] if isinstance(tensors, dict) else tensors.tensor(name)


def _config(model: Any) -> ModelConfig:
    return ModelConfig.from_dict(model.config.to_dict())


def _write(directory: Path, model: Any, extra: dict[str, np.ndarray] | None = None) -> Path:
    """What llama.cpp's converter writes for this model, in fp32."""
    path = directory / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        data = tensor.numpy()
        for part, count in heads.items():
            if part in name:
                data = data.reshape(count, 2, data.shape[0] // count // 2, *data.shape[1:]).swapaxes(1, 2)
                data = data.reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(data))
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

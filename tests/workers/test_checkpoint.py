"""A checkpoint that does not hold what config.json says is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.model_rig import save_tiny_llama
from workers.model.checkpoint import check_tensors, content_id, safetensors_files
from workers.model.config import ModelConfig
from workers.model.errors import ModelError
from workers.model.safetensors_checkpoint import SafetensorsCheckpoint

pytestmark = pytest.mark.slow


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_tiny_llama(tmp_path, tie_word_embeddings=False)
    return tmp_path


def _check(directory: Path) -> SafetensorsCheckpoint:
    config = ModelConfig.from_dict(json.loads((directory / "config.json").read_text()))
    checkpoint = SafetensorsCheckpoint(safetensors_files(directory))
    check_tensors(config, checkpoint.shapes(), directory)
    return checkpoint


def _rewrite(directory: Path, *, drop: tuple[str, ...] = (), add: dict[str, torch.Tensor] | None = None) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k not in drop} | (add or {}), directory / "model.safetensors")


def _shard(directory: Path) -> None:
    """Cut model.safetensors in two, with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {}
    for shard, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{shard:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        where |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_shards_hold_what_one_file_holds(directory: Path) -> None:
    whole = load_file(directory / "model.safetensors")
    _shard(directory)
    checkpoint = _check(directory)
    assert checkpoint.shapes().keys() == whole.keys()
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in whole.items())


def test_missing_tensors_are_named(directory: Path) -> None:
    _rewrite(directory, drop=("lm_head.weight", "model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"missing tensors: lm_head.weight, model.layers.1.mlp.up_proj.weight$"):
        _check(directory)


def test_unexpected_tensors_are_named_and_many_of_them_counted(directory: Path) -> None:
    _rewrite(directory, add={f"extra.{index}": torch.zeros(1) for index in range(6)})
    with pytest.raises(ModelError, match=r"unexpected tensors: extra.0, extra.1, extra.2, extra.3 and 2 more$"):
        _check(directory)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(directory: Path) -> None:
    _rewrite(directory, add={"model.norm.weight": torch.zeros(65)})
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \[65\]; config.json means \[64\]"):
        _check(directory)


def test_tensors_that_old_checkpoints_carry_are_passed_over(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    _rewrite(
        tmp_path,
        add={
            "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        },
    )
    _check(tmp_path)


def test_a_directory_without_weights_says_which_file_it_lacks(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors$"):
        _check(directory)


def test_a_shard_that_is_not_there_is_named(directory: Path) -> None:
    _shard(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model-00002-of-00002.safetensors, which .*index.json names"):
        _check(directory)


def test_an_index_does_not_lead_out_of_its_directory(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(ModelError, match="outside its directory"):
        _check(directory)


def test_a_file_that_is_not_safetensors_is_said_to_be_none(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        _check(directory)


def test_content_is_named_by_bytes_and_not_by_path(tmp_path: Path) -> None:
    cache, first, second = tmp_path / "cache", tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"weights")
    second.write_bytes(b"weights")
    identity = content_id([first], cache)
    assert content_id([second], cache) == identity
    assert content_id([first], cache) == identity  # from the cache
    second.write_bytes(b"other weights")
    assert content_id([second], cache) != identity

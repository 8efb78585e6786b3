"""The decoder computes what transformers computes in fp32 eager, however a prompt is cut into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.model_rig import DEVICES, LLAMA3_ROPE, VOCAB, BackendRows, directory_backend, save_tiny_llama

pytestmark = pytest.mark.slow

MODELS: dict[str, dict[str, Any]] = {
    "tied, grouped queries": {"tie_word_embeddings": True},
    "untied, one KV head": {"tie_word_embeddings": False, "num_key_value_heads": 1},
    "every head its own KV": {"num_key_value_heads": 4, "head_dim": 32},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
}
BOUND = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
LENGTH = 200


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Tensor]:
    """A model's directory, a sequence, and transformers' logits [LENGTH, vocab]."""
    directory = tmp_path_factory.mktemp("model")
    model = save_tiny_llama(directory, **request.param)
    if request.param.get("attention_bias"):
        _randomise_biases(model)
        model.save_pretrained(directory)
    tokens = torch.from_numpy(np.random.default_rng(3).integers(0, VOCAB, LENGTH))
    with torch.no_grad():
        return directory, tokens, model(tokens[None]).logits[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(BOUND), ids=["fp32", "fp16", "bf16"])
def test_logits_equal_transformers_whole_chunked_and_decoding(
    oracle: tuple[Path, Tensor, Tensor], dtype: torch.dtype, device: str
) -> None:
    directory, tokens, expected = oracle
    rows = BackendRows(directory_backend(directory, dtype=dtype, device=device))
    whole = rows.logits("whole", tokens.tolist())
    _assert_close(whole, expected[-1], BOUND[dtype])
    done = 0
    for chunk in (1, 70, 16, 33, 60):
        logits = rows.logits("chunked", tokens[done : done + chunk].tolist())
        done += chunk
        _assert_close(logits, expected[done - 1], BOUND[dtype])
    for position in range(done, LENGTH):
        logits = rows.logits("chunked", [int(tokens[position])])
        _assert_close(logits, expected[position], BOUND[dtype])


def _assert_close(found: Tensor, expected: Tensor, bound: float) -> None:
    assert found.dtype == torch.float32
    assert (found.cpu() - expected).abs().max() <= bound * expected.abs().max()


def _randomise_biases(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)

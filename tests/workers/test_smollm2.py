"""SmolLM2-135M-Instruct, the default model: the tokens of transformers fp32 eager, alone and in company.

The oracle sees each prompt with headrace's output in one pass. Where its argmax is headrace's token at every position,
its own greedy decoding would have produced that very output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.model_files.artefacts import Artefacts, default_model, load_artefacts
from headrace.model_files.gguf_metadata import read_metadata
from tests.workers.model_rig import BackendRows, EngineRows, directory_backend, ignore_progress, options
from workers.engine import Engine
from workers.model.config import ModelConfig
from workers.model.gguf_checkpoint import GgufCheckpoint
from workers.model_engine import build_model_engine

pytestmark = pytest.mark.slow

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = (
    CHAT.format("What is the capital of France?"),
    CHAT.format("Write one sentence about the sea."),
    CHAT.format("Name three fruits."),
    CHAT.format("List the days of the week."),
    CHAT.format("Why is the sky blue?"),
    "The president of the United States is",
    "The first ten prime numbers are",
    "def fibonacci(n):\n",
)
"""Prompts on which the model's top two logits are well apart at every one of OUTPUT positions."""
OUTPUT = 64
MARGIN = 1e-3
THREADS = 2


@dataclass(frozen=True)
class Shards:
    """The GGUF file's tensors in fp32 as a Hugging Face directory of two files and an index."""

    directory: Path
    artefacts: Artefacts


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Shards:
    torch.set_num_threads(THREADS)
    artefacts = load_artefacts(default_model())
    directory = tmp_path_factory.mktemp("smollm2")
    checkpoint = GgufCheckpoint(read_metadata(artefacts.weights), ModelConfig.from_dict(artefacts.config))
    names = sorted(checkpoint.shapes())
    where = {}
    for shard, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{shard:05}-of-00002.safetensors"
        save_file({name: checkpoint.tensor(name) for name in part}, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (directory / "config.json").write_text(json.dumps({**artefacts.config, "dtype": "float32"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / name).write_bytes((artefacts.directory / name).read_bytes())
    return Shards(directory, artefacts)


@pytest.fixture(scope="module")
def prompts(shards: Shards) -> list[list[int]]:
    tokenizer = shards.artefacts.tokenizer()
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def gguf_engine(shards: Shards) -> Iterator[Engine]:
    engine = build_model_engine(options(default_model(), dtype="float32", threads=THREADS), ignore_progress)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def outputs(gguf_engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy output of the prompts as one batch, from the GGUF file."""
    return _greedy(gguf_engine, prompts)


@pytest.fixture(scope="module")
def oracle(shards: Shards) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        shards.directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def oracle_logits(oracle: Any, prompts: list[list[int]], outputs: list[list[int]]) -> list[Tensor]:
    """The oracle's logits that chose each output token, [OUTPUT, vocab] per prompt."""
    with torch.no_grad():
        return [
            oracle(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
            for prompt, output in zip(prompts, outputs, strict=True)
        ]


def test_greedy_from_gguf_is_transformers_token_for_token(
    outputs: list[list[int]], oracle_logits: list[Tensor]
) -> None:
    for output, logits in zip(outputs, oracle_logits, strict=True):
        best = logits.topk(2, dim=-1)
        assert (best.values[:, 0] - best.values[:, 1]).min() >= MARGIN
        assert len(output) == OUTPUT
        assert output == best.indices[:, 0].tolist()


def test_greedy_from_shards_is_the_same(shards: Shards, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    engine = build_model_engine(options(shards.directory, threads=THREADS), ignore_progress)
    assert engine.description.backend == "torch reference, cpu, float32"
    assert _greedy(engine, prompts) == outputs
    engine.close()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 4e-2)], ids=["fp32", "bf16"])
def test_logits_are_transformers_within_the_precision(
    shards: Shards,
    prompts: list[list[int]],
    outputs: list[list[int]],
    oracle_logits: list[Tensor],
    dtype: torch.dtype,
    bound: float,
) -> None:
    rows = BackendRows(directory_backend(shards.directory, dtype=dtype, threads=THREADS))
    middle = OUTPUT // 2
    sequences = {
        str(index): [*prompt, *output[:middle]]
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    }
    found = [rows.step(sequences).logits]
    for position in (middle, middle + 1):
        found.append(rows.step({str(index): [output[position]] for index, output in enumerate(outputs)}).logits)
    for offset, logits in enumerate(found):
        expected = torch.stack([each[middle + offset] for each in oracle_logits])
        assert ((logits - expected).abs().amax(-1) <= bound * expected.abs().amax(-1)).all()


def test_the_bits_of_a_row_are_the_same_alone_and_among_64(
    shards: Shards, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    backend = directory_backend(shards.directory, dtype=torch.float32, threads=THREADS, num_blocks=512)
    crowd = BackendRows(backend)
    texts = {str(index): prompts[index % 8] + outputs[index % 8][: index // 2] for index in range(64)}
    for first in range(0, 64, 16):
        crowd.step({name: text for name, text in texts.items() if first <= int(name) < first + 16})
    last = crowd.step({name: [int(name)] for name in texts}).logits
    for name in ("0", "13", "63"):
        assert torch.equal(BackendRows(backend).logits(name, [*texts[name], int(name)]), last[int(name)])


@pytest.mark.timeout(400)
def test_greedy_is_the_same_alone(gguf_engine: Engine, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    for prompt, expected in zip(prompts, outputs, strict=True):
        assert _greedy(gguf_engine, [prompt]) == [expected]


@pytest.mark.timeout(400)
def test_greedy_is_the_same_among_64_streams(
    gguf_engine: Engine, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    rows = EngineRows(gguf_engine)
    for first in range(0, 64, 16):  # four waves, so that steps mix decodes with prompts
        rows.start([prompts[slot % 8] for slot in range(first, first + 16)], first_slot=first)
    for _ in range(24):
        rows.run()
    for slot in range(64):
        output = rows.output(slot)
        assert output == outputs[slot % 8][: len(output)]
        assert len(output) >= 25


def _greedy(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    rows = EngineRows(engine)
    rows.start(prompts)
    for _ in range(OUTPUT - 1):
        rows.run()
    return [rows.output(slot) for slot in range(len(prompts))]

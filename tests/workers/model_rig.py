"""Tiny models on disk, and an engine or backend driven without a scheduler."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protocol.packing import pack_u32
from protocol.requests import Sampling
from protocol.worker import Plan, SlotAdd
from workers.backends.base import StepInputs
from workers.backends.torch_reference import TorchOutputs, TorchReference
from workers.engine import Engine, RowResults
from workers.model.checkpoint import safetensors_files
from workers.model.config import ModelConfig
from workers.model.safetensors_checkpoint import SafetensorsCheckpoint
from workers.options import WorkerOptions
from workers.slots import SlotTable

BLOCK = 16
THREADS = 1
"""A tiny model gains nothing from more, and a busy machine makes two wait for each other."""
VOCAB = 300

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")),
]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_llama(**changes: Any) -> Any:
    """A random transformers model, large enough in its weights for attention to matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "attn_implementation": "eager",
        "bos_token_id": 256,
        "eos_token_id": 258,
    }
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**fields, **changes})).eval()


def save_tiny_llama(directory: Path, **changes: Any) -> Any:
    """Write one with a byte tokenizer beside it; returns the transformers model."""
    from headrace.model_files.byte_tokenizer import byte_tokenizer

    model = tiny_llama(**changes)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return model


def options(model: Path | str, **changes: Any) -> WorkerOptions:
    fields: dict[str, Any] = {
        "model": str(model),
        "served_model_name": "m",
        "group": "g0",
        "incarnation": 5,
        "scheduler": "ipc:///nowhere",
        "device": "cpu",
        "threads": THREADS,
    }
    return WorkerOptions(**{**fields, **changes})


def ignore_progress(*_: object) -> None:
    """A report or progress callback that tells nobody."""


def directory_backend(
    directory: Path, *, dtype: torch.dtype, device: str = "cpu", num_blocks: int = 256, threads: int = THREADS
) -> TorchReference:
    """A warm backend of a Hugging Face directory, whole context."""
    torch.set_num_threads(threads)
    config = ModelConfig.from_dict(json.loads((directory / "config.json").read_text()))
    backend = TorchReference(
        config,
        SafetensorsCheckpoint(safetensors_files(directory)),
        dtype=dtype,
        device=torch.device(device),
        positions=config.context,
        progress=ignore_progress,
    )
    backend.allocate_kv(num_blocks, BLOCK)
    backend.warm_up(max_tokens=512, max_rows=64)
    return backend


class BackendRows:
    """Sequences of one backend, each with its own blocks; steps give all rows' logits."""

    def __init__(self, backend: TorchReference) -> None:
        self.backend = backend
        self._next_block = 0
        self._tables: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}

    def step(self, rows: dict[str, Sequence[int]]) -> TorchOutputs:
        """Append tokens to sequences, named freely; logits come back in the given order."""
        starts = [self._computed.setdefault(name, 0) for name in rows]
        lengths = [len(tokens) for tokens in rows.values()]
        for name, tokens in rows.items():
            self._computed[name] += len(tokens)
            table = self._tables.setdefault(name, [])
            while len(table) * BLOCK < self._computed[name]:
                table.append(self._next_block)
                self._next_block += 1
        width = max(len(self._tables[name]) for name in rows)
        tables = np.zeros((len(rows), width), dtype=np.int32)
        for row, name in enumerate(rows):
            tables[row, : len(self._tables[name])] = self._tables[name]
        return self.backend.step(
            StepInputs(
                tokens=np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in rows.values()]),
                starts=np.array(starts, dtype=np.int32),
                lengths=np.array(lengths, dtype=np.int32),
                block_tables=tables,
                samples=np.ones(len(rows), dtype=np.bool_),
            )
        )

    def logits(self, name: str, tokens: Sequence[int]) -> Tensor:
        """Logits after the last of these tokens, [vocab]."""
        return self.step({name: tokens}).logits[0]


class EngineRows:
    """An engine and its slot table, planned for by hand."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.table = SlotTable(engine.description.shape)
        self.free = list(range(engine.description.shape.num_blocks))[::-1]
        self._step = 0

    def add(self, slot: int, tokens: Sequence[int], *, prompt_len: int = 0, seed: int = 0, **sampling: Any) -> SlotAdd:
        fields = {"temperature": 0.0, **sampling}
        return SlotAdd(
            slot=slot,
            tokens=pack_u32(tokens),
            prompt_len=prompt_len or len(tokens),
            seed=seed,
            sampling=Sampling(**{name: value for name, value in fields.items() if name != "stop_ids"}),
            stop_ids=pack_u32(fields.get("stop_ids", ())),
        )

    def run(
        self,
        adds: Sequence[SlotAdd] = (),
        chunks: Sequence[tuple[int, int]] = (),
        drops: Sequence[int] = (),
        shared: dict[int, list[int]] | None = None,
    ) -> RowResults:
        """One plan, with the blocks it needs, of which ``shared`` tells those that an added slot begins with."""
        for slot in drops:
            self.free += self.table.block_table(slot).tolist()
        added = {add.slot: len(add.tokens) // 4 for add in adds}
        held = {slot: int(self.table.length[slot]) for slot in np.flatnonzero(self.table.occupied).tolist()}
        held = {slot: length for slot, length in held.items() if slot not in drops} | added
        pairs = []
        for slot, length in held.items():
            found = (shared or {}).get(slot, [])
            pairs += [(slot, block) for block in found]
            have = len(found) if slot in added else int(self.table.num_blocks[slot])
            need = -(-(length + 1) // self.table.shape.block_size)
            pairs += [(slot, self.free.pop()) for _ in range(need - have)]
        plan = Plan(
            epoch=0,
            incarnation=0,
            step=self._step,
            drops=pack_u32(drops),
            adds=tuple(adds),
            blocks=pack_u32([each for pair in pairs for each in pair]),
            chunks=pack_u32([each for chunk in chunks for each in chunk]),
        )
        self._step += 1
        batch = self.table.apply(plan)
        results = self.engine.execute(batch, self.table)
        self.table.commit(batch, results.counts, results.ids, np.ones(len(batch.slots), dtype=np.bool_))
        return results

    def start(self, prompts: Sequence[Sequence[int]], first_slot: int = 0, **sampling: Any) -> RowResults:
        """Add prompts and prefill each whole."""
        adds = [self.add(first_slot + index, prompt, **sampling) for index, prompt in enumerate(prompts)]
        return self.run(adds, [(add.slot, len(add.tokens) // 4) for add in adds])

    def output(self, slot: int) -> list[int]:
        """Ids after the prompt."""
        return self.table.sequence(slot)[self.table.prompt_len[slot] :].tolist()

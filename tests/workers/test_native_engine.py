"""The native engine over plans: which weights and precisions it takes, what it keeps, what it refuses."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.worker import RowStatus
from tests.workers.model_rig import EngineRows, ignore_progress, options, save_tiny_llama
from tests.workers.native_rig import native_library
from workers import native_engine
from workers.engine import Engine, ModelDoesNotFit
from workers.model.errors import ModelError
from workers.model_engine import build_model_engine

pytestmark = pytest.mark.slow

POISON = 299
"""A token whose embedding is not a number in the poisoned model."""


@pytest.fixture(scope="module", autouse=True)
def library(model_cache: Path) -> None:
    native_library()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path, tie_word_embeddings=False, attention_bias=True, hidden_size=64)
    tensors = load_file(path / "model.safetensors")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return path


def build(directory: Path | str, **changes: Any) -> Engine:
    fields = {"kv_cache_memory": 4 << 20, "max_num_seqs": 8, **changes}
    return build_model_engine(options(directory, **fields), ignore_progress)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


def alone(engine: Engine, tokens: list[int], count: int, **sampling: Any) -> tuple[list[int], list[bytes]]:
    """Ids and logprob records of a sequence that has the engine to itself."""
    rows = EngineRows(engine)
    records = [rows.start([tokens], **sampling).logprobs]
    for _ in range(count - 1):
        records.append(rows.run().logprobs)
    return rows.output(0), records


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return build(directory)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "weights BF16, kv BF16"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "int8"}, "weights BF16, kv INT8"),
        ({"quantization": "int8"}, "weights INT8, kv BF16"),
    ],
)
def test_precisions_are_as_asked_and_in_the_description(directory: Path, changes: dict[str, Any], name: str) -> None:
    made = build(directory, **changes)
    assert made.description.backend.startswith("native cpu, ") and made.description.backend.endswith(name)
    assert len(alone(made, prompt(1, 20), 5)[0]) == 5
    made.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "--dtype float32"),
        ({"block_size": 32}, "blocks of 32 tokens"),
    ],
)
def test_what_it_cannot_do_is_left_to_the_reference_and_said(
    directory: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    with caplog.at_level(logging.INFO):
        made = build(directory, **changes)
    assert made.description.backend.startswith("torch reference")
    assert [record.message for record in caplog.records if reason in record.message]


def test_without_its_library_the_reference_serves(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADRACE_CPU_ISA", "none")
    with caplog.at_level(logging.INFO):
        assert build(directory).description.backend.startswith("torch reference")
    assert "HEADRACE_CPU_ISA" in caplog.text
    with pytest.raises(ModelError, match="--quantization int8"):
        build(directory, quantization="int8")


def test_float16_weights_become_bfloat16(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    tensors = load_file(directory / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    assert "weights BF16" in build(tmp_path).description.backend


class FakeTeam:
    def __init__(self, library: object, threads: int) -> None:
        self.threads, self.closed = threads, False

    def close(self) -> None:
        self.closed = True


class FakeMemory:
    """A memory that so many threads can read as fast as it goes."""

    def __init__(self, enough: int) -> None:
        self._enough = enough

    def stream_rate(self, team: FakeTeam, data: object) -> float:
        return float(min(team.threads, self._enough))


@pytest.mark.parametrize(
    ("most", "enough", "asked", "chosen"), [(8, 4, 0, 4), (8, 8, 0, 8), (8, 2, 8, 8), (2, 1, 0, 2)]
)
def test_half_of_the_threads_do_when_the_memory_gives_no_more_to_all(
    monkeypatch: pytest.MonkeyPatch, most: int, enough: int, asked: int, chosen: int
) -> None:
    monkeypatch.setattr(native_engine, "Team", FakeTeam)
    every = FakeTeam(None, most)
    memory = cast(Any, FakeMemory(enough))
    team = native_engine._enough_threads(options("m", threads=asked), memory, cast(Any, every), np.zeros(8, np.uint8))
    assert (team.threads, every.closed) == (chosen, chosen != most)


def test_text_is_close_to_the_reference(directory: Path, engine: Engine) -> None:
    reference = build(directory, dtype="float32")
    agreed = sum(alone(engine, prompt(seed, 30), 1) == alone(reference, prompt(seed, 30), 1) for seed in range(20))
    assert agreed >= 17


def test_rows_come_and_go_without_changing_each_other(engine: Engine) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "logprobs": 4, "seed": 5, "frequency_penalty": 0.3}
    prompts = [prompt(seed, length) for seed, length in ((1, 5), (2, 40), (3, 17), (4, 100))]
    expected = [alone(engine, tokens, 12, **sampling)[0] for tokens in prompts]
    rows = EngineRows(engine)
    rows.start(prompts[:2], **sampling)
    rows.run()
    third, fourth = rows.add(5, prompts[2], **sampling), rows.add(3, prompts[3], **sampling)
    rows.run([third, fourth], [(5, 10), (3, 64)])
    rows.run((), [(3, 36), (5, 7)])
    while min(len(rows.output(slot)) for slot in (0, 1, 3, 5)) < 12:
        rows.run()
    for slot, ids in zip((0, 1, 5, 3), expected, strict=True):
        assert rows.output(slot)[:12] == ids


def test_a_row_with_nan_fails_alone_and_leaves_nothing_behind(engine: Engine) -> None:
    good, bad = prompt(5, 20), [*prompt(6, 20), POISON, 1]
    expected, _ = alone(engine, good, 8)
    rows = EngineRows(engine)
    results = rows.start([good, bad], prompt_logprobs=2)
    assert results.status.tolist() == [RowStatus.OK, RowStatus.NAN]
    rows.run(drops=[1])
    rows.run([rows.add(2, good)], [(2, len(good))])
    for _ in range(7):
        rows.run()
    assert rows.output(0)[:8] == rows.output(2)[:8] == expected


def test_a_second_start_maps_what_the_first_packed(
    directory: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.native_engine.pack_weights", None)
    assert alone(build(directory), prompt(9, 20), 6) == alone(engine, prompt(9, 20), 6)


def test_a_damaged_kept_file_is_made_again(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "native_cpu").symlink_to(native_library().path.parent.resolve())
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    expected = alone(build(directory), prompt(9, 20), 6)
    (kept,) = (tmp_path / "packed").iterdir()
    kept.write_bytes(kept.read_bytes()[:-100])
    assert alone(build(directory), prompt(9, 20), 6) == expected
    (kept,) = (tmp_path / "packed").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_digests_tell_numeric_classes_apart(directory: Path) -> None:
    def digest(**changes: Any) -> bytes:
        return build(directory, **changes).description.numerics_digest

    assert digest() == digest(max_num_seqs=3, max_model_len=200)
    others = [digest(quantization="int8"), digest(kv_cache_dtype="int8"), digest(dtype="float32")]
    assert len({digest(), *others}) == 4


def test_missing_and_unexpected_tensors_are_named(directory: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    tensors = load_file(directory / "model.safetensors")
    without = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}
    save_file(without, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        build(tmp_path)
    save_file({**tensors, "model.layers.0.odd": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"unexpected tensors: model\.layers\.0\.odd"):
        build(tmp_path)


def test_a_file_that_is_no_safetensors_is_refused(directory: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    whole = (directory / "model.safetensors").read_bytes()
    for broken in (b"", b"abc", b"\xff" * 100, whole[: len(whole) // 2]):
        (tmp_path / "model.safetensors").write_bytes(broken)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            build(tmp_path)


def test_a_model_that_does_not_fit_says_what_is_needed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.native_engine.available_memory", lambda: 1 << 20)
    with pytest.raises(ModelDoesNotFit, match=r"the model does not fit: weights of .*, 1 MiB are available"):
        build(directory)


def test_neither_torch_nor_transformers_is_imported(directory: Path) -> None:
    code = (
        "import sys, msgspec\n"
        "from workers import rank\n"
        "from workers.options import WorkerOptions\n"
        "status = rank.run(msgspec.json.decode(sys.argv[1], type=WorkerOptions))\n"
        "print(status, sorted({'torch', 'transformers', 'safetensors', 'ray'} & set(sys.modules)))\n"
    )
    chosen = options(directory, orphan_ttl=0.0, kv_cache_memory=1 << 20)
    encoded = msgspec.json.encode(chosen).decode()
    finished = subprocess.run([sys.executable, "-c", code, encoded], capture_output=True, text=True, timeout=60)
    assert finished.stdout == "1 []\n", finished.stderr
    assert "no session with a scheduler" in finished.stderr

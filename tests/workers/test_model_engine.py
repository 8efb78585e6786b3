"""The model engine over plans: exactness, failing rows, refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from headrace.model_files.artefacts import ArtefactError
from protocol.worker import RowStatus
from tests.workers.model_rig import (
    BLOCK,
    DEVICES,
    BackendRows,
    EngineRows,
    directory_backend,
    ignore_progress,
    options,
    save_tiny_llama,
)
from workers.backends.torch_reference import TorchReference
from workers.engine import Engine, ModelDoesNotFit
from workers.model import memory
from workers.model.errors import ModelError
from workers.model.precision import cpu_has_bfloat16
from workers.model_engine import build_model_engine

POISON = 299
"""A token whose embedding is not a number in the poisoned model."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path, tie_word_embeddings=False)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module", params=DEVICES)
def engine(request: pytest.FixtureRequest, directory: Path) -> Engine:
    return _build(directory, device=request.param, kv_cache_memory=1 << 20, max_num_seqs=8)


def _build(directory: Path | str, **changes: Any) -> Engine:
    return build_model_engine(options(directory, dtype="float32", **changes), ignore_progress)


def _prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


def _alone(engine: Engine, prompt: list[int], count: int, **sampling: Any) -> list[int]:
    rows = EngineRows(engine)
    rows.start([prompt], **sampling)
    for _ in range(count - 1):
        rows.run()
    return rows.output(0)


def test_rows_come_and_go_without_changing_each_other(engine: Engine) -> None:
    prompts = [_prompt(seed, length) for seed, length in ((1, 5), (2, 40), (3, 17), (4, 100))]
    expected = [_alone(engine, prompt, 12) for prompt in prompts]
    rows = EngineRows(engine)
    rows.start(prompts[:2])
    rows.run()
    third, fourth = rows.add(5, prompts[2]), rows.add(3, prompts[3])
    rows.run([third, fourth], [(5, 10), (3, 64)])
    rows.run((), [(3, 36), (5, 7)])
    while min(len(rows.output(slot)) for slot in (0, 1, 3, 5)) < 12:
        rows.run()
    for slot, ids in zip((0, 1, 5, 3), expected, strict=True):
        assert rows.output(slot)[:12] == ids


def test_a_resumed_sequence_goes_on_as_if_it_had_not_stopped(engine: Engine) -> None:
    prompt = _prompt(7, 30)
    sampling = {"temperature": 0.8, "frequency_penalty": 0.5, "min_tokens": 9, "stop_ids": (3, 4), "seed": 21}
    expected = _alone(engine, prompt, 20, **sampling)
    rows = EngineRows(engine)
    resumed = rows.add(2, prompt + expected[:8], prompt_len=len(prompt), **sampling)
    rows.run([resumed], [(2, 20)])
    rows.run((), [(2, 18)])
    for _ in range(11):
        rows.run()
    assert rows.output(2) == expected


@pytest.fixture(scope="module")
def backend(directory: Path) -> TorchReference:
    return directory_backend(directory, dtype=torch.float32, threads=2)


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_the_bits_of_a_row_do_not_depend_on_chunks_or_company(backend: TorchReference, data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 150))
    tokens = _prompt(data.draw(st.integers(0, 99)), length)
    expected = BackendRows(backend).logits("alone", tokens)
    rows = BackendRows(backend)
    done = 0
    while done < length:
        chunk = data.draw(st.integers(1, length - done))
        company = {f"other {index}": [index + 1] * data.draw(st.sampled_from([1, 1, 1, 20])) for index in range(3)}
        company = dict(list(company.items())[: data.draw(st.integers(0, 3))])
        output = rows.step({**company, "row": tokens[done : done + chunk]})
        done += chunk
    assert torch.equal(output.logits[-1], expected)


def test_a_row_with_nan_fails_alone_and_leaves_nothing_behind(engine: Engine) -> None:
    good, bad = _prompt(5, 20), [*_prompt(6, 20), POISON, 1]
    expected = _alone(engine, good, 8)
    rows = EngineRows(engine)
    results = rows.start([good, bad])
    assert results.status.tolist() == [RowStatus.OK, RowStatus.NAN]
    assert (results.counts.tolist(), len(results.ids)) == ([1, 0], 1)
    assert list(results.details) == [1]
    rows.run(drops=[1])
    # The freed blocks go to the next sequence, whose masked positions read what is left in them.
    rows.run([rows.add(2, good)], [(2, len(good))])
    for _ in range(7):
        rows.run()
    assert rows.output(0)[:8] == rows.output(2)[:8] == expected


def test_a_row_with_nan_leaves_the_blocks_it_shares_as_they_are(engine: Engine) -> None:
    size = engine.description.shape.block_size
    prompt = _prompt(21, 3 * size + 5)
    expected = _alone(engine, prompt, 12)
    rows = EngineRows(engine)
    rows.start([prompt])
    add = replace(rows.add(1, [*prompt[: 2 * size], POISON, 1]), computed=2 * size)
    results = rows.run([add], [(1, 2)], shared={1: rows.table.block_table(0)[:2].tolist()})
    assert results.status.tolist() == [RowStatus.OK, RowStatus.NAN]
    rows.table.occupied[1] = False
    for _ in range(10):
        rows.run()
    assert rows.output(0) == expected


def test_a_chunk_that_does_not_sample_reports_nan_at_once(engine: Engine) -> None:
    rows = EngineRows(engine)
    results = rows.run([rows.add(0, [1, POISON, 2, 3, 4])], [(0, 3)])
    assert (results.status.tolist(), results.counts.tolist()) == ([RowStatus.NAN], [0])


def test_a_plan_may_run_past_the_end_of_the_context(directory: Path) -> None:
    rows = EngineRows(_build(directory, kv_cache_memory=1 << 20, max_model_len=32))
    rows.start([_prompt(1, 32)])
    results = rows.run()
    assert (results.status.tolist(), len(rows.output(0))) == ([RowStatus.OK], 2)


def test_a_step_without_rows_is_a_step(engine: Engine) -> None:
    results = EngineRows(engine).run()
    assert (len(results.counts), len(results.ids)) == (0, 0)


def test_context_is_the_models_or_less(directory: Path) -> None:
    assert _build(directory, kv_cache_memory=1 << 20).description.shape.context == 512
    assert _build(directory, kv_cache_memory=1 << 20, max_model_len=100).description.shape.context == 100
    with pytest.raises(ModelError, match="--max-model-len 513 is not within the model's context of 512 tokens"):
        _build(directory, max_model_len=513)


def test_the_pool_is_no_larger_than_all_slots_can_use(directory: Path) -> None:
    shape = _build(directory, max_num_seqs=2, max_model_len=100).description.shape
    assert shape.num_blocks == 2 * -(-101 // BLOCK)


def test_digests_tell_numeric_classes_apart(directory: Path, tmp_path: Path) -> None:
    def digest(path: Path = directory, **changes: Any) -> bytes:
        fields = {"dtype": "float32", "kv_cache_memory": 1 << 20, **changes}
        return build_model_engine(options(path, **fields), ignore_progress).description.numerics_digest

    assert digest() == digest(max_num_seqs=3, max_model_len=200)
    save_tiny_llama(tmp_path, tie_word_embeddings=False)  # other weights: none is poisoned
    others = [digest(dtype="bfloat16"), digest(block_size=32), digest(tmp_path)]
    assert len({digest(), *others}) == 4


@pytest.mark.parametrize("block_size", [8, 32, 48])
def test_other_block_sizes_give_the_same_tokens(engine: Engine, directory: Path, block_size: int) -> None:
    prompt = _prompt(8, 150)
    other = _build(directory, kv_cache_memory=1 << 20, block_size=block_size)
    assert _alone(other, prompt, 10) == _alone(engine, prompt, 10)


def test_tensor_parallelism_is_refused(directory: Path) -> None:
    with pytest.raises(ModelError, match="tp is 2, only 1 works"):
        _build(directory, tp=2)


def test_a_model_that_is_not_there_is_said_to_be_missing(tmp_path: Path, model_cache: Path) -> None:
    with pytest.raises(ArtefactError, match="no such file or directory"):
        _build(tmp_path / "none")


def test_a_model_that_does_not_fit_says_what_is_needed_and_what_is_there(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.torch_engine.available_memory", lambda: 1 << 20)
    with pytest.raises(ModelDoesNotFit) as caught:
        _build(directory)
    assert re.fullmatch(
        r"the model does not fit: weights of \d+ KiB, \d+ MiB for a step and a KV pool of \d+ KiB are needed, "
        r"1 MiB are available",
        str(caught.value),
    )


def test_a_pool_beyond_the_memory_does_not_fit(directory: Path) -> None:
    with pytest.raises(ModelDoesNotFit, match=r"a KV pool of 1048576\.0 GiB are needed, [\d.]+ GiB are available"):
        _build(directory, kv_cache_memory=1 << 50)


def test_a_pool_without_a_block_is_refused(directory: Path) -> None:
    with pytest.raises(ModelDoesNotFit, match="holds no block"):
        _build(directory, kv_cache_memory=100)


def test_a_cgroup_bounds_what_is_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100000 kB\nMemAvailable: 4096 kB\n")
    assert memory.available_memory(meminfo, tmp_path) == 4 << 20
    (tmp_path / "memory.max").write_text("3145728\n")
    (tmp_path / "memory.current").write_text("2097152\n")
    assert memory.available_memory(meminfo, tmp_path) == 1 << 20
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 524288\n")
    assert memory.available_memory(meminfo, tmp_path) == 3 << 19
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory(meminfo, tmp_path) == 4 << 20


def test_devices_and_precisions_that_do_not_exist_are_refused(directory: Path) -> None:
    with pytest.raises(ModelError, match="device tpu"):
        _build(directory, device="tpu")
    with pytest.raises(ModelError, match="dtype int3 is not supported; supported: auto, float32"):
        build_model_engine(options(directory, dtype="int3"), ignore_progress)


def test_auto_is_the_precision_of_the_checkpoint(tmp_path: Path, model_cache: Path) -> None:
    save_tiny_llama(tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    engine = build_model_engine(options(tmp_path, kv_cache_memory=1 << 20), ignore_progress)
    assert re.fullmatch(
        r"torch reference, cpu, bfloat16|native cpu, .*, weights BF16, kv BF16", engine.description.backend
    )


@pytest.mark.parametrize(
    ("flags", "expected"), [("fpu avx512f avx512_bf16", True), ("fpu amx_bf16", True), ("fpu avx512f", False)]
)
def test_bfloat16_is_seen_in_the_cpu_flags(tmp_path: Path, flags: str, expected: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert cpu_has_bfloat16(cpuinfo) is expected
    assert not cpu_has_bfloat16(tmp_path / "none")


def test_progress_is_told_in_stages_that_only_grow(directory: Path) -> None:
    told: list[tuple[str, float]] = []
    build_model_engine(options(directory, kv_cache_memory=1 << 20), lambda *stage: told.append(stage))
    stages = list(dict.fromkeys(stage for stage, _ in told))
    assert stages == ["reading", "loading", "warming up", "ready"]
    loading = [fraction for stage, fraction in told if stage == "loading"]
    assert loading == sorted(loading) and loading[-1] == 1.0

"""Logprobs of a real decoder: transformers' numbers, and the same bits however the work is cut or shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.logprobs import prompt_records_of_chunk, record_size, unpack_records
from protocol.worker import RowStatus
from tests.workers.model_rig import DEVICES, VOCAB, EngineRows, ignore_progress, options, save_tiny_llama
from workers.engine import Engine
from workers.model_engine import build_model_engine

POISON = 299
"""A token whose embedding is not a number in the engine's copy of the model."""
PROMPT_ALTERNATIVES, ALTERNATIVES = 3, 5
RECORDED = {"prompt_logprobs": PROMPT_ALTERNATIVES, "logprobs": ALTERNATIVES}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("tiny")
    model = save_tiny_llama(directory, tie_word_embeddings=False)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, directory / "model.safetensors")
    return directory, model


@pytest.fixture(scope="module", params=DEVICES)
def engine(request: pytest.FixtureRequest, model: tuple[Path, Any], model_cache: Path) -> Engine:
    return build_model_engine(
        options(model[0], dtype="float32", device=request.param, kv_cache_memory=2 << 20, max_num_seqs=8),
        ignore_progress,
    )


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


class Recorded:
    """Sequences that run through an engine's steps; collects the records of each slot."""

    def __init__(self, engine: Engine) -> None:
        self.rows = EngineRows(engine)
        self.prompts: dict[int, list[bytes]] = {}
        self.outputs: dict[int, list[bytes]] = {}

    def run(self, adds: list[Any] = [], chunks: list[tuple[int, int]] = [], drops: tuple[int, ...] = ()) -> list[int]:  # noqa: B006
        """One step; returns the statuses of its rows."""
        table = self.rows.table
        starts = {slot: int(table.computed[slot]) for slot, _ in chunks}
        starts |= {add.slot: 0 for add in adds}
        decoding = np.flatnonzero(table.occupied & (table.computed >= table.target)).tolist()
        slots = [slot for slot in decoding if slot not in drops] + [slot for slot, _ in chunks]
        results = self.rows.run(adds, chunks, drops)
        prompt_logprobs, logprobs = results.prompt_logprobs, results.logprobs
        for row, slot in enumerate(slots):
            parameters = table.parameters[slot]
            assert parameters is not None
            length = dict(chunks).get(slot, 0)
            judged = prompt_records_of_chunk(starts.get(slot, 0), length, int(table.prompt_len[slot])) if length else 0
            asked = parameters.sampling.prompt_logprobs >= 0 and results.status[row] == RowStatus.OK
            for _ in range(judged if asked else 0):
                size = record_size(parameters.sampling.prompt_logprobs)
                self.prompts.setdefault(slot, []).append(prompt_logprobs[:size])
                prompt_logprobs = prompt_logprobs[size:]
            for _ in range(int(results.counts[row]) if parameters.sampling.logprobs >= 0 else 0):
                size = record_size(parameters.sampling.logprobs)
                self.outputs.setdefault(slot, []).append(logprobs[:size])
                logprobs = logprobs[size:]
        assert not prompt_logprobs and not logprobs, "more records than were due"
        return results.status.tolist()


def alone(engine: Engine, prompt: list[int], outputs: int, **sampling: Any) -> tuple[list[bytes], list[bytes]]:
    """(prompt records, output records) of a sequence that runs by itself, prefilled whole."""
    run = Recorded(engine)
    run.run([run.rows.add(0, prompt, **RECORDED, **sampling)], [(0, len(prompt))])
    for _ in range(outputs - 1):
        run.run()
    return run.prompts[0], run.outputs[0]


def expected_logprobs(model: Any, tokens: list[int]) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1).numpy()


def test_prompt_and_output_records_are_transformers(engine: Engine, model: tuple[Path, Any]) -> None:
    prompt = prompt_of(1, 150)
    run = Recorded(engine)
    run.run([run.rows.add(0, prompt, **RECORDED, temperature=1.0, seed=3)], [(0, len(prompt))])
    for _ in range(9):
        run.run()
    tokens = prompt + run.rows.output(0)
    expected = expected_logprobs(model[1], tokens)
    assert len(run.prompts[0]) == len(prompt) - 1 and len(run.outputs[0]) == 10
    for position, data in enumerate(run.prompts[0] + run.outputs[0], start=1):
        shown = PROMPT_ALTERNATIVES if position < len(prompt) else ALTERNATIVES
        (record,) = unpack_records(data, shown)
        ids, row = record["pairs"]["id"], expected[position - 1]
        assert ids[0] == tokens[position]
        np.testing.assert_allclose(record["pairs"]["logprob"], row[ids], atol=5e-4)
        near = 1e-3
        assert 1 + (row > row[ids[0]] + near).sum() <= record["rank"] <= (row > row[ids[0]] - near).sum()
        assert (np.sort(row)[::-1][:shown] - row[ids[1:]] <= near).all()


def test_records_have_the_same_bits_whole_chunked_and_resumed(engine: Engine) -> None:
    prompt = prompt_of(2, 140)
    whole, outputs = alone(engine, prompt, 12)
    for chunks in ([1, 1, 16, 3, 70, 49], [64, 64, 12], [139, 1]):
        run = Recorded(engine)
        adds = [run.rows.add(3, prompt, **RECORDED)]
        for chunk in chunks:
            run.run(adds, [(3, chunk)])
            adds = []
        for _ in range(11):
            run.run()
        assert run.prompts[3] == whole and run.outputs[3] == outputs
    run = Recorded(engine)
    tokens = prompt + [int(unpack_records(data, ALTERNATIVES)[0]["pairs"]["id"][0]) for data in outputs[:5]]
    run.run([run.rows.add(1, tokens, prompt_len=len(prompt), **RECORDED)], [(1, 130)])
    run.run([], [(1, 15)])
    for _ in range(6):
        run.run()
    assert run.prompts[1] == whole and run.outputs[1] == outputs[5:]


def test_records_have_the_same_bits_alone_and_in_company(engine: Engine) -> None:
    prompts = [prompt_of(seed, length) for seed, length in ((3, 5), (4, 90), (5, 33), (6, 1))]
    expected = [alone(engine, prompt, 8, temperature=0.9, seed=9) if len(prompt) > 1 else None for prompt in prompts]
    run = Recorded(engine)
    fields = {**RECORDED, "temperature": 0.9, "seed": 9}
    run.run([run.rows.add(0, prompts[0], **fields), run.rows.add(6, prompt_of(7, 40))], [(0, 5), (6, 40)])
    run.run([run.rows.add(1, prompts[1], **fields)], [(1, 30)])
    run.run([run.rows.add(4, prompts[2], **fields), run.rows.add(5, prompts[3], **fields)], [(4, 20), (1, 60), (5, 1)])
    run.run([], [(4, 13)])
    for _ in range(7):
        run.run()
    for slot, wanted in zip((0, 1, 4), expected, strict=False):
        assert wanted is not None
        assert run.prompts[slot] == wanted[0]
        assert run.outputs[slot][:8] == wanted[1]
    assert 5 not in run.prompts and len(run.outputs[5]) > 7, "a prompt of one token judges nothing"
    assert 6 not in run.prompts and 6 not in run.outputs


def test_a_row_whose_numbers_are_none_has_no_records_and_takes_nobody_elses(engine: Engine) -> None:
    prompt = prompt_of(8, 20)
    expected = alone(engine, prompt, 1)
    run = Recorded(engine)
    bad = run.rows.add(0, [*prompt_of(9, 10), POISON, 1, 2], **RECORDED)
    status = run.run([bad, run.rows.add(1, prompt, **RECORDED)], [(0, 13), (1, 20)])
    assert status == [RowStatus.NAN, RowStatus.OK]
    assert (run.prompts, run.outputs) == ({1: expected[0]}, {1: expected[1]})


def test_logits_of_a_long_prompt_exist_a_few_dozen_at_a_time(engine: Engine) -> None:
    sizes: list[int] = []
    backend = engine._backend  # type: ignore[attr-defined]
    step = backend.step

    def watched(inputs: Any) -> Any:
        outputs = step(inputs)

        def pieces() -> Any:
            for logits in outputs.judged:
                assert logits.shape[1] == VOCAB
                sizes.append(len(logits))
                yield logits

        return type(outputs)(outputs.logits, outputs.broken, pieces())

    backend.step = watched
    try:
        assert len(alone(engine, prompt_of(10, 400), 1)[0]) == 399
    finally:
        backend.step = step
    assert sum(sizes) == 399 and max(sizes) <= 64

"""SmolLM2-135M-Instruct on the native engine: answers depend on the request alone, and its numbers are honest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.model_files.artefacts import default_model, load_artefacts
from protocol.logprobs import prompt_records_of_chunk, record_size, unpack_records
from tests.workers.model_rig import EngineRows, ignore_progress, options
from tests.workers.native_rig import native_library
from workers.engine import Engine, EngineDescription, RowResults
from workers.model_engine import build_model_engine
from workers.slots import SlotTable, StepBatch

pytestmark = pytest.mark.slow

OUTPUT = 14
TEXT = (
    "The river rises in the hills north of the town and runs south for forty miles before it reaches the sea. In "
    "the eighteenth century its water drove eleven mills, of which three still stand. The largest was built in "
    "1763 for grinding corn, later made paper, and was turned into a museum after the flood of 1953. Visitors can"
    " see the wheel, the sluice gates and the long channel, called a headrace, that led the water from the weir. "
    "Every spring the volunteers who look after it clear the channel of leaves and branches, and on the first "
    "Sunday in May the wheel is set in motion. It takes about ten minutes until it has reached its full speed, "
    "and the sound can be heard in the whole valley. A mill of this size could grind two tons of grain in a day "
    "when the river was high, but in dry summers it stood still for weeks, and the farmers had to carry their "
    "sacks to the windmill on the ridge."
)
PRECISIONS: dict[str, dict[str, Any]] = {
    "stored": {},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}


@pytest.fixture(scope="module", autouse=True)
def library(model_cache: Path) -> None:
    native_library()


@pytest.fixture(scope="module", params=list(PRECISIONS))
def engine(request: pytest.FixtureRequest, model_cache: Path) -> Iterator[Engine]:
    engine = build(**PRECISIONS[request.param])
    yield engine
    engine.close()


def build(**changes: Any) -> Engine:
    fields = {"threads": 2, "kv_cache_memory": 64 << 20, **changes}
    return build_model_engine(options(default_model(), **fields), ignore_progress)


def tokens_of(text: str) -> list[int]:
    return load_artefacts(default_model()).tokenizer().encode(text).ids


@pytest.fixture(scope="module")
def prompts(model_cache: Path) -> list[list[int]]:
    text = tokens_of(TEXT)
    return [text[:length] for length in (7, 33, 64, 100)]


SAMPLINGS: list[dict[str, Any]] = [
    {"logprobs": 3},
    {"temperature": 0.8, "seed": 7, "logprobs": 0},
    {"temperature": 1.1, "top_p": 0.9, "seed": 8, "logprobs": 20, "frequency_penalty": 0.4},
    {"temperature": 0.7, "top_k": 40, "seed": 9, "logprobs": 1, "prompt_logprobs": 2},
]


class Told:
    """An engine that notes by slot what each request is told: the bytes of its logprobs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.records: dict[int, bytes] = {}
        self.prompt_records: dict[int, bytes] = {}
        self.rows = EngineRows(self)
        self.run = self.rows.run

    @property
    def description(self) -> EngineDescription:
        return self._engine.description

    def execute(self, batch: StepBatch, table: SlotTable) -> RowResults:
        results = self._engine.execute(batch, table)
        at = prompts_at = 0
        for row, slot in enumerate(batch.slots.tolist()):
            if row >= batch.num_decodes and (size := record_size_of(table, slot, "prompt_logprobs")):
                start, length = int(batch.starts[row]), int(batch.lengths[row])
                end = prompts_at + size * prompt_records_of_chunk(start, length, int(table.prompt_len[slot]))
                self._note(self.prompt_records, slot, results.prompt_logprobs[prompts_at:end])
                prompts_at = end
            if results.counts[row]:
                size = record_size_of(table, slot, "logprobs")
                self._note(self.records, slot, results.logprobs[at : at + size])
                at += size
        assert (at, prompts_at) == (len(results.logprobs), len(results.prompt_logprobs))
        return results

    def answer(self, slot: int) -> tuple[list[int], bytes, bytes]:
        """The first OUTPUT ids of a slot, and the logprobs told of them and of the prompt."""
        size = record_size_of(self.rows.table, slot, "logprobs")
        prompt_records = self.prompt_records.get(slot, b"")
        return self.rows.output(slot)[:OUTPUT], self.records[slot][: OUTPUT * size], prompt_records

    def reset(self) -> None:
        self._engine.reset()

    def close(self) -> None:
        self._engine.close()

    @staticmethod
    def _note(records: dict[int, bytes], slot: int, more: bytes) -> None:
        records[slot] = records.get(slot, b"") + more


def record_size_of(table: SlotTable, slot: int, kind: str) -> int:
    """Bytes of one record of this slot; 0 when it wants none."""
    parameters = table.parameters[slot]
    assert parameters is not None
    shown = {"logprobs": parameters.sampling.logprobs, "prompt_logprobs": parameters.sampling.prompt_logprobs}[kind]
    return record_size(shown) if shown >= 0 else 0


def alone(engine: Engine, prompt: list[int], sampling: dict[str, Any]) -> tuple[list[int], bytes, bytes]:
    told = Told(engine)
    told.run([told.rows.add(0, prompt, **sampling)], [(0, len(prompt))])
    for _ in range(OUTPUT - 1):
        told.run()
    return told.answer(0)


def test_ids_and_logprobs_are_the_same_alone_and_under_load(engine: Engine, prompts: list[list[int]]) -> None:
    expected = [alone(engine, prompt, sampling) for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)]
    told = Told(engine)
    crowd = [(slot, prompts[slot % 4]) for slot in range(8, 20)]
    adds = [told.rows.add(slot, prompt, temperature=0.9, seed=slot, logprobs=0) for slot, prompt in crowd[:8]]
    told.run(adds, [(slot, len(prompt)) for slot, prompt in crowd[:8]])
    # The four come one after another, in chunks of odd sizes, beside decodes and other prompts.
    for slot, (prompt, sampling) in enumerate(zip(prompts, SAMPLINGS, strict=True)):
        other = crowd[8 + slot]
        first = max(1, len(prompt) // 3)
        adds = [told.rows.add(slot, prompt, **sampling), told.rows.add(other[0], other[1], logprobs=0)]
        told.run(adds, [(slot, first), (other[0], len(other[1]))])
        told.run((), [(slot, len(prompt) - first)], [8 + slot])
    for _ in range(OUTPUT - 1):
        told.run()
    for slot, answer in enumerate(expected):
        assert told.answer(slot) == answer


def test_a_preempted_request_goes_on_with_the_same_bytes(engine: Engine, prompts: list[list[int]]) -> None:
    for prompt, sampling in ((prompts[1], SAMPLINGS[0]), (prompts[2], SAMPLINGS[2])):
        ids, records, _ = alone(engine, prompt, sampling)
        told = Told(engine)
        told.run([told.rows.add(3, prompt, **sampling)], [(3, len(prompt))])
        for _ in range(7):
            told.run()
        early = told.records.pop(3)
        # Recomputed with what it had put out, in chunks, in another slot and other blocks.
        again = told.rows.add(1, prompt + ids[:8], prompt_len=len(prompt), **sampling)
        told.run([again], [(1, len(prompt))], [3])
        told.run((), [(1, 8)])
        for _ in range(OUTPUT - 9):
            told.run()
        assert told.rows.output(1) == ids
        assert early + told.records[1] == records


def test_a_request_on_anothers_blocks_is_told_the_same_bytes(engine: Engine, prompts: list[list[int]]) -> None:
    prompt, sampling = prompts[3], {**SAMPLINGS[2], "prompt_logprobs": -1}
    expected = alone(engine, prompt, sampling)
    told = Told(engine)
    told.run([told.rows.add(0, prompt, temperature=1.5, seed=99, logprobs=0)], [(0, len(prompt))])
    told.run()
    for slot, cached in ((1, 16), (2, 96)):
        blocks = told.rows.table.block_table(0)[: cached // 16].tolist()
        hit = msgspec.structs.replace(told.rows.add(slot, prompt, **sampling), computed=cached)
        told.run([hit], [(slot, len(prompt) - cached)], shared={slot: blocks})
    for _ in range(OUTPUT):
        told.run()
    assert told.answer(1) == told.answer(2) == expected


@pytest.fixture(scope="module")
def reference_loss(model_cache: Path) -> float:
    torch.set_num_threads(2)
    return loss(build(dtype="float32"))


def loss(engine: Engine) -> float:
    """Mean negative log-likelihood of TEXT, in nats a token."""
    rows = EngineRows(engine)
    text = tokens_of(TEXT)
    results = rows.start([text], prompt_logprobs=0)
    engine.close()
    return -float(unpack_records(results.prompt_logprobs, 0)["pairs"]["logprob"].mean())


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 1e-3), ("stored", 1e-3), ("int8", 1e-2)])
def test_a_text_is_as_likely_as_in_float32(reference_loss: float, precision: str, bound: float) -> None:
    """The file's tensors are Q4_1 and Q8_0; decoded to fp32 they are what torch computes with."""
    assert 2.0 < reference_loss < 4.0
    assert loss(build(**PRECISIONS[precision])) == pytest.approx(reference_loss, rel=bound)

"""An engine that takes the time a model would and computes nothing: for load and scale tests.

Step time is linear in five features, the ones every ``StepDone`` carries, so that a fit of a real ``--step-log``
gives the coefficients::

    step_us = c0 + c1·prefill_tokens + c2·decode_seqs + c3·sum_ctx_decode + c4·sum_chunk_ctx_prefill

Ids are a pure function of (seed, position). Knows nothing of tensors.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.requests import MAX_IDS_PER_ROW
from protocol.worker import RowStatus
from workers.engine import EngineDescription, RowResults
from workers.options import WorkerOptions
from workers.script import ScriptError
from workers.scripted import fake_pool
from workers.slots import Int32Array, SlotParameters, SlotTable, StepBatch
from workers.step_log import StepFeatures
from workers.synthetic_logprobs import with_logprobs

if TYPE_CHECKING:
    from headrace.model_files.artefacts import Artefacts

Coefficient = Annotated[float, msgspec.Meta(ge=0)]
PLAIN_TOKEN = re.compile("[ĠA-Za-z]+")
"""Tokens of letters, and of a space in the byte-level alphabet."""


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Microseconds. The defaults resemble a fast CPU step of SmolLM2-135M in bfloat16 on two cores."""

    c0: Coefficient = 9_000.0
    c1: Coefficient = 180.0
    """Per prefill token."""
    c2: Coefficient = 250.0
    """Per decoding sequence."""
    c3: Coefficient = 2.3
    """Per token of context a decoding sequence reads."""
    c4: Coefficient = 0.1
    """Per pair of a chunk's token and a token of its context."""
    ids_per_row: Annotated[int, msgspec.Meta(ge=1, le=MAX_IDS_PER_ROW)] = 1

    def step_us(self, features: StepFeatures) -> float:
        """How long such a step takes."""
        return (
            self.c0
            + self.c1 * features.prefill_tokens
            + self.c2 * features.decode_seqs
            + self.c3 * features.sum_ctx_decode
            + self.c4 * features.sum_chunk_ctx_prefill
        )


def simulated_ids(seed: int, first_position: int, count: int, vocabulary: Int32Array) -> Int32Array:
    """``count`` ids from a position on: splitmix64 of seed and position picks from ``vocabulary``."""
    positions = np.arange(first_position, first_position + count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = np.uint64(seed) + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return vocabulary[(mixed % np.uint64(len(vocabulary))).astype(np.int64)]


class SimulatedEngine:
    """Sleeps as long as a step would take and returns deterministic ids."""

    def __init__(
        self,
        description: EngineDescription,
        times: StepTimes,
        vocabulary: Int32Array,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._description = description
        self._times = times
        self._vocabulary = vocabulary
        self._sleep = sleep

    @property
    def description(self) -> EngineDescription:
        """What the group registers."""
        return self._description

    def execute(self, batch: StepBatch, table: SlotTable) -> RowResults:
        """One step; every row that samples returns ``ids_per_row`` ids."""
        self._sleep(self._times.step_us(StepFeatures.of(batch, 0)) / 1e6)
        counts: npt.NDArray[np.uint8] = np.where(batch.samples, self._times.ids_per_row, 0).astype(np.uint8)
        ids = [self._row_ids(int(slot), table) for slot in batch.slots[batch.samples]]
        status = np.full(len(batch.slots), RowStatus.OK, dtype=np.uint8)
        results = RowResults(counts, np.concatenate(ids) if ids else np.zeros(0, dtype=np.int32), status)
        return with_logprobs(results, batch, table, lambda slot: _parameters(slot, table).seed)

    def reset(self) -> None:
        """Nothing is held per slot."""

    def close(self) -> None:
        """Nothing is held."""

    def _row_ids(self, slot: int, table: SlotTable) -> Int32Array:
        seed = _parameters(slot, table).seed
        return simulated_ids(seed, int(table.length[slot]), self._times.ids_per_row, self._vocabulary)


def _parameters(slot: int, table: SlotTable) -> SlotParameters:
    parameters = table.parameters[slot]
    assert parameters is not None, "an occupied slot has parameters"
    return parameters


def load_step_times(path: str) -> StepTimes:
    """Coefficients from a JSON object ``{"c0": …, …, "c4": …, "ids_per_row": …}``; defaults when path is empty."""
    if not path:
        return StepTimes()
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=StepTimes)
    except OSError as error:
        raise ScriptError(f"cannot read the step times {path}: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ScriptError(f"{path}: {error}") from error


def build_simulated_engine(options: WorkerOptions, artefacts: Artefacts) -> SimulatedEngine:
    """The engine of ``--engine simulated``; ``--engine-script`` may name a file of coefficients. Raises ScriptError."""
    times = load_step_times(options.engine_script)
    tokenizer_digest = artefacts.tokenizer_digest()
    plain = sorted(index for token, index in artefacts.tokenizer().get_vocab().items() if PLAIN_TOKEN.fullmatch(token))
    description = EngineDescription(
        shape=fake_pool(options, artefacts, times.ids_per_row),
        numerics_digest=blake2b(b"simulated" + tokenizer_digest, digest_size=16).digest(),
        tokenizer_digest=tokenizer_digest,
        backend="simulated",
    )
    return SimulatedEngine(description, times, np.array(plain, dtype=np.int32))

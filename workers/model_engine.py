"""The engine that runs a real model: weights, KV pool and sampler behind the Engine interface. Knows no tensor library.

Two builders make one: ``torch_engine`` (any device) and ``native_engine`` (CPUs the native library has code for).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Generic

import numpy as np
import numpy.typing as npt

from headrace.model_files.artefacts import Artefacts, load_artefacts
from protocol.worker import RowStatus
from workers.backends.base import Backend, Logits, StepInputs
from workers.engine import Engine, EngineDescription, EngineFault, RowResults
from workers.model.config import ModelConfig
from workers.model.errors import ModelError
from workers.model.precision import check_device, may_have_gpu, named_precision
from workers.options import WorkerOptions
from workers.prompt_logprobs import JudgedRows, judged_rows
from workers.sampling import Sampler
from workers.slots import SlotTable, StepBatch

_log = logging.getLogger(__name__)

Report = Callable[[str, float], None]
"""What is being done, and how much of it is."""

_NUMERICS_VERSION = "2"
"""Raise it when the same inputs should give other tokens than before."""


class ModelEngine(Generic[Logits]):
    """Runs the model on one rank, with a backend and a sampler of the same kind of arrays. See ``build_model_engine``.

    ``out_of_memory`` are the errors by which these say that a step was too large.
    """

    def __init__(
        self,
        backend: Backend[Logits],
        sampler: Sampler[Logits],
        description: EngineDescription,
        *,
        out_of_memory: tuple[type[Exception], ...] = (MemoryError,),
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend = backend
        self._sampler = sampler
        self._description = description
        self._out_of_memory = out_of_memory
        self._close = close

    @property
    def description(self) -> EngineDescription:
        return self._description

    def execute(self, batch: StepBatch, table: SlotTable) -> RowResults:
        """One step. Rows whose numbers are not finite fail alone."""
        self._sampler.add(batch.added, table)
        rows = len(batch.slots)
        counts, status = np.zeros(rows, dtype=np.uint8), np.full(rows, RowStatus.OK, dtype=np.uint8)
        if not rows:
            return RowResults(counts, np.zeros(0, dtype=np.int32), status)
        judged = judged_rows(batch, table)
        try:
            output = self._backend.step(_inputs(batch, table, judged))
            sampling = np.flatnonzero(batch.samples)
            positions = batch.context_lengths[sampling]
            sampled = self._sampler.sample(output.logits, batch.slots[sampling], positions, table)
            prompt_records = judged.records(output.judged, self._sampler.token_records)
        except self._out_of_memory as error:
            raise EngineFault("out_of_memory", _one_line(error), kv_survived=True) from error
        except RuntimeError as error:  # what torch and the native library raise for anything that goes wrong
            raise EngineFault("engine", _one_line(error), kv_survived=False) from error
        status[sampling] = sampled.status
        status[output.broken] = RowStatus.NAN
        status[judged.broken] = RowStatus.NAN
        self._clear_broken(batch, np.flatnonzero(status == RowStatus.NAN), table)
        succeeded = sampling[status[sampling] == RowStatus.OK]
        counts[succeeded] = 1
        ids = sampled.ids[status[sampling] == RowStatus.OK]
        records = zip(sampling, sampled.logprobs, strict=True)
        return RowResults(
            counts,
            ids,
            status,
            _details(status),
            logprobs=b"".join(record for row, record in records if status[row] == RowStatus.OK),
            prompt_logprobs=b"".join(record for row, record in prompt_records if status[row] == RowStatus.OK),
        )

    def reset(self) -> None:
        """Nothing is kept per slot that ``batch.added`` does not bring again."""

    def close(self) -> None:
        self._backend.close()
        self._close()

    def _clear_broken(self, batch: StepBatch, rows: npt.NDArray[np.intp], table: SlotTable) -> None:
        """Zero what these rows wrote. The blocks before may be shared: what is in them is sound, and others read it."""
        for row in rows:
            first = int(batch.starts[row]) // table.shape.block_size
            self._backend.clear_blocks(table.block_table(int(batch.slots[row]))[first:])


def build_model_engine(options: WorkerOptions, report: Report) -> Engine:
    """Load the model and make it ready for its first step.

    Raises ModelError or ArtefactError when it cannot be served as asked, ModelDoesNotFit when memory is short.
    """
    if options.tp != 1:
        raise ModelError(f"tensor parallelism is not built yet: tp is {options.tp}, only 1 works")
    check_device(options.device)
    named_precision(options.dtype)
    report("reading", 0.0)
    artefacts = load_artefacts(options.model, revision=options.revision, download_dir=options.download_dir)
    config = ModelConfig.from_dict(artefacts.config)
    if options.device == "cpu" or (options.device == "auto" and not may_have_gpu()):
        from workers.native_engine import NativeEngineUnsuited, build_native_engine

        try:
            return build_native_engine(options, artefacts, config, report)
        except NativeEngineUnsuited as reason:
            _log.info("the torch reference runs the model: %s", reason)
            return _build_torch_engine(options, artefacts, config, report, instead_of=str(reason))
    return _build_torch_engine(options, artefacts, config, report)


def numerics_digest(options: WorkerOptions, config: ModelConfig, content: bytes, facts: Mapping[str, str]) -> bytes:
    """Of everything that decides which tokens a request gets: equal digests promise equal tokens.

    ``content`` names the weights, ``facts`` what computes with them.
    """
    everything = {
        "version": _NUMERICS_VERSION,
        "weights": content.hex(),
        "config": repr(config),
        "tp": options.tp,
        "block size": options.block_size,
        **facts,
    }
    return hashlib.blake2b(json.dumps(everything, sort_keys=True).encode(), digest_size=16).digest()


def _build_torch_engine(
    options: WorkerOptions, artefacts: Artefacts, config: ModelConfig, report: Report, *, instead_of: str = ""
) -> Engine:
    try:
        from workers.torch_engine import build_torch_engine
    except ModuleNotFoundError as error:
        why = f"{instead_of}; " if instead_of else ""
        raise ModelError(f"{why}{error.name} is not installed: pip install 'headrace[worker]'") from error
    return build_torch_engine(options, artefacts, config, report)


def _inputs(batch: StepBatch, table: SlotTable, judged: JudgedRows) -> StepInputs:
    lengths = batch.lengths
    slots = np.repeat(batch.slots, lengths)
    ends = np.cumsum(lengths, dtype=np.int64)
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths) + np.repeat(batch.starts, lengths)
    width = -(-int(batch.context_lengths.max()) // table.shape.block_size)
    return StepInputs(
        tokens=table.tokens[slots, positions].astype(np.int64),
        starts=batch.starts,
        lengths=lengths,
        block_tables=table.blocks[batch.slots, :width],
        samples=batch.samples,
        judged=judged.tokens_of_step,
    )


def _details(status: npt.NDArray[np.uint8]) -> dict[int, str]:
    reasons = {RowStatus.NAN: "the logits are not finite", RowStatus.EMPTY_SUPPORT: "no token is allowed"}
    return {int(row): reasons[RowStatus(int(status[row]))] for row in np.flatnonzero(status != RowStatus.OK)}


def _one_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:500]

"""The engine that runs a real model: weights, KV pool and sampler behind the Engine interface."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from headrace.model_files.artefacts import Artefacts, cache_directory, load_artefacts
from protocol.worker import RowStatus
from workers.backends.base import Backend, StepInputs
from workers.backends.torch_reference import TorchReference
from workers.engine import Engine, EngineDescription, EngineFault, ModelDoesNotFit, RowResults
from workers.model.checkpoint import (
    Checkpoint,
    SafetensorsCheckpoint,
    check_tensors,
    content_id,
    safetensors_files,
)
from workers.model.config import ModelConfig
from workers.model.errors import ModelError
from workers.model.gguf_checkpoint import open_gguf
from workers.model.memory import MemoryNeeds, available_memory, gpu_memory, human_bytes, weight_bytes, working_bytes
from workers.model.precision import resolve_device, resolve_dtype
from workers.options import WorkerOptions
from workers.prompt_logprobs import JudgedRows, judged_rows
from workers.sampler import Sampler
from workers.slots import PoolShape, SlotTable, StepBatch
from workers.threads import usable_cpus

_log = logging.getLogger(__name__)

Report = Callable[[str, float], None]
"""What is being done, and how much of it is."""

_CPU_KV_BYTES = 512 << 20
_USEFUL_TOKENS = 256
"""A pool that cannot hold a sequence of this many tokens is of no use."""
_NUMERICS_VERSION = "1"
"""Raise it when the same inputs should give other tokens than before."""


class ModelEngine:
    """Runs the model on one rank. See ``build_model_engine``."""

    def __init__(self, backend: Backend, sampler: Sampler, description: EngineDescription) -> None:
        self._backend = backend
        self._sampler = sampler
        self._description = description

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
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise EngineFault("out_of_memory", _one_line(error), kv_survived=True) from error
        except RuntimeError as error:  # what torch raises for anything that goes wrong in an operation
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
    torch.set_num_threads(options.threads or usable_cpus())
    report("reading", 0.0)
    artefacts = load_artefacts(options.model, revision=options.revision, download_dir=options.download_dir)
    config = ModelConfig.from_dict(artefacts.config)
    device = resolve_device(options.device)
    source = _open(artefacts, config, options, device)
    shape = _plan_shape(options, config, source.dtype, device)
    content = content_id(source.files, cache_directory())
    checkpoint = source.load(content, lambda done: report("decoding", done))
    backend = TorchReference(
        config,
        checkpoint,
        dtype=source.dtype,
        device=device,
        # A plan may run on for a step or two past the end it does not know of yet.
        positions=shape.context + 2 * shape.max_ids_per_row,
        progress=lambda done: report("loading", done),
    )
    backend.allocate_kv(shape.num_blocks, shape.block_size)
    report("warming up", 0.0)
    backend.warm_up(shape.max_tokens_per_step, shape.max_slots)
    description = EngineDescription(
        shape=shape,
        numerics_digest=_numerics_digest(config, content, backend, options),
        tokenizer_digest=artefacts.tokenizer_digest(),
        backend=backend.name,
    )
    _log.info("%s: %s, %d KV blocks of %d", artefacts.name, backend.name, shape.num_blocks, shape.block_size)
    report("ready", 1.0)
    return ModelEngine(backend, Sampler(shape.max_slots, shape.vocab_size, device), description)


@dataclass(frozen=True)
class _Source:
    """An opened checkpoint and what it will be computed in."""

    dtype: torch.dtype
    files: list[Path]
    load: Callable[[bytes, Callable[[float], None]], Checkpoint]
    """Given the name of the content and a progress callback; decodes a GGUF file that was not decoded before."""


def _open(artefacts: Artefacts, config: ModelConfig, options: WorkerOptions, device: torch.device) -> _Source:
    path = artefacts.weights
    if not path.is_dir():
        dtype = resolve_dtype(options.dtype, gguf=True, named="", stored=torch.float32, device=device)
        cache = cache_directory()
        return _Source(
            dtype, [path], lambda content, progress: open_gguf(path, config, dtype, content, cache, progress)
        )
    files = safetensors_files(path)
    checkpoint = SafetensorsCheckpoint(files)
    check_tensors(config, checkpoint.shapes(), path)
    stored = checkpoint.stored_dtype()
    dtype = resolve_dtype(options.dtype, gguf=False, named=config.dtype, stored=stored, device=device)
    return _Source(dtype, files, lambda content, progress: checkpoint)


def _context(options: WorkerOptions, config: ModelConfig) -> int:
    if options.max_model_len is None:
        return config.context
    if not 0 < options.max_model_len <= config.context:
        raise ModelError(
            f"--max-model-len {options.max_model_len} is not within the model's context of {config.context} tokens"
        )
    return options.max_model_len


def _plan_shape(options: WorkerOptions, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> PoolShape:
    """Size the tables and the KV pool; raises ModelDoesNotFit when weights and pool exceed the memory."""
    on_cuda = device.type == "cuda"
    context = _context(options, config)
    slots = options.max_num_seqs or (256 if on_cuda else 64)
    tokens = max(options.max_num_batched_tokens or (8192 if on_cuda else 512), slots)
    needs = MemoryNeeds(
        weights=weight_bytes(config, dtype),
        step=working_bytes(config, tokens, slots),
        block=config.kv_bytes_per_token(dtype.itemsize) * options.block_size,
        least_blocks=-(-min(context, _USEFUL_TOKENS) // options.block_size),
    )
    bound = gpu_memory(device, options.gpu_memory_utilization) if on_cuda else available_memory()
    most_blocks = slots * -(-(context + 1) // options.block_size)
    return PoolShape(
        num_blocks=_num_blocks(options, needs, bound, bound if on_cuda else _CPU_KV_BYTES, most_blocks),
        block_size=options.block_size,
        max_slots=slots,
        max_tokens_per_step=tokens,
        max_ids_per_row=1,
        vocab_size=config.vocab_size,
        context=context,
    )


def _num_blocks(options: WorkerOptions, needs: MemoryNeeds, bound: int, default: int, most_blocks: int) -> int:
    """KV blocks of a pool of the size asked for, else of ``default`` bytes or what ``bound`` leaves."""
    if options.kv_cache_memory is None:
        wanted = min(default, needs.left(bound))
        needs.check(bound, needs.least_blocks)
        return max(needs.least_blocks, min(wanted // needs.block, most_blocks))
    blocks = options.kv_cache_memory // needs.block
    if not blocks:
        pool, block = human_bytes(options.kv_cache_memory), human_bytes(needs.block)
        raise ModelDoesNotFit(f"a KV pool of {pool} holds no block: {options.block_size} tokens take {block}")
    needs.check(bound, blocks)
    return blocks


def _numerics_digest(config: ModelConfig, content: bytes, backend: Backend, options: WorkerOptions) -> bytes:
    """Of everything that decides which tokens a request gets: equal digests promise equal tokens."""
    facts = {
        "version": _NUMERICS_VERSION,
        "weights": content.hex(),
        "config": repr(config),
        "tp": options.tp,
        "block size": options.block_size,
        **backend.numeric_class,
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).digest()


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

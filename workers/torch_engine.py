"""Builds the model engine on torch: any device, and the fp32 oracle of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.model_files.artefacts import Artefacts, cache_directory
from workers.backends.torch_reference import TorchReference
from workers.engine import Engine, EngineDescription
from workers.model.checkpoint import Checkpoint, check_tensors, content_id, safetensors_files
from workers.model.config import ModelConfig
from workers.model.errors import ModelError
from workers.model.gguf_checkpoint import open_gguf
from workers.model.memory import available_memory, weight_bytes, working_bytes
from workers.model.precision import checkpoint_precision, cpu_has_bfloat16, named_precision
from workers.model.safetensors_checkpoint import SafetensorsCheckpoint
from workers.model_engine import ModelEngine, Report, numerics_digest
from workers.options import WorkerOptions
from workers.pool_plan import CPU_KV_BYTES, CPU_LIMITS, CUDA_LIMITS, plan_blocks, plan_tables
from workers.sampler import Sampler
from workers.slots import PoolShape
from workers.threads import usable_cpus

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def build_torch_engine(options: WorkerOptions, artefacts: Artefacts, config: ModelConfig, report: Report) -> Engine:
    """See ``build_model_engine``."""
    if options.quantization:
        raise ModelError(
            f"--quantization {options.quantization} is for the native CPU backend, which does not run here"
        )
    if options.kv_cache_dtype not in ("auto", options.dtype):
        raise ModelError(
            f"--kv-cache-dtype {options.kv_cache_dtype}: the torch reference keeps KV in the model's dtype"
        )
    torch.set_num_threads(options.threads or usable_cpus())
    device = _resolve_device(options.device)
    source = _open(artefacts, config, options, device)
    shape = _plan_shape(options, config, source.dtype, device)
    content = content_id(source.files, cache_directory())
    checkpoint = source.load(content, lambda done: report("decoding", done))
    backend = TorchReference(
        config,
        checkpoint,
        dtype=source.dtype,
        device=device,
        positions=shape.context + 2 * shape.max_ids_per_row,
        progress=lambda done: report("loading", done),
    )
    backend.allocate_kv(shape.num_blocks, shape.block_size)
    report("warming up", 0.0)
    backend.warm_up(shape.max_tokens_per_step, shape.max_slots)
    description = EngineDescription(
        shape=shape,
        numerics_digest=numerics_digest(options, config, content, backend.numeric_class),
        tokenizer_digest=artefacts.tokenizer_digest(),
        backend=backend.name,
    )
    _log.info("%s: %s, %d KV blocks of %d", artefacts.name, backend.name, shape.num_blocks, shape.block_size)
    report("ready", 1.0)
    sampler = Sampler(shape.max_slots, shape.vocab_size, device)
    return ModelEngine(backend, sampler, description, out_of_memory=(torch.OutOfMemoryError, MemoryError))


@dataclass(frozen=True)
class _Source:
    """An opened checkpoint and what it will be computed in."""

    dtype: torch.dtype
    files: list[Path]
    load: Callable[[bytes, Callable[[float], None]], Checkpoint]
    """Given the name of the content and a progress callback; decodes a GGUF file that was not decoded before."""


def _resolve_device(option: str) -> torch.device:
    """``auto`` is CUDA when there is a GPU, else the CPU. Raises ModelError when there is none and one is asked for."""
    if option == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(option)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda was asked for and torch finds no GPU")
    return device


def _open(artefacts: Artefacts, config: ModelConfig, options: WorkerOptions, device: torch.device) -> _Source:
    path, asked = artefacts.weights, named_precision(options.dtype)
    if not path.is_dir():
        # A GGUF file has no precision of its own: bfloat16 where it is fast.
        fast = device.type == "cuda" or cpu_has_bfloat16()
        dtype = _DTYPES[asked if asked != "auto" else "bfloat16" if fast else "float32"]
        cache = cache_directory()
        return _Source(
            dtype, [path], lambda content, progress: open_gguf(path, config, dtype, content, cache, progress)
        )
    files = safetensors_files(path)
    checkpoint = SafetensorsCheckpoint(files)
    check_tensors(config, checkpoint.shapes(), path)
    stored = checkpoint.stored_dtype()
    own = checkpoint_precision(config.dtype, _STORED.get(stored, str(stored)))
    return _Source(_DTYPES[own if asked == "auto" else asked], files, lambda content, progress: checkpoint)


def _plan_shape(options: WorkerOptions, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> PoolShape:
    """Size the tables and the KV pool; raises ModelDoesNotFit when weights and pool exceed the memory."""
    on_cuda = device.type == "cuda"
    tables = plan_tables(options, config, CUDA_LIMITS if on_cuda else CPU_LIMITS)
    needs = tables.needs(
        weights=weight_bytes(config, dtype.itemsize),
        step=working_bytes(config, tables.tokens, tables.slots),
        block=config.kv_bytes_per_token(dtype.itemsize) * tables.block_size,
    )
    bound = _gpu_memory(device, options.gpu_memory_utilization) if on_cuda else available_memory()
    blocks = plan_blocks(options, tables, needs, bound, bound if on_cuda else CPU_KV_BYTES)
    return tables.shape(blocks, config.vocab_size)


def _gpu_memory(device: torch.device, utilisation: float) -> int:
    """Bytes this process may take on a GPU under ``--gpu-memory-utilization``, less what is taken already."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total * utilisation) - (total - free)

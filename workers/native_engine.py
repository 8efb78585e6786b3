"""Builds the model engine on the native CPU library: imports neither torch nor transformers.

Weights are packed once and mapped at later starts. What the library cannot do is left to the torch reference.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from headrace.model_files.artefact_error import ArtefactError
from headrace.model_files.artefacts import Artefacts, cache_directory
from headrace.model_files.gguf_metadata import read_metadata
from workers.backends.native_cpu.backend import NativeCpu
from workers.backends.native_cpu.errors import NativeCpuError, NativeCpuUnavailable
from workers.backends.native_cpu.library import ByteArray, NativeConfig, NativeLibrary, NumericType, Team, load_library
from workers.backends.native_cpu.packing import (
    PackedWeights,
    Precision,
    index_weights,
    pack_weights,
    read_packed,
    write_packed,
)
from workers.backends.native_cpu.sampler import NativeSampler
from workers.engine import Engine, EngineDescription, ModelDoesNotFit
from workers.model.checkpoint import EMBEDDING, check_tensors, content_id, safetensors_files
from workers.model.config import ModelConfig
from workers.model.errors import ModelError
from workers.model.gguf_tensors import GgufTensors
from workers.model.memory import available_memory
from workers.model.precision import checkpoint_precision, named_precision
from workers.model.raw_tensors import RawTensors, SafetensorsFiles
from workers.model.rope import inverse_frequencies, rope_tables
from workers.model_engine import ModelEngine, Report, numerics_digest
from workers.options import WorkerOptions
from workers.pool_plan import CPU_KV_BYTES, CPU_LIMITS, Tables, plan_blocks, plan_tables
from workers.threads import usable_cpus

_log = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_KV_TYPES = {"auto": NumericType.BF16, "bfloat16": NumericType.BF16, "int8": NumericType.INT8}
_PROBED_BYTES = 64 << 20
_WORTH_ANOTHER_HALF = 1.05
"""Half of the threads are enough when all of them read at less than this times their rate."""


class NativeEngineUnsuited(Exception):
    """Another engine must run the model; one line says why."""


def build_native_engine(options: WorkerOptions, artefacts: Artefacts, config: ModelConfig, report: Report) -> Engine:
    """See ``build_model_engine``. Raises NativeEngineUnsuited where the torch reference can serve instead."""
    source = _Source(artefacts, config)
    precision = _precision(options, source)
    kv_type = _kv_type(options)
    report("preparing the native library", 0.0)  # which is compiled when this is its first start
    try:
        library = load_library()
    except NativeCpuUnavailable as error:
        raise NativeEngineUnsuited(str(error)) from error
    with contextlib.ExitStack() as unless_built:
        team = Team(library, options.threads or usable_cpus())
        unless_built.callback(team.close)
        try:
            engine = _build(options, source, library, team, precision, kv_type, report)
        except NativeCpuError as error:
            raise NativeEngineUnsuited(f"the native library cannot hold the model: {error}") from error
        except MemoryError as error:
            raise ModelDoesNotFit("the model does not fit: the system has no memory for it") from error
        unless_built.pop_all()
    return engine


class _Source:
    """Where the weights come from."""

    def __init__(self, artefacts: Artefacts, config: ModelConfig) -> None:
        self.artefacts, self.config = artefacts, config
        path = artefacts.weights
        self.gguf = not path.is_dir()
        self.files = [path] if self.gguf else safetensors_files(path)

    def open(self) -> RawTensors:
        """The tensors, all there and of the right shapes. Raises ModelError."""
        path = self.artefacts.weights
        tensors: RawTensors
        tensors = GgufTensors(read_metadata(path), self.config) if self.gguf else SafetensorsFiles(self.files)
        check_tensors(self.config, tensors.shapes(), path)
        return tensors

    def own_precision(self) -> str:
        """A directory's: float32, bfloat16 or float16."""
        stored = "" if self.config.dtype else self.open().raw(EMBEDDING).kind
        return checkpoint_precision(self.config.dtype, stored)


def _precision(options: WorkerOptions, source: _Source) -> Precision:
    if options.block_size != _BLOCK_SIZE:
        raise NativeEngineUnsuited(f"blocks of {options.block_size} tokens; the native library has blocks of 16")
    asked = named_precision(options.dtype)
    if options.quantization == "int8":
        return Precision.INT8
    if asked in ("float32", "float16"):
        raise NativeEngineUnsuited(f"--dtype {asked}")
    if asked == "bfloat16":
        return Precision.BFLOAT16
    if source.gguf:
        return Precision.STORED
    own = source.own_precision()
    if own == "float32":
        raise NativeEngineUnsuited("the checkpoint is in float32; --dtype bfloat16 is for the native library")
    if own == "float16":
        _log.info("float16 weights become bfloat16, which this CPU multiplies")
    return Precision.BFLOAT16


def _kv_type(options: WorkerOptions) -> NumericType:
    if options.kv_cache_dtype not in _KV_TYPES:
        raise ModelError(
            f"--kv-cache-dtype {options.kv_cache_dtype} is not supported; supported: {', '.join(_KV_TYPES)}"
        )
    return _KV_TYPES[options.kv_cache_dtype]


def _build(
    options: WorkerOptions,
    source: _Source,
    library: NativeLibrary,
    team: Team,
    precision: Precision,
    kv_type: NumericType,
    report: Report,
) -> Engine:
    config = source.config
    tables = plan_tables(options, config, CPU_LIMITS)
    block = _kv_block_bytes(library, team, config, kv_type)
    content = content_id(source.files, cache_directory())
    num_blocks = 0

    def plan(weight_bytes: int) -> None:
        nonlocal num_blocks
        needs = tables.needs(weights=weight_bytes, step=_step_bytes(config, tables, team.threads), block=block)
        num_blocks = plan_blocks(options, tables, needs, available_memory(), CPU_KV_BYTES)

    weights = _weights(library, team, source, precision, content, plan, report)
    team = _enough_threads(options, library, team, weights.data)
    backend = NativeCpu(library, team, _native_config(config, tables.positions, weights, kv_type))
    weights.attach(backend)
    backend.allocate_kv(num_blocks, options.block_size)
    report("warming up", 0.0)
    backend.warm_up(tables.tokens, tables.slots)
    name = f"{backend.name}, weights {weights.index.types}, kv {kv_type.name}"
    sampler = NativeSampler(library, team, tables.slots, config.vocab_size)

    def close() -> None:
        sampler.close()
        team.close()

    description = EngineDescription(
        shape=tables.shape(num_blocks, config.vocab_size),
        numerics_digest=numerics_digest(
            options, config, content, {**backend.numeric_class, "precision": precision.value}
        ),
        tokenizer_digest=source.artefacts.tokenizer_digest(),
        backend=name,
    )
    _log.info("%s: %s, %d KV blocks of %d", source.artefacts.name, name, num_blocks, options.block_size)
    report("ready", 1.0)
    return ModelEngine(backend, sampler, description, close=close)


def _weights(
    library: NativeLibrary,
    team: Team,
    source: _Source,
    precision: Precision,
    content: bytes,
    plan: Callable[[int], None],
    report: Report,
) -> PackedWeights:
    """From the cache, where the first start puts them; ``plan`` is told their size before memory is taken."""
    kept = _packed_path(library, content, precision)
    weights = read_packed(kept)
    if weights is not None:
        report("loading", 1.0)
        plan(weights.index.size)
        return weights
    tensors = source.open()
    index = index_weights(library, source.config, tensors, precision)
    plan(index.size)
    weights = pack_weights(library, team, tensors, index, lambda done: report("loading", done))
    try:
        write_packed(weights, kept)
    except (OSError, ArtefactError) as error:
        _log.warning("packed weights are not kept: %s", error)
    return weights


def _packed_path(library: NativeLibrary, content: bytes, precision: Precision) -> Path:
    """Named after all that decides the bytes: the library's build stands for the layout."""
    return cache_directory() / "packed" / f"{content.hex()}-{precision.value}-{library.path.stem}"


def _kv_block_bytes(library: NativeLibrary, team: Team, config: ModelConfig, kv_type: NumericType) -> int:
    """Asked of a model without weights: the pool is planned before memory is taken."""
    empty = NativeCpu(library, team, _native_config(config, 1, None, kv_type))
    try:
        return empty.kv_block_bytes
    finally:
        empty.close()


def _enough_threads(options: WorkerOptions, library: NativeLibrary, team: Team, data: ByteArray) -> Team:
    """Half of the threads when the memory gives them as much as all: those of one core share what computes, too."""
    most = team.threads
    if options.threads or most < 4:
        return team
    part = data[: min(len(data), _PROBED_BYTES)]
    fewer = Team(library, most // 2)
    if library.stream_rate(team, part) > _WORTH_ANOTHER_HALF * library.stream_rate(fewer, part):
        fewer.close()
        return team
    team.close()
    _log.info("%d of %d CPUs reach the memory's limit and are used; --threads chooses otherwise", most // 2, most)
    return fewer


def _native_config(
    config: ModelConfig, positions: int, weights: PackedWeights | None, kv_type: NumericType
) -> NativeConfig:
    factors = weights.rope_factors() if weights is not None else None
    cos, sin = rope_tables(inverse_frequencies(config.rope, config.head_dim, factors), positions)
    return NativeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        rope_cos=cos,
        rope_sin=sin,
        kv_type=kv_type,
    )


def _step_bytes(config: ModelConfig, tables: Tables, threads: int) -> int:
    """What a step takes beside weights and pool, about: activations of its tokens, logits of its rows, sampling."""
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = 6 * (3 * config.hidden_size + 2 * width + 2 * config.intermediate_size)
    per_thread = 24 * config.vocab_size + (2 << 20)
    return tables.tokens * per_token + (tables.slots + 64) * 4 * config.vocab_size + threads * per_thread

"""The C interface from Python: one method per function of ``headrace_cpu.h``, arrays in and out.

Calls release the GIL. Arrays that a caller passes must be contiguous and of the type said; nothing is converted here
but what is small.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workers.backends.native_cpu.build import build_library
from workers.backends.native_cpu.errors import NativeCpuError, NativeCpuUnavailable

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

ABI = 1
ALIGNMENT = 64
_HUGE_PAGE = 2 << 20


class NumericType(IntEnum):
    """Formats of matrices, by GGUF's numbers where GGUF has one."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30
    INT8 = 1000
    """One fp32 scale per output channel; as a KV type, per token and KV head."""


QUANTISED = frozenset(
    (
        NumericType.Q4_0,
        NumericType.Q4_1,
        NumericType.Q5_0,
        NumericType.Q5_1,
        NumericType.Q8_0,
        NumericType.Q4_K,
        NumericType.Q5_K,
        NumericType.Q6_K,
    )
)
"""GGUF's block formats: they are kept as they are, or decoded to BF16 or INT8."""


class Activation(IntEnum):
    SILU = 0
    GELU_TANH = 1


class Matrix(IntEnum):
    """Matrices [out, in]; the parts of QKV (q, k, v) and GATE_UP (gate, up) are attached one by one."""

    EMBEDDING = 0
    HEAD = 1
    """Left out when the embedding serves as the head."""
    QKV = 2
    ATTENTION_OUT = 3
    GATE_UP = 4
    DOWN = 5


class Vector(IntEnum):
    """fp32 vectors; all but the first three may be left out."""

    FINAL_NORM = 0
    INPUT_NORM = 1
    MLP_NORM = 2
    QKV_BIAS = 3
    ATTENTION_OUT_BIAS = 4
    GATE_UP_BIAS = 5
    DOWN_BIAS = 6
    Q_NORM = 7
    K_NORM = 8
    POST_ATTENTION_NORM = 9
    POST_MLP_NORM = 10


@dataclass(frozen=True, kw_only=True)
class NativeConfig:
    """What the library must know of a decoder. Rope tables are fp32 [positions, rotary_dim / 2]."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_cos: Float32Array
    rope_sin: Float32Array
    rotary_dim: int = 0
    """0: the whole head."""
    activation: Activation = Activation.SILU
    kv_type: NumericType = NumericType.BF16
    attention_scale: float = 0.0
    """0: head_dim ** -0.5."""
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    windows: Sequence[int] = ()
    """Per layer, the tokens a query sees, itself included; 0 for all. Empty: all in every layer."""


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("abi", "vocab_size", "hidden_size", "intermediate_size", "num_layers")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "activation")),
        *((name, ctypes.c_int32) for name in ("kv_type", "rope_positions")),
        *((name, ctypes.c_float) for name in ("norm_eps", "attention_scale", "attention_softcap", "logit_softcap")),
        *((name, ctypes.c_float) for name in ("embedding_multiplier", "residual_multiplier", "logit_multiplier")),
        *((name, ctypes.c_void_p) for name in ("rope_cos", "rope_sin", "windows")),
    ]


class _StepArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "tokens", "table_width", "judged_count")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "starts", "lengths", "block_tables", "samples", "judged")),
        *((name, ctypes.c_void_p) for name in ("logits", "greedy", "broken")),
    ]


_INT, _LONG, _SIZE, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "error_message": (ctypes.c_char_p, ()),
    "isa": (ctypes.c_char_p, ()),
    "team_create": (_INT, (_INT, _POINTER)),
    "team_threads": (_INT, (_POINTER,)),
    "team_destroy": (None, (_POINTER,)),
    "stream_rate": (ctypes.c_double, (_POINTER, _POINTER, _SIZE, _INT)),
    "packed_bytes": (_SIZE, (_INT, _LONG, _LONG)),
    "pack": (_INT, (_POINTER, _INT, _INT, _LONG, _LONG, _POINTER, _SIZE, _POINTER, _POINTER)),
    "unpack_rows": (_INT, (_INT, _LONG, _LONG, _POINTER, _POINTER, _LONG, _POINTER)),
    "linear": (_INT, (_POINTER, _INT, _LONG, _LONG, _POINTER, _POINTER, _INT, _POINTER)),
    "model_create": (_INT, (_POINTER, _POINTER, _POINTER)),
    "attach_matrix": (_INT, (_POINTER, _INT, _INT, _INT, _INT, _LONG, _LONG, _POINTER)),
    "attach_vector": (_INT, (_POINTER, _INT, _INT, _POINTER, _LONG)),
    "model_complete": (_INT, (_POINTER,)),
    "kv_block_bytes": (_SIZE, (_POINTER,)),
    "allocate_kv": (_INT, (_POINTER, _LONG, _INT)),
    "reserve": (_INT, (_POINTER, _INT, _INT)),
    "step": (_INT, (_POINTER, _POINTER)),
    "judged_logits": (_INT, (_POINTER, _INT, _INT, _POINTER)),
    "clear_blocks": (_INT, (_POINTER, _POINTER, _INT)),
    "model_destroy": (None, (_POINTER,)),
}


class NativeLibrary:
    """The loaded library. ``handle`` gives functions that other modules of the same library declare themselves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.handle, f"headrace_{name}")  # by name: indexing makes another object each time
            function.restype, function.argtypes = result, arguments

    @property
    def isa(self) -> str:
        """The level in use: amx, avx512, or none."""
        return str(self.handle.headrace_isa().decode())

    def check(self, status: int) -> None:
        """Raise what a function's result says: NativeCpuError, MemoryError or NativeCpuUnavailable."""
        if not status:
            return
        message = self.handle.headrace_error_message().decode()
        raise {2: MemoryError, 3: NativeCpuUnavailable}.get(status, NativeCpuError)(message)

    def packed_bytes(self, packed: NumericType, rows: int, columns: int) -> int:
        """Size of a packed matrix; raises NativeCpuError when the format cannot hold this shape."""
        size = int(self.handle.headrace_packed_bytes(packed, rows, columns))
        if not size:
            raise NativeCpuError(f"{packed.name} cannot hold a matrix of {rows} x {columns}")
        return size

    def pack(
        self,
        team: Team,
        source: ByteArray,
        source_type: NumericType,
        packed_type: NumericType,
        shape: tuple[int, int],
        target: ByteArray,
        row_order: Int32Array | None = None,
    ) -> None:
        """Pack a row-major matrix [out, in] from its raw bytes into ``target``, which is aligned to ALIGNMENT.

        ``row_order`` [out] names the source row of each target row.
        """
        assert target.nbytes >= self.packed_bytes(packed_type, *shape), "the target is too small"
        order = None if row_order is None else row_order.ctypes.data
        rows, columns = shape
        self.check(
            self.handle.headrace_pack(
                team.pointer,
                source_type,
                packed_type,
                rows,
                columns,
                source.ctypes.data,
                source.nbytes,
                order,
                target.ctypes.data,
            )
        )

    def unpack_rows(
        self, packed_type: NumericType, shape: tuple[int, int], packed: ByteArray, wanted: Int64Array
    ) -> Float32Array:
        """Rows of a packed matrix as the products see them, fp32 [wanted, in]."""
        out = np.empty((len(wanted), shape[1]), dtype=np.float32)
        arguments = (packed_type, *shape, packed.ctypes.data, wanted.ctypes.data, len(wanted), out.ctypes.data)
        self.check(self.handle.headrace_unpack_rows(*arguments))
        return out

    def linear(
        self,
        team: Team,
        packed_type: NumericType,
        shape: tuple[int, int],
        packed: ByteArray,
        x: Float32Array,
        out: Float32Array | None = None,
    ) -> Float32Array:
        """One product alone: x fp32 [m, in] as the level rounds it → fp32 [m, out], in ``out`` when given."""
        if out is None:
            out = np.empty((len(x), shape[0]), dtype=np.float32)
        arguments = (packed_type, *shape, packed.ctypes.data, x.ctypes.data, len(x), out.ctypes.data)
        self.check(self.handle.headrace_linear(team.pointer, *arguments))
        return out

    def stream_rate(self, team: Team, data: ByteArray, repeats: int = 3) -> float:
        """Bytes a second that the team reads from ``data``, the best of ``repeats``."""
        return float(self.handle.headrace_stream_rate(team.pointer, data.ctypes.data, data.nbytes, repeats))


class Team:
    """Threads of the library, the caller's among them. They sleep between calls; ``threads`` 0 means all allowed."""

    def __init__(self, library: NativeLibrary, threads: int = 0) -> None:
        self._library = library
        created = ctypes.c_void_p()
        library.check(library.handle.headrace_team_create(threads, ctypes.byref(created)))
        self.pointer = created
        self.threads = int(library.handle.headrace_team_threads(created))

    def close(self) -> None:
        if self.pointer:
            self._library.handle.headrace_team_destroy(self.pointer)
            self.pointer = ctypes.c_void_p()


def load_library() -> NativeLibrary:
    """Build the library if need be, and load it. Raises NativeCpuUnavailable, also when the CPU has no level for it."""
    library = NativeLibrary(build_library())
    if library.isa == "none":
        raise NativeCpuUnavailable("this CPU has neither AMX nor AVX512 with VNNI, or HEADRACE_CPU_ISA leaves none")
    return library


def aligned_bytes(size: int) -> ByteArray:
    """Zeroed memory for packed weights, in huge pages where the system gives them; taken as it is first written."""
    memory = mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    skip = -whole.ctypes.data % _HUGE_PAGE
    return whole[skip : skip + size]


def native_config(config: NativeConfig) -> tuple[ctypes.Structure, tuple[object, ...]]:
    """The C struct, and what must live while it is used."""
    cos = np.ascontiguousarray(config.rope_cos, dtype=np.float32)
    sin = np.ascontiguousarray(config.rope_sin, dtype=np.float32)
    windows = np.asarray(config.windows, dtype=np.int32)
    result = _Config(
        abi=ABI,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=config.rotary_dim or config.head_dim,
        activation=config.activation,
        kv_type=config.kv_type,
        rope_positions=cos.shape[0],
        norm_eps=config.norm_eps,
        attention_scale=config.attention_scale or config.head_dim**-0.5,
        attention_softcap=config.attention_softcap,
        logit_softcap=config.logit_softcap,
        embedding_multiplier=config.embedding_multiplier,
        residual_multiplier=config.residual_multiplier,
        logit_multiplier=config.logit_multiplier,
        rope_cos=cos.ctypes.data,
        rope_sin=sin.ctypes.data,
        windows=windows.ctypes.data if len(windows) else None,
    )
    return result, (cos, sin, windows)


def step_arguments(**values: int | None) -> ctypes.Structure:
    """Numbers and addresses by the field names of ``headrace_step_arguments``."""
    return _StepArguments(**values)

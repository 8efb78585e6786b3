"""Which device and precision a model runs in."""

from __future__ import annotations

from pathlib import Path

import torch

from workers.model.errors import ModelError

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp16": torch.float16,
}
_CPUINFO = Path("/proc/cpuinfo")


def resolve_device(option: str) -> torch.device:
    """``auto`` is CUDA when there is a GPU, else the CPU. Raises ModelError on a device this machine lacks."""
    if option == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(option)
    except RuntimeError as error:
        raise ModelError(f"device {option} is not known; known: auto, cpu, cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device {option} is not supported; supported: auto, cpu, cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda was asked for and torch finds no GPU")
    return device


def resolve_dtype(option: str, *, gguf: bool, named: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The precision to compute in.

    ``auto`` is the checkpoint's: ``named`` in its config.json, else as ``stored``. A GGUF file has none of its own:
    bfloat16 where it is fast (CUDA, or a CPU with AVX512-BF16 or AMX), else float32.
    """
    if option != "auto":
        if option not in _DTYPES:
            raise ModelError(f"dtype {option} is not supported; supported: auto, float32, bfloat16, float16")
        return _DTYPES[option]
    if gguf:
        return torch.bfloat16 if device.type == "cuda" or cpu_has_bfloat16() else torch.float32
    dtype = _DTYPES.get(named.removeprefix("torch."), stored)
    if dtype not in _DTYPES.values():
        raise ModelError(f"the checkpoint is stored as {dtype}, which is not supported; --dtype names another")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cpu_has_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the CPU multiplies bfloat16 natively."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags

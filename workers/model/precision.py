"""Which device and precision a model runs in, by name. Knows no tensor library."""

from __future__ import annotations

import re
from pathlib import Path

from workers.model.errors import ModelError

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value, by precision."""

_OTHER_NAMES = {"float": "float32", "fp32": "float32", "bf16": "bfloat16", "half": "float16", "fp16": "float16"}
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_CPUINFO = Path("/proc/cpuinfo")
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def may_have_gpu() -> bool:
    """Whether it is worth asking torch for one."""
    return any(path.exists() for path in _GPU_DEVICES)


def check_device(option: str) -> None:
    """Raise ModelError on a device that nothing here runs on."""
    if not _DEVICE.fullmatch(option):
        raise ModelError(f"device {option} is not supported; supported: auto, cpu, cuda, cuda:N")


def named_precision(option: str) -> str:
    """``--dtype`` as one of ITEMSIZES, or auto. Raises ModelError."""
    name = _OTHER_NAMES.get(option, option)
    if name != "auto" and name not in ITEMSIZES:
        raise ModelError(f"dtype {option} is not supported; supported: auto, float32, bfloat16, float16")
    return name


def checkpoint_precision(named: str, stored: str) -> str:
    """A directory's own: ``named`` in its config.json, else as its tensors are ``stored`` (F32, BF16, F16)."""
    name = named.removeprefix("torch.")
    name = _OTHER_NAMES.get(name, name)
    if name in ITEMSIZES:
        return name
    if stored not in _STORED:
        raise ModelError(f"the checkpoint is stored as {stored}, which is not supported; --dtype names another")
    return _STORED[stored]


def cpu_has_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the CPU multiplies bfloat16 natively."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags

"""Safetensors files as torch tensors: views of the mapped file, of which nothing is read before it is used."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.model.checkpoint import EMBEDDING
from workers.model.errors import ModelError


class SafetensorsCheckpoint:
    """One or more safetensors files, mapped."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._handles: dict[str, Any] = {}  # tensor name → open file; safetensors has no public type for it
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file}: cannot be read as safetensors: {error}") from error
            for name in handle.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 (a handle is not a mapping)
                if name in self._handles:
                    raise ModelError(f"{file}: tensor {name} is in another file too")
                self._handles[name] = handle

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(handle.get_slice(name).get_shape()) for name, handle in self._handles.items()}

    def stored_dtype(self) -> torch.dtype:
        return self.tensor(EMBEDDING).dtype

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor

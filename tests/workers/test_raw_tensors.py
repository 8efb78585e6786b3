"""Files read without a tensor library hold the same tensors as the libraries that wrote them say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from workers.model.errors import ModelError
from workers.model.raw_tensors import RawTensor, SafetensorsFiles, deinterleaved

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.mark.parametrize("kind", list(DTYPES))
def test_safetensors_come_back_as_they_were_written(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    tensors = {
        "matrix": torch.randn(7, 5).to(DTYPES[kind]),
        "vector": torch.randn(9).to(DTYPES[kind]),
        "ids": torch.arange(3),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    files = SafetensorsFiles([tmp_path / "a.safetensors"])
    assert files.shapes() == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in ("matrix", "vector"):
        raw = files.raw(name)
        assert raw.kind == kind
        assert np.array_equal(raw.float32(), tensors[name].float().numpy())
    with pytest.raises(ModelError, match="type I64"):
        files.raw("ids").float32()


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        save_file({"one": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match="tensor one is in another file too"):
        SafetensorsFiles(sorted(tmp_path.iterdir()))


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 400]}}',
        '{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        '{"a": {"dtype": "F32", "shape": [2]}}',
        '{"a": 3}',
        "[1, 2]",
        "{nonsense",
    ],
)
def test_a_header_that_contradicts_the_file_is_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    with pytest.raises(ModelError, match=r"a\.safetensors"):
        SafetensorsFiles([path])


def test_rotary_pairs_side_by_side_become_two_halves() -> None:
    assert deinterleaved(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    stored = np.arange(8, dtype=np.float32)
    raw = RawTensor("F32", (8,), stored.view(np.uint8), deinterleaved(8, 2))
    assert raw.float32().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]

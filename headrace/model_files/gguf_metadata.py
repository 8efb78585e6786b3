"""Reads the header of a GGUF file: metadata and where each tensor is, never tensor data.

`gguf.GGUFReader` makes several numpy views per string and takes about three seconds for a vocabulary of 49 k
tokens; walking the same bytes with `struct` takes a few hundredths. Tensor data is the loaders' business.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.model_files.artefact_error import ArtefactError

_SUPPORTED_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_DIMENSIONS = 8
_DEFAULT_ALIGNMENT = 32

_STRING = 8
_ARRAY = 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_u32 = struct.Struct("<I")
_u64 = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorEntry:
    """One row of the tensor table. `shape` is in row-major order, as numpy and torch have it."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    """Bytes from the start of the file to the tensor's data."""


@dataclass(frozen=True)
class GgufMetadata:
    """What the header says."""

    path: Path
    fields: dict[str, Any]
    tensors: tuple[TensorEntry, ...]

    def text(self, key: str, default: str | None = None) -> str:
        """A string field; without a default it must be there."""
        value = self.fields.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer field; without a default it must be there."""
        value = self.fields.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "an integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A numeric field; without a default it must be there."""
        value = self.fields.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number", value)
        return value

    def token_id(self, name: str) -> int | None:
        """`tokenizer.ggml.<name>_token_id`, when there is one and it is in the vocabulary."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.fields:
            return None
        index = self.integer(key)
        return index if 0 <= index < len(self.strings("tokenizer.ggml.tokens")) else None

    def strings(self, key: str, default: list[str] | None = None) -> list[str]:
        """An array of strings; without a default it must be there."""
        value = self.fields.get(key, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "an array of strings", value)
        return value

    def tensor_names(self) -> frozenset[str]:
        return frozenset(entry.name for entry in self.tensors)

    def _wrong(self, key: str, wanted: str, value: Any) -> ArtefactError:
        found = "it is missing" if value is None else f"it is of type {type(value).__name__}"
        return ArtefactError(f"{self.path}: metadata {key} should be {wanted}; {found}")


def read_metadata(path: Path) -> GgufMetadata:
    """Parse the header of `path`.

    Raises ArtefactError for anything that is not a whole, little-endian GGUF header of version 2 or 3.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, path)
            return cursor.header()
    except (OSError, ValueError) as error:
        if isinstance(error, ArtefactError):
            raise
        raise ArtefactError(f"{path}: cannot be read as a GGUF file: {error}") from error


class _Cursor:
    """A position in the mapped file; every read is checked against the file's end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._size = len(data)
        self._at = 0

    def header(self) -> GgufMetadata:
        if self._data[:4] != b"GGUF":
            raise ArtefactError(f"{self._path}: not a GGUF file: it does not start with the letters GGUF")
        self._at = 4
        version = self._u32()
        if version not in _SUPPORTED_VERSIONS:
            raise ArtefactError(f"{self._path}: GGUF version {version} is not supported; versions 2 and 3 are")
        tensor_count = self._count(_MAX_TENSORS, "tensors")
        entry_count = self._count(_MAX_ENTRIES, "metadata entries")
        fields: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            fields[key] = self._value(self._u32(), key)
        tensors = tuple(self._tensor() for _ in range(tensor_count))
        alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._broken(f"general.alignment is {alignment!r}")
        data = -(-self._at // alignment) * alignment
        return GgufMetadata(self._path, fields, tuple(replace(t, offset=data + t.offset) for t in tensors))

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalars(_SCALARS[kind], 1)[0]
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        raise self._broken(f"metadata {key} has the unknown type {kind}")

    def _array(self, key: str) -> list[Any]:
        kind = self._u32()
        count = self._u64()
        if kind in _SCALARS:
            return list(self._scalars(_SCALARS[kind], count))
        if kind == _STRING:
            return self._strings(count)
        raise self._broken(f"metadata {key} is an array of type {kind}, which nothing here uses")

    def _scalars(self, code: str, count: int) -> tuple[Any, ...]:
        width = struct.calcsize("<" + code)
        start = self._advance(width * count)
        return struct.unpack_from(f"<{count}{code}", self._data, start)

    def _strings(self, count: int) -> list[str]:
        # The hot loop: a vocabulary and its merges are a few hundred thousand strings.
        if count * 8 > self._size - self._at:
            raise self._broken(f"an array says it has {count} strings")
        data, at, size = self._data, self._at, self._size
        unpack: Callable[..., tuple[int]] = _u64.unpack_from
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0]
                if at > size:
                    raise self._broken("a string runs past the end of the file")
                append(data[start:at].decode())
        except struct.error as error:
            raise self._broken("the file ends inside an array of strings") from error
        except UnicodeDecodeError as error:
            raise self._broken(f"a string is not UTF-8: {error}") from error
        self._at = at
        return strings

    def _string(self) -> str:
        return self._strings(1)[0]

    def _tensor(self) -> TensorEntry:
        name = self._string()
        dimensions = self._u32()
        if dimensions > _MAX_DIMENSIONS:
            raise self._broken(f"tensor {name} has {dimensions} dimensions")
        shape = self._scalars("Q", dimensions)
        ggml_type = self._u32()
        offset = self._u64()  # from the start of the data section, which is known after the last entry
        return TensorEntry(name, tuple(reversed(shape)), ggml_type, offset)

    def _count(self, limit: int, what: str) -> int:
        count = self._u64()
        if count > limit:
            raise self._broken(f"it says it has {count} {what}; the limit is {limit}")
        return count

    def _u32(self) -> int:
        value: int = _u32.unpack_from(self._data, self._advance(4))[0]
        return value

    def _u64(self) -> int:
        value: int = _u64.unpack_from(self._data, self._advance(8))[0]
        return value

    def _advance(self, size: int) -> int:
        start = self._at
        if size > self._size - start:
            raise self._broken(f"the file ends at byte {self._size}, inside its header")
        self._at = start + size
        return start

    def _broken(self, what: str) -> ArtefactError:
        return ArtefactError(f"{self._path}: broken GGUF header near byte {self._at}: {what}")

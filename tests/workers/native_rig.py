"""The native library at its best level for tests; those that need it are skipped where it cannot be had."""

from __future__ import annotations

import pytest

from workers.backends.native_cpu.errors import NativeCpuUnavailable
from workers.backends.native_cpu.library import NativeLibrary, load_library


def native_library() -> NativeLibrary:
    """Skips the test when there is none."""
    try:
        return load_library()
    except NativeCpuUnavailable as error:
        pytest.skip(f"no native library here: {error}")


def has_native_library() -> bool:
    """Whether models run on it here unless they are asked not to."""
    try:
        load_library()
    except NativeCpuUnavailable:
        return False
    return True

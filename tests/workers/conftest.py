"""What the tests of workers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.model_files.cache import cache_directory, private_directory


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this run's own, for tests that load models."""
    cache = tmp_path_factory.mktemp("cache")
    # But for the native library, whose build takes longer than all that is tested with it.
    (cache / "native_cpu").symlink_to(private_directory(cache_directory() / "native_cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE", str(cache))
        yield cache


@pytest.fixture
def one_thread() -> None:
    """Small tensors gain nothing from a second thread, and on a busy machine each waits for the other."""
    import torch

    torch.set_num_threads(1)

"""What the tests of workers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this run's own, for tests that load models."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE", str(cache))
        yield cache


@pytest.fixture
def one_thread() -> None:
    """Small tensors gain nothing from a second thread, and on a busy machine each waits for the other."""
    import torch

    torch.set_num_threads(1)

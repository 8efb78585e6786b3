"""The byte model, and benches with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.model_files.artefacts import Artefacts, byte_artefacts
from tests.frontend.harness import Bench, bench, live_bench


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Artefacts:
    return byte_artefacts(cache=tmp_path_factory.mktemp("cache"))


@pytest_asyncio.fixture
async def here(tmp_path: Path, artefacts: Artefacts) -> AsyncIterator[Bench]:
    async with bench(tmp_path, artefacts) as made:
        yield made


@pytest_asyncio.fixture
async def live(tmp_path: Path, artefacts: Artefacts) -> AsyncIterator[Bench]:
    async with live_bench(tmp_path, artefacts) as made:
        yield made

"""Fixtures: the library at each level, and teams of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers.native_cpu.rig import LEVELS, level_library
from workers.backends.native_cpu.library import NativeLibrary, Team


@pytest.fixture(params=list(LEVELS))
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NativeLibrary:
    return level_library(request.param, monkeypatch)


@pytest.fixture
def team(library: NativeLibrary) -> Iterator[Team]:
    team = Team(library, 2)
    yield team
    team.close()


@pytest.fixture
def lone(library: NativeLibrary) -> Iterator[Team]:
    """A team of one thread."""
    team = Team(library, 1)
    yield team
    team.close()

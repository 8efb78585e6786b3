"""A bad network between hosts: whatever it does, and for however long, every stream continues exactly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.laboratory import Laboratory
from tests.faults.ledger import Verdict
from tests.faults.network import PEER_TIMEOUT, NetworkedServer
from tests.faults.proxy import Proxy, Weather
from tests.faults.scenarios import Phase, mixed_asks, script

pytestmark = pytest.mark.slow

STREAMS = 12
BRIEF, LONG = 0.5, 2.5 * PEER_TIMEOUT
"""Seconds: sessions live through the first and not through the second."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkedServer]:
    directory: Path = tmp_path_factory.mktemp("network")
    (directory / "script.jsonl").write_text(script(STREAMS, delay_ms=10))
    with NetworkedServer(directory, directory / "script.jsonl") as server:
        yield server


@pytest.fixture(scope="module")
def laboratory(server: NetworkedServer, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(server, mixed_asks("networked", STREAMS, max_tokens=40), tmp_path_factory.mktemp("ledgers"))


@pytest.fixture(params=["frontend link", "worker link"])
def link(request: pytest.FixtureRequest, server: NetworkedServer) -> Proxy:
    return server.frontend_link if request.param == "frontend link" else server.worker_link


@pytest.mark.parametrize(
    ("weather", "seconds"),
    [
        (Weather.PARTITION, BRIEF),
        (Weather.PARTITION, LONG),
        (Weather.DEAF, LONG),
        (Weather.MUTE, LONG),
        (Weather.SLOW, BRIEF),
        (Weather.CUT, BRIEF),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, Weather) else f"{value:g}s",
)
def test_every_stream_continues_exactly(laboratory: Laboratory, link: Proxy, weather: Weather, seconds: float) -> None:
    def strike() -> None:
        with link.weather(weather):
            time.sleep(seconds)

    outcome = laboratory.hurt(f"{weather.value} for {seconds:g} s", Phase.FIRST, strike)
    assert outcome.struck, "the streams were over too early"
    assert outcome.count(Verdict.EXACT) == STREAMS, f"{outcome.verdicts}; ledgers: {outcome.saved}"

"""The short form of the laboratory: counts, no times. ``make faults`` runs the whole matrix."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.serve_process import ServeProcess
from tests.faults.laboratory import Laboratory
from tests.faults.ledger import Verdict
from tests.faults.scenarios import Fault, Phase, Role, Scenario, mixed_asks, script

pytestmark = pytest.mark.slow

STREAMS = 24


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """Two groups, two frontends, and fewer slots than choices."""
    directory: Path = tmp_path_factory.mktemp("faults")
    (directory / "script.jsonl").write_text(script(STREAMS, delay_ms=10))
    arguments = ["--launcher", "local", "--groups", "2", "--frontends", "2", "--max-num-seqs", "12"]
    arguments += ["--engine", "scripted", "--tokenizer", "byte", "--engine-script", str(directory / "script.jsonl")]
    with ServeProcess(*arguments) as server:
        server.wait_for_groups(2)
        model = server.client().models.list().data[0].id
        yield Laboratory(server, mixed_asks(model, STREAMS, max_tokens=40), directory / "ledgers")


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario("group killed, queued", Fault(Role.RANK), Phase.QUEUED),
        Scenario("group killed, last token", Fault(Role.RANK), Phase.LAST),
        Scenario("every group killed, middle", Fault(Role.RANK, every=True), Phase.MIDDLE),
        Scenario("group stopped for 2 s, middle", Fault(Role.RANK, signal.SIGSTOP, 2.0), Phase.MIDDLE),
        Scenario("scheduler killed, prefill", Fault(Role.SCHEDULER), Phase.PREFILL),
        Scenario("scheduler killed, middle", Fault(Role.SCHEDULER), Phase.MIDDLE),
        Scenario("scheduler killed twice, first token", Fault(Role.SCHEDULER, times=2), Phase.FIRST),
        Scenario("launcher killed, middle", Fault(Role.LAUNCHER), Phase.MIDDLE),
    ],
    ids=lambda scenario: scenario.name.replace(", ", "-").replace(" ", "-"),
)
def test_every_stream_continues_exactly(laboratory: Laboratory, scenario: Scenario) -> None:
    outcome = laboratory.run(scenario)
    assert outcome.struck, "nothing was hurt: the streams were over too early"
    assert outcome.count(Verdict.EXACT) == STREAMS, f"{outcome.verdicts}; ledgers: {outcome.saved}"


def test_a_killed_frontend_takes_no_streams_but_its_own(laboratory: Laboratory) -> None:
    outcome = laboratory.run(Scenario("frontend killed, first token", Fault(Role.FRONTEND), Phase.FIRST))
    assert outcome.struck == 1
    assert outcome.count(Verdict.LOST) == 0, f"{outcome.verdicts}; ledgers: {outcome.saved}"

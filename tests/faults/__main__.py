"""``make faults``: the whole matrix against the scripted engine or a real model, on this machine."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.end_to_end.serve_process import ServeProcess
from tests.faults.laboratory import Laboratory, Outcome
from tests.faults.ledger import Verdict
from tests.faults.report import HEAD, row, total
from tests.faults.scenarios import matrix, mixed_asks, random_kills, script


def main() -> int:
    parser = argparse.ArgumentParser("tests.faults", description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--launcher", nargs="+", default=["local"], choices=("local", "ray"))
    parser.add_argument("--model", default="", help="a real model instead of the scripted engine")
    parser.add_argument("--kills", type=int, default=0, help="so many random kills in a row instead of the matrix")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "headrace-faults")
    given = parser.parse_args()
    outcomes: list[Outcome] = []
    for launcher in given.launcher:
        for groups in given.groups:
            _say(f"\n{launcher} launcher, {groups} group{'s' * (groups > 1)}, 2 frontends\n{HEAD}")
            with ServeProcess(*_arguments(given, launcher, groups)) as server:
                server.wait_for_groups(groups)
                model = server.client().models.list().data[0].id
                laboratory = Laboratory(server, mixed_asks(model, given.streams, given.max_tokens), given.keep)
                for scenario in random_kills(given.kills, given.seed) if given.kills else matrix():
                    if given.only in scenario.name:
                        outcomes.append(laboratory.run(scenario))
                        _say(row(outcomes[-1]))
                _say(laboratory.memory())
    _say(f"\n{total(outcomes)}")
    lost = sum(outcome.count(Verdict.LOST) for outcome in outcomes)
    if lost:
        _say(f"ledgers of lost streams: {given.keep}")
    return bool(lost)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _arguments(given: argparse.Namespace, launcher: str, groups: int) -> list[str]:
    shape = ["--launcher", launcher, "--groups", str(groups), "--frontends", "2"]
    if given.model:
        return [given.model, *shape]
    file = Path(tempfile.mkdtemp(prefix="headrace-faults-")) / "script.jsonl"
    file.write_text(script(given.streams, delay_ms=15))
    # Fewer slots than streams: some are always queued.
    return [*shape, "--engine", "scripted", "--tokenizer", "byte", "--engine-script", str(file), "--max-num-seqs", "24"]


if __name__ == "__main__":
    sys.exit(main())

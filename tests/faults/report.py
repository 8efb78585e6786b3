"""Outcomes as a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from tests.faults.laboratory import Outcome
from tests.faults.ledger import Verdict

HEAD = (
    f"{'scenario':<44} {'streams':>7} {'exact':>6} {'clean':>6} {'lost':>5}  {'noticed s':>10}  {'pause p50/max s':>16}"
)


def row(outcome: Outcome) -> str:
    """One scenario."""
    pauses = outcome.pauses or [0.0]
    noticed = f"{max(outcome.noticed):.2f}" if outcome.noticed else "-"
    return (
        f"{outcome.name:<44} {len(outcome.verdicts):>7} {outcome.count(Verdict.EXACT):>6} "
        f"{outcome.count(Verdict.FAILED_CLEANLY):>6} {outcome.count(Verdict.LOST):>5}  {noticed:>10}  "
        f"{statistics.median(pauses):>8.2f}/{max(pauses):.2f}"
    )


def total(outcomes: Iterable[Outcome]) -> str:
    """The last line."""
    outcomes = list(outcomes)
    streams = sum(len(outcome.verdicts) for outcome in outcomes)
    counts = {verdict: sum(outcome.count(verdict) for outcome in outcomes) for verdict in Verdict}
    return f"{len(outcomes)} scenarios, {streams} streams: " + ", ".join(
        f"{count} {verdict.value}" for verdict, count in counts.items()
    )

"""What people and programs read of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from headrace.lint.verdicts import Outcome, Verdict

MAX_WHY = 400


def table(outcomes: Sequence[Outcome], *, verbose: bool = True) -> str:
    """One line per check, grouped by area."""
    width = max((len(outcome.check.name) for outcome in outcomes), default=0)
    lines: list[str] = []
    area = ""
    for outcome in outcomes:
        if outcome.check.area != area:
            area = outcome.check.area
            lines.append(f"\n{area}")
        why = f"  {_bounded(outcome.why, 110)}" if outcome.why and verbose else ""
        lines.append(
            f"  {outcome.verdict.value:<11}  §{outcome.check.section:<3} {outcome.check.name:<{width}}{why}".rstrip()
        )
    return "\n".join(lines).lstrip("\n") + "\n"


def evidence(outcomes: Sequence[Outcome]) -> str:
    """For each wrong one what is right, what was seen, and the bytes that show it."""
    lines: list[str] = []
    for outcome in outcomes:
        if outcome.verdict is not Verdict.WRONG:
            continue
        check = outcome.check
        lines += ["", f"WRONG {check.title} (§{check.section})", f"  right: {check.right}"]
        lines.append(f"  seen:  {_bounded(outcome.why, MAX_WHY)}")
        for exchange in outcome.exchanges[:3]:
            lines += [f"  {line}" for line in exchange.shown().splitlines()]
    return "\n".join(lines).lstrip("\n") + ("\n" if lines else "")


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line."""
    counts = {verdict: sum(outcome.verdict is verdict for outcome in outcomes) for verdict in Verdict}
    return ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()) + f" of {len(outcomes)} checks"


def write_json(path: Path, url: str, model: str, outcomes: Sequence[Outcome]) -> None:
    """The whole run for programs."""
    content = {
        "url": url,
        "model": model,
        "checks": [
            {
                "area": outcome.check.area,
                "name": outcome.check.name,
                "section": outcome.check.section,
                "right": outcome.check.right,
                "verdict": outcome.verdict.value,
                "why": outcome.why,
                "bytes": [exchange.shown() for exchange in outcome.exchanges[:3]],
            }
            for outcome in outcomes
        ],
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _bounded(text: str, limit: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[: limit - 1]}…"

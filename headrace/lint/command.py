"""``headrace lint`` behind its flags."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.lint import report
from headrace.lint.areas import all_checks
from headrace.lint.runner import LintError, find_target, run_checks
from headrace.lint.session import Record, Target
from headrace.lint.verdicts import Check, Outcome, Verdict
from headrace.lint.wire import Address, AddressError

EXIT_WRONG = 1
DEFAULT_CONCURRENCY = 4
"""Checks that run at once; load is part of what is judged."""


class LintSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the person asked for."""

    url: str
    model: str = ""
    """Empty: the first the server lists."""
    api_key: str = ""
    only: tuple[str, ...] = ()
    """Areas, or parts of checks' names; empty is all."""
    json: str = ""
    concurrency: int = DEFAULT_CONCURRENCY
    timeout: float = 120.0
    complete: bool = False
    """What the server does not offer counts as wrong."""


def run(settings: LintSettings) -> int:
    """Judge and print; the exit status is 0 only when nothing is wrong. Raises LintError."""
    checks = choose(settings.only)
    try:
        address = Address.of(settings.url)
    except AddressError as error:
        raise LintError(str(error)) from None
    target = find_target(Target(address, settings.model, settings.api_key, settings.timeout))
    record, began = Record(), time.monotonic()
    progress = _progress(len(checks))
    outcomes = run_checks(target, checks, concurrency=settings.concurrency, progress=progress, record=record)
    effort = f"{record.requests} requests, {time.monotonic() - began:.0f} s"
    text = [report.table(outcomes), report.evidence(outcomes), f"{report.summary(outcomes)}; {effort}"]
    sys.stdout.write("\n".join(part for part in text if part) + "\n")
    if settings.json:
        report.write_json(Path(settings.json), settings.url, target.model, outcomes)
    bad = {Verdict.WRONG, Verdict.NOT_OFFERED} if settings.complete else {Verdict.WRONG}
    return EXIT_WRONG if any(outcome.verdict in bad for outcome in outcomes) else 0


def choose(only: tuple[str, ...]) -> list[Check]:
    """The checks of some areas, or those whose title starts so. Raises LintError when a word chooses nothing."""
    checks = all_checks()
    for word in only:
        if not any(_matches(check, word) for check in checks):
            areas = ", ".join(dict.fromkeys(check.area for check in checks))
            raise LintError(f"no check is called {word!r}; the areas are {areas}")
    return [check for check in checks if not only or any(_matches(check, word) for word in only)]


def _matches(check: Check, word: str) -> bool:
    return check.area in (word, word.replace("-", " ")) or ("/" in word and check.title.startswith(word))


def _progress(total: int) -> Callable[[Outcome], None]:
    """A line on a terminal that says how far it is."""
    done = 0

    def show(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        sys.stderr.write(f"\r\x1b[K{done}/{total} {outcome.check.title}" if done < total else "\r\x1b[K")
        sys.stderr.flush()

    return show if sys.stderr.isatty() else lambda outcome: None

"""Runs checks and gathers verdicts."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence

from headrace.lint.everywhere import judges, unique_ids
from headrace.lint.exchange import Exchange
from headrace.lint.facts import Facts
from headrace.lint.session import Record, Session, Target
from headrace.lint.verdicts import Check, NotOffered, Outcome, Verdict, Wrong
from headrace.lint.wire import WireFault


class LintError(RuntimeError):
    """The server cannot be judged at all; one line for people."""


def find_target(target: Target) -> Target:
    """The target with its model's name filled in from what the server lists. Raises LintError."""
    if target.model:
        return target
    try:
        exchange = Session(target, Record(), Facts()).get("/v1/models")
        entries = exchange.json.get("data")
    except Wrong as wrong:
        raise LintError(f"/v1/models: {wrong}; is that the server's address? --model names the model") from None
    if exchange.status == 401:
        raise LintError("the server wants a key; give --api-key")
    names = [entry.get("id") for entry in entries or [] if isinstance(entry, dict)]
    if not names or not isinstance(names[0], str):
        raise LintError(f"/v1/models answered {exchange.status} and lists no model; name one with --model")
    return Target(target.address, names[0], target.api_key, target.request_seconds)


def run_checks(
    target: Target,
    checks: Sequence[Check],
    *,
    concurrency: int,
    progress: Callable[[Outcome], None] = lambda _: None,
    record: Record | None = None,
) -> list[Outcome]:
    """Verdicts in the order of the checks, then those over all exchanges. Those that run alone come last in time."""
    record, facts = record or Record(), Facts()
    outcomes: dict[str, Outcome] = {}

    def run(check: Check) -> Outcome:
        return judge(check, Session(target, record, facts))

    together = [check for check in checks if not check.alone]
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        for outcome in pool.map(run, together):
            outcomes[outcome.check.title] = outcome
            progress(outcome)
    for check in checks:
        if check.alone:
            outcomes[check.title] = run(check)
            progress(outcomes[check.title])
    ordered = [outcomes[check.title] for check in checks]
    return ordered + list(_everywhere(record.exchanges))


def judge(check: Check, session: Session) -> Outcome:
    """The verdict of one check. A reply too odd to be read where its shape was taken for granted is wrong too."""
    try:
        check.judge(session)
    except NotOffered as reason:
        return Outcome(check, Verdict.NOT_OFFERED, str(reason))
    except Wrong as wrong:
        return Outcome(check, Verdict.WRONG, wrong.why, wrong.exchanges)
    except WireFault as fault:
        return Outcome(check, Verdict.WRONG, str(fault), _last(session))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return Outcome(check, Verdict.WRONG, f"the reply cannot be read: {error!r}", _last(session))
    return Outcome(check, Verdict.RIGHT)


def _last(session: Session) -> tuple[Exchange, ...]:
    return () if session.last is None else (session.last,)


def _everywhere(exchanges: Sequence[Exchange]) -> Iterator[Outcome]:
    for rule in judges():
        yield rule.outcome(exchanges)
    yield unique_ids(exchanges)

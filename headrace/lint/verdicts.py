"""Checks and what comes of them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from headrace.lint.exchange import Exchange
    from headrace.lint.session import Session

CaseT = TypeVar("CaseT")


class Verdict(enum.Enum):
    """Of one check."""

    RIGHT = "right"
    WRONG = "wrong"
    NOT_OFFERED = "not offered"


class Wrong(Exception):
    """The server is not as the contract has it; the exchanges are the evidence."""

    def __init__(self, why: str, *exchanges: Exchange) -> None:
        super().__init__(why)
        self.why = why
        self.exchanges = exchanges


class NotOffered(Exception):
    """The server does not have what is judged here, or nothing can be seen of it."""


@dataclass(frozen=True)
class Check:
    """One thing that has to be so."""

    area: str
    name: str
    section: str
    """Of the contract."""
    right: str
    """What is right, in one sentence."""
    judge: Callable[[Session], None]
    """Raises Wrong or NotOffered."""
    alone: bool = False
    """No other check runs meanwhile."""

    @property
    def title(self) -> str:
        return f"{self.area}/{self.name}"


@dataclass(frozen=True)
class Outcome:
    """A check and its verdict."""

    check: Check
    verdict: Verdict
    why: str = ""
    exchanges: tuple[Exchange, ...] = ()


def check(section: str, right: str, *, alone: bool = False) -> Callable[[Callable[[Session], None]], Check]:
    """Declare a check; its name is the function's, its area the module's."""

    def declare(judge: Callable[[Session], None]) -> Check:
        return Check(_area(judge.__module__), _name(judge.__name__), section, right, judge, alone)

    return declare


def check_each(
    section: str, right: str, cases: Mapping[str, CaseT]
) -> Callable[[Callable[[Session, CaseT], None]], tuple[Check, ...]]:
    """Declare one check per case; ``{case}`` in the sentence is the case's name."""

    def declare(judge: Callable[[Session, CaseT], None]) -> tuple[Check, ...]:
        def bound(case: CaseT) -> Callable[[Session], None]:
            return lambda session: judge(session, case)

        area, name = _area(judge.__module__), _name(judge.__name__)
        return tuple(
            Check(area, f"{name}: {case}", section, right.replace("{case}", case), bound(value))
            for case, value in cases.items()
        )

    return declare


def checks_of(module: ModuleType) -> list[Check]:
    """What a module declares, in its order."""
    found: list[Check] = []
    for value in vars(module).values():
        if isinstance(value, Check):
            found.append(value)
        elif isinstance(value, tuple):
            found += [entry for entry in value if isinstance(entry, Check)]
    return found


def raise_all(problems: list[Wrong]) -> None:
    """Raise one Wrong for several; nothing when there are none."""
    if not problems:
        return
    first, *others = problems
    more = f" (and {len(others)} more: {'; '.join(other.why for other in others[:3])})" if others else ""
    raise Wrong(
        first.why + more, *first.exchanges[:2], *(other.exchanges[0] for other in others[:1] if other.exchanges)
    )


def _area(module: str) -> str:
    return module.rpartition(".")[2].replace("_", " ")


def _name(function: str) -> str:
    return function.replace("_", " ").strip()

"""Flags of other servers: taken with a notice, turned into ours, or answered with one line that says what to use."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.command_line.usage_error import UsageError


@dataclass(frozen=True)
class ForeignFlag:
    """Another server's flag that we know of and do not have."""

    name: str
    answer: str
    """Completes "--name: …": our equivalent, that there is none, or why there is nothing to do."""
    words: Literal["none", "one", "many"] = "one"
    """What it takes: nothing (and then it has a ``--no-`` form), one word, or all words up to the next flag."""
    accepted: bool = False
    """Taken with a notice, because what it asks for is so anyway or changes no answer."""
    neutral: tuple[str, ...] = ()
    """Values that ask for what is so anyway."""
    becomes: Callable[[str], Sequence[str]] | None = None
    """Our words for it, from its value. Raises UsageError."""
    aliases: tuple[str, ...] = ()


class Foreign:
    """All of them by spelling, the ``--no-`` forms of switches included."""

    def __init__(self, flags: Sequence[ForeignFlag]) -> None:
        self._by_spelling: dict[str, ForeignFlag] = {}
        for flag in flags:
            for spelling in (f"--{flag.name}", *flag.aliases):
                self._by_spelling[spelling] = flag
        self._off = {f"--no-{flag.name}": flag for flag in flags if flag.words == "none"}
        self.flags = tuple(flags)

    def __contains__(self, spelling: object) -> bool:
        return spelling in self._by_spelling or spelling in self._off

    def take(self, spelling: str, value: str | None, rest: Sequence[str], notices: list[str]) -> tuple[list[str], int]:
        """Our words for one flag, and how many of the words after it were its own.

        ``value`` is what stood behind an equals sign. Raises UsageError for a flag that is not taken.
        """
        if spelling in self._off:
            return self._switched_off(spelling, notices), 0
        flag = self._by_spelling[spelling]
        values, taken = _values(flag, value, rest)
        if flag.becomes is not None:
            try:
                return list(flag.becomes(" ".join(values))), taken
            except UsageError as error:
                raise UsageError(f"{spelling}: {error}") from None
        if flag.accepted or (values and all(word in flag.neutral for word in values)):
            notices.append(f"{spelling}: {flag.answer}")
            return [], taken
        raise UsageError(f"{spelling}: {flag.answer}")

    def _switched_off(self, spelling: str, notices: list[str]) -> list[str]:
        flag = self._off[spelling]
        if flag.accepted:
            raise UsageError(f"{spelling}: it cannot be switched off: {flag.answer}")
        notices.append(f"{spelling}: nothing to switch off")
        return []


def _values(flag: ForeignFlag, value: str | None, rest: Sequence[str]) -> tuple[list[str], int]:
    if value is not None:
        return [value], 0
    if flag.words == "none":
        return [], 0
    following = 0
    while following < len(rest) and not _is_flag(rest[following]):
        following += 1
        if flag.words == "one":
            break
    return list(rest[:following]), following


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word.lstrip("-").replace(".", "", 1).isdigit()


def same_as(flag: str, **values: str) -> Callable[[str], Sequence[str]]:
    """Our flag for it, with values of another name translated; an empty value is a switch."""

    def translate(value: str) -> Sequence[str]:
        if not value:
            return [flag]
        return [flag, values.get(value, value)]

    return translate


def always(*words: str) -> Callable[[str], Sequence[str]]:
    """Our words for a switch."""
    return lambda value: words


def list_of(flag: str) -> Callable[[str], Sequence[str]]:
    """Our flag for one that takes a JSON list."""

    def translate(value: str) -> Sequence[str]:
        try:
            words = json.loads(value)
        except ValueError:
            words = None
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            raise UsageError(f"{value!r} is not a JSON list of strings; use {flag}")
        return [flag, *words]

    return translate


def by_name(foreign: Foreign) -> Mapping[str, ForeignFlag]:
    """The same by name, for configuration files."""
    return {flag.name: flag for flag in foreign.flags}

"""What commands share: errors in one line, settings from flags or from the supervisor, logging."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from headrace.command_line.flags import Flag, Parsed, UsageError, parse_flags
from headrace.model_files.artefact_error import ArtefactError

S = TypeVar("S", bound=msgspec.Struct)

SETTINGS_VARIABLE = "HEADRACE_SETTINGS"
LOG_LEVEL_VARIABLE = "HEADRACE_LOG_LEVEL"
EXIT_FAILED = 1
EXIT_USAGE = 2


def complain(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"headrace: {' '.join(text.split())}\n")


def parse(
    command: str,
    description: str,
    flags: Sequence[Flag],
    arguments: Sequence[str],
    *,
    model_argument: bool = True,
) -> dict[str, Any]:
    """Given flags by key; notices go to stderr. Raises UsageError."""
    from headrace.command_line.flag_table import FOREIGN

    parsed: Parsed = parse_flags(
        command,
        description,
        flags,
        arguments,
        environment=os.environ,
        foreign=FOREIGN,
        model_argument=model_argument,
    )
    for notice in parsed.notices:
        complain(notice)
    return parsed.values


def settings_from_supervisor(kind: type[S]) -> S | None:
    """The settings a supervisor handed over, or None when a person started this command."""
    text = os.environ.pop(SETTINGS_VARIABLE, None)
    return None if text is None else msgspec.json.decode(text, type=kind)


def to_settings(values: Mapping[str, Any], kind: type[S]) -> S:
    """A role's settings from flag values. Raises UsageError for what is missing or does not fit."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from None


def run_role(
    kind: type[S],
    run: Callable[[S], int],
    from_flags: Callable[[], Mapping[str, Any]],
) -> int:
    """Run a role with the supervisor's settings, or else with those from the command line."""
    try:
        settings = settings_from_supervisor(kind)
        if settings is None:
            settings = to_settings(from_flags(), kind)
    except UsageError as error:
        complain(str(error))
        return EXIT_USAGE
    except ArtefactError as error:
        complain(str(error))
        return EXIT_FAILED
    configure_logging()
    return run(settings)


def configure_logging(level: str = "") -> None:
    """Log lines on stderr, with the process's role seen from its logger's name."""
    level = level or os.environ.get(LOG_LEVEL_VARIABLE) or "info"
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname).1s %(process)d %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )

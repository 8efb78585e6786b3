"""``headrace scheduler``: the scheduler role alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.commands.common import parse, run_role
from scheduler.main import run
from scheduler.settings import SchedulerSettings

DESCRIPTION = "The scheduler of one cell: binds a socket for frontends and one for workers."


def main(arguments: list[str]) -> int:
    return run_role(SchedulerSettings, run, lambda: from_flags(arguments))


def from_flags(arguments: list[str]) -> Mapping[str, Any]:
    """Fields of SchedulerSettings."""
    from headrace.command_line.flag_table import SCHEDULER
    from headrace.command_line.roles import DEFAULT_FRONTEND_BIND, DEFAULT_WORKER_BIND, scheduler_values

    given = parse("scheduler", DESCRIPTION, SCHEDULER, arguments, model_argument=False)
    binds = {"frontend_bind": DEFAULT_FRONTEND_BIND, "worker_bind": DEFAULT_WORKER_BIND}
    return {**binds, **scheduler_values(given)}

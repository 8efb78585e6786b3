"""``headrace workers MODEL``: the launcher, which starts ranks and keeps them running."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.commands.common import parse, run_role
from workers.launchers.main import run
from workers.launchers.settings import LauncherSettings

DESCRIPTION = "Start the ranks of MODEL, through Ray or as local processes, and restart them when they die."


def main(arguments: list[str]) -> int:
    return run_role(LauncherSettings, run, lambda: from_flags(arguments))


def from_flags(arguments: list[str]) -> Mapping[str, Any]:
    """Fields of LauncherSettings."""
    from headrace.command_line.flag_table import WORKERS
    from headrace.command_line.roles import DEFAULT_WORKER_BIND, workers_values
    from headrace.command_line.serve_settings import (
        check_engine,
        check_installed,
        parse_groups,
        served_names,
        trim_cache,
        with_model,
    )

    given = with_model(parse("workers", DESCRIPTION, WORKERS, arguments))
    check_engine(given)
    check_installed(given)
    trim_cache(given)
    return {
        "scheduler": DEFAULT_WORKER_BIND,
        "kind": given.get("launcher", "ray"),
        **workers_values(given),
        "served_model_name": served_names(given)[0],
        "groups": parse_groups(given.get("groups", "1")),
    }

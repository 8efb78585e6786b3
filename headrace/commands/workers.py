"""``headrace workers MODEL``: the launcher, which starts ranks and keeps them running."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec
from workers.launchers.main import LauncherSettings, run

from headrace.commands.common import parse, run_role

DESCRIPTION = "Start the ranks of MODEL, through Ray or as local processes, and restart them when they die."


def main(arguments: list[str]) -> int:
    return run_role(LauncherSettings, run_when_ray_is_there, lambda: from_flags(arguments))


def run_when_ray_is_there(settings: LauncherSettings) -> int:
    """A supervisor that is still starting Ray hands over a pipe; Ray's client is imported while it waits."""
    if settings.ray_address.startswith("fd:"):
        import ray  # noqa: F401

        with open(int(settings.ray_address.removeprefix("fd:")), "rb") as pipe:  # noqa: PTH123
            address = pipe.read().decode()
        if not address:
            return 0  # the supervisor is gone, or gave up
        settings = msgspec.structs.replace(settings, ray_address=address)
    return run(settings)


def from_flags(arguments: list[str]) -> Mapping[str, Any]:
    """Fields of LauncherSettings."""
    from headrace.flag_table import WORKERS
    from headrace.roles import DEFAULT_WORKER_BIND, workers_values
    from headrace.serve_settings import parse_groups, served_names, with_model

    given = with_model(parse("workers", DESCRIPTION, WORKERS, arguments))
    values = {
        "scheduler": DEFAULT_WORKER_BIND,
        "kind": given.get("launcher", "ray"),
        **workers_values(given),
        "served_model_name": served_names(given)[0],
        "groups": parse_groups(given.get("groups", "1")),
    }
    return {"ray_address": os.environ.get("RAY_ADDRESS", ""), **values}

"""From given flags to the settings of one role, as plain values: the role's own struct checks and completes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.command_line import flag_table
from headrace.command_line.flags import Flag

DEFAULT_FRONTEND_BIND = "tcp://127.0.0.1:5570"
DEFAULT_WORKER_BIND = "tcp://127.0.0.1:5571"


def frontend_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of FrontendSettings."""
    values = _of(given, flag_table.FRONTEND)
    if names := values.pop("served_model_name", ()):
        values["served_model_names"] = names
    if keys := values.pop("api_key", ()):
        # What a process hands to its children can be read by other processes of the same user.
        values["api_key_digests"] = tuple(hashlib.sha256(key.encode()).hexdigest() for key in keys)
    return values


def scheduler_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SchedulerSettings."""
    return _of(given, flag_table.SCHEDULER)


def workers_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of LauncherSettings and of the WorkerOptions in it."""
    values = _of(given, flag_table.WORKERS)
    if "tensor_parallel_size" in values:
        values["tp"] = values.pop("tensor_parallel_size")
    if names := values.pop("served_model_name", ()):
        values["served_model_name"] = names[0]
    return values


def _of(given: Mapping[str, Any], flags: Sequence[Flag]) -> dict[str, Any]:
    keys = {flag.key for flag in flags} - {"config", "log_level"}
    values = {key: value for key, value in given.items() if key in keys}
    if folder := values.get("keys"):
        values["keys"] = str(Path(folder).absolute())  # a rank may start in another directory
    return values

"""``headrace frontend MODEL``: one HTTP process alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frontend.main import run
from frontend.settings import FrontendSettings
from headrace.commands.common import parse, run_role

DESCRIPTION = "One HTTP frontend of MODEL; it holds nothing that must outlive its connections."


def main(arguments: list[str]) -> int:
    return run_role(FrontendSettings, run, lambda: from_flags(arguments))


def from_flags(arguments: list[str]) -> Mapping[str, Any]:
    """Fields of FrontendSettings."""
    from headrace.command_line.flag_table import FRONTEND
    from headrace.command_line.roles import DEFAULT_FRONTEND_BIND, frontend_values
    from headrace.command_line.serve_settings import with_model

    given = parse("frontend", DESCRIPTION, FRONTEND, arguments)
    return {"scheduler": DEFAULT_FRONTEND_BIND, **frontend_values(with_model(given))}

"""docs/limits.md says what the code does: every default is read from where the page says it is."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.command_line import flag_table

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "limits.md").read_text()
PACKAGES = ("protocol", "scheduler", "frontend", "workers", "headrace")
LIMIT = re.compile(r"_?MAX_\w+|\w+_LIMIT|REMEMBERED_\w+|KEPT_\w+")
NOT_LIMITS = {"MAX_AGE_SECONDS", "DEFAULT_LIMIT", "BODY_LIMIT"}
"""How long a browser keeps a preflight; a name of its own on the page; what the lint takes for another's limit."""
UNITS = {"": 1, "s": 1, "%": 0.01, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| what")
]
NAMED = [row for row in ROWS if "." in row[2].partition(" ")[0]]


def value_of(dotted: str) -> Any:
    """The constant or the default of the field that a dotted name means."""
    parts = dotted.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = default_of(found, name) if inspect.isclass(found) else getattr(found, name)
        return found
    raise AssertionError(f"there is no {dotted}")


def default_of(kind: type, name: str) -> Any:
    if is_dataclass(kind):
        [field] = [field for field in fields(kind) if field.name == name]
        assert field.default is not MISSING
        return field.default
    [info] = [info for info in msgspec.structs.fields(kind) if info.name == name]
    return info.default


def limits_of(package: str) -> Iterator[tuple[str, str]]:
    """(module, name) of every constant that is called a limit."""
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else ()
            for target in targets:
                if isinstance(target, ast.Name) and LIMIT.fullmatch(target.id) and target.id not in NOT_LIMITS:
                    yield ".".join(path.relative_to(ROOT).with_suffix("").parts), target.id


@pytest.mark.parametrize("row", NAMED, ids=lambda row: row[2].partition("`")[2].partition("`")[0])
def test_a_default_is_what_the_page_says(row: list[str]) -> None:
    _, default, where, _ = row
    number, _, unit = default.replace(",", "").partition(" ")
    dotted, *flag = re.findall(r"`([^`]+)`", where)
    assert value_of(dotted) == pytest.approx(float(number) * UNITS[unit])
    for name in flag:
        assert name in {spelling for one in (*flag_table.SERVE, *flag_table.SCHEDULER) for spelling in one.spellings}


@pytest.mark.parametrize("package", PACKAGES)
def test_whatever_is_called_a_limit_is_on_the_page(package: str) -> None:
    missing = [f"{module}.{name}" for module, name in limits_of(package) if f"`{module}.{name}`" not in PAGE]
    assert missing == []


def test_the_page_is_not_empty() -> None:
    assert len(NAMED) > 60

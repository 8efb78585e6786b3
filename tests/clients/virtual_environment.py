"""Python clients that want an environment of their own: never the project's."""

from __future__ import annotations

import json
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from headrace.model_files.cache import cache_directory

INSTALL_SECONDS = 600.0
SCRIPT_SECONDS = 120.0
SCRIPTS = Path(__file__).parent / "scripts"


def report(script: str, requirements: tuple[str, ...], url: str) -> dict[str, Any]:
    """What a script reports that ran where these requirements are installed; skips when they are not to be had."""
    python = _python_with(requirements)
    # Isolated: neither this project nor the environment of these tests can be imported there.
    done = subprocess.run(
        [python, "-I", SCRIPTS / script, url], capture_output=True, timeout=SCRIPT_SECONDS, encoding="utf-8"
    )
    assert done.returncode == 0, f"{script} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _python_with(requirements: tuple[str, ...]) -> Path:
    """The interpreter of an environment in the cache. It is made in place, because an environment holds its own
    path; the mark comes last, so that one that was not finished is made again."""
    key = blake2b("\n".join([sys.version, *requirements]).encode(), digest_size=8).hexdigest()
    directory = cache_directory() / "test-data" / f"python-clients-{key}"
    python, mark = directory / "bin" / "python", directory / "complete"
    if not mark.exists():
        quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
        _run([sys.executable, "-m", "venv", "--clear", directory])
        _run([python, "-m", "pip", "install", *quiet, *requirements])
        mark.touch()
    return python


def _run(command: list[Any]) -> None:
    what = " ".join(map(str, command[1:]))
    try:
        done = subprocess.run(command, capture_output=True, timeout=INSTALL_SECONDS, encoding="utf-8")
    except subprocess.TimeoutExpired:
        pytest.skip(f"{what} was not done after {INSTALL_SECONDS:g} s")
    if done.returncode != 0:
        pytest.skip(f"{what} failed: {' '.join(done.stderr.split())[-400:]}")

"""Node and the npm clients, and running a script with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from headrace.model_files.cache import cache_directory, publish_directory

PACKAGES = ("@ai-sdk/openai-compatible@2.0.92", "ai@6.0.326", "openai@6.49.0", "zod@4.6.7")
"""The newest that Node 18 and 20 can run."""
OLDEST_NODE = 18
INSTALL_SECONDS = 150.0
SCRIPT_SECONDS = 100.0
SCRIPTS = Path(__file__).parent / "scripts"


class InstallError(Exception):
    """Packages cannot be had here; one line for people."""


def unavailable(reason: str) -> None:
    """Skip; in continuous integration fail, where a skipped test would hide what it should show."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


class Node:
    """Runs scripts of this folder in a directory from which the npm clients can be imported."""

    def __init__(self, directory: Path, modules: Path) -> None:
        self._directory = directory
        (directory / "node_modules").symlink_to(modules)

    @classmethod
    def or_skip(cls, directory: Path) -> Node:
        """Installs the clients into the cache when they are not there yet."""
        if shutil.which("npm") is None or shutil.which("node") is None:
            pytest.skip("node and npm are not installed, so JavaScript clients cannot be tried")
        found = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
        if int(found.lstrip("v").partition(".")[0]) < OLDEST_NODE:
            pytest.skip(f"the npm clients need Node {OLDEST_NODE} or newer; this is {found}")
        key = blake2b("\n".join(PACKAGES).encode(), digest_size=8).hexdigest()
        installed = cache_directory() / "test-data" / f"npm-clients-{key}"
        if not installed.is_dir():
            try:
                publish_directory(installed, _install)
            except InstallError as error:
                unavailable(str(error))
        return cls(directory, installed / "node_modules")

    def report(self, script: str, url: str) -> dict[str, Any]:
        """What a script reports of each scenario it went through with the server at ``url``."""
        copy = shutil.copy(SCRIPTS / script, self._directory)
        done = subprocess.run(
            ["node", copy, url], cwd=self._directory, capture_output=True, timeout=SCRIPT_SECONDS, encoding="utf-8"
        )
        assert done.returncode == 0, f"{script} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        report: dict[str, Any] = json.loads(done.stdout)
        return report


def _install(target: Path) -> None:
    (target / "package.json").write_text('{"private": true}\n')
    quiet = ("--no-save", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    try:
        done = subprocess.run(
            ["npm", "install", *quiet, *PACKAGES], cwd=target, capture_output=True, text=True, timeout=INSTALL_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"npm install was not done after {INSTALL_SECONDS:g} s") from None
    if done.returncode != 0:
        raise InstallError(f"npm install failed: {' '.join(done.stderr.split())[-400:]}")

"""Our own lint on our own server, with every process of the real architecture behind it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.answers import MODEL
from tests.end_to_end.serve_process import ServeProcess

pytestmark = pytest.mark.slow

SECONDS = 150.0


def test_the_lint_finds_nothing_wrong_with_our_own_server(server: ServeProcess, tmp_path: Path) -> None:
    verdicts = tmp_path / "verdicts.json"
    command = [sys.executable, "-m", "headrace", "lint", server.url, "--model", MODEL, "--json", str(verdicts)]
    done = subprocess.run(command, capture_output=True, timeout=SECONDS, encoding="utf-8")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    checks = json.loads(verdicts.read_text(encoding="utf-8"))["checks"]
    right = [check for check in checks if check["verdict"] == "right"]
    assert len(right) > len(checks) / 2, done.stdout[-6000:]

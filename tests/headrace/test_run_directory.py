"""A server's private directory is short, closed to others, and gone afterwards, also after a kill."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from headrace.supervision.run_directory import PATH_LIMIT, RunDirectory, remove_abandoned


def test_it_is_private_short_and_removed(tmp_path: Path) -> None:
    with RunDirectory() as run:
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
        assert len(os.fsencode(run.path)) <= PATH_LIMIT
        (run.path / "some" / "thing").mkdir(parents=True)
    assert not run.path.exists()


def test_it_is_removed_after_an_error() -> None:
    run = RunDirectory()
    try:
        with run:
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert not run.path.exists()


def test_a_living_servers_directory_is_left_alone(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as first, RunDirectory(tmp_path) as second:
        assert first.path.exists() and second.path.exists()
        assert remove_abandoned(tmp_path) == []


def test_a_killed_servers_directory_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal, pathlib\n"
        "from headrace.supervision.run_directory import RunDirectory\n"
        "with RunDirectory(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    [abandoned] = tmp_path.iterdir()
    with RunDirectory(tmp_path) as run:
        assert not abandoned.exists()
        assert run.path.exists()


def test_what_has_no_lock_file_is_not_ours_to_remove(tmp_path: Path) -> None:
    other = tmp_path / "hr-other"
    other.mkdir()
    assert remove_abandoned(tmp_path) == []
    assert other.exists()

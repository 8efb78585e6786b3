"""The cache keeps what was used last, within its limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.commands import serve
from headrace.model_files.cache import DEFAULT_LIMIT, keep_within

NOW = 1_800_000_000.0
HOUR = 3600.0
SIZE = 1 << 16


def put(cache: Path, name: str, hours_ago: float) -> Path:
    """An entry of 64 KiB, last used then; a name that ends in / is a folder with two files."""
    path = cache / name
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path / "a", path / "b"] if name.endswith("/") else [path]
    if name.endswith("/"):
        path.mkdir()
    for file in files:
        file.write_bytes(os.urandom(SIZE // len(files)))
    for one in (*files, path):
        os.utime(one, (NOW - hours_ago * HOUR,) * 2)
    return path


def test_what_was_used_least_recently_goes_first_until_the_rest_fits(tmp_path: Path) -> None:
    old, middle, new = put(tmp_path, "weights/a", 50), put(tmp_path, "artefacts/b/", 20), put(tmp_path, "weights/c", 5)
    assert keep_within(tmp_path, DEFAULT_LIMIT, now=lambda: NOW) == []
    assert keep_within(tmp_path, 3 * SIZE - 1, now=lambda: NOW) == [old]
    assert not old.exists() and middle.is_dir() and new.exists()
    assert keep_within(tmp_path, 2 * SIZE - 1, now=lambda: NOW) == [middle]
    assert not middle.exists() and new.exists()


def test_reading_counts_as_use(tmp_path: Path) -> None:
    read, written = put(tmp_path, "weights/read", 50), put(tmp_path, "weights/written", 20)
    os.utime(read, (NOW - 2 * HOUR, NOW - 50 * HOUR))
    assert keep_within(tmp_path, SIZE, now=lambda: NOW) == [written]


def test_what_may_be_in_use_right_now_stays_whatever_the_limit(tmp_path: Path) -> None:
    put(tmp_path, "weights/a", 0.5)
    (tmp_path / "a file of its own").write_bytes(b"x")
    assert keep_within(tmp_path, 1, now=lambda: NOW) == []
    assert keep_within(tmp_path / "not there", 1) == []


def test_a_start_trims_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    left = put(tmp_path, "weights/of-a-former-model", 50)
    os.utime(left, (0, 0))
    monkeypatch.setattr(serve, "serve", lambda settings, announcer: settings)
    monkeypatch.setattr(serve.asyncio, "run", lambda settings: None)
    words = ["--engine", "scripted", "--tokenizer", "byte", "--launcher", "local", "--cache-limit", "1KiB"]
    assert serve.main(words) == 0
    assert not left.exists()

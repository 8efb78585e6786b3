"""The cache directory: where it is, and how things get into it whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.model_files.artefact_error import ArtefactError

DEFAULT_LIMIT = 20 << 30
"""Bytes of the whole cache."""
SPARED_SECONDS = 3600.0
"""What was used so lately may be in use by a process that starts now."""


def cache_directory() -> Path:
    """`$HEADRACE_CACHE`, else `$XDG_CACHE_HOME/headrace`, else `~/.cache/headrace`; made with mode 0700."""
    if chosen := os.environ.get("HEADRACE_CACHE"):
        path = Path(chosen)
    elif base := os.environ.get("XDG_CACHE_HOME"):
        path = Path(base) / "headrace"
    else:
        path = Path.home() / ".cache" / "headrace"
    return private_directory(path)


def private_directory(path: Path) -> Path:
    """The directory, created for this user alone when it is not there yet."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def publish_directory(target: Path, fill: Callable[[Path], None]) -> Path:
    """Make `target` by filling a fresh directory beside it and renaming it into place.

    Of two processes that publish the same target at once one wins and the other's work is dropped, which is
    right because targets are named after what they were made from.
    """
    private_directory(target.parent)
    try:
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))  # mkdtemp gives mode 0700
    except OSError as error:
        raise _unwritable(target.parent, error) from error
    try:
        fill(made)
        made.rename(target)
    except OSError as error:
        if not target.is_dir():
            raise _unwritable(target, error) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def publish_file(target: Path, content: bytes) -> None:
    """Write a file that readers see whole or not at all."""
    private_directory(target.parent)
    try:
        handle, name = tempfile.mkstemp(prefix=".making-", dir=target.parent)  # mkstemp gives mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(target)
    except OSError as error:
        raise _unwritable(target, error) from error


@dataclass(frozen=True)
class _Entry:
    """Something in the cache that is of use as a whole: what lies in one of its folders."""

    path: Path
    size: int
    used: float
    """When it was last read or written, as far as the file system tells."""


def keep_within(cache: Path, limit: int, *, now: Callable[[], float] = time.time) -> list[Path]:
    """Remove what was used least recently until the cache has at most ``limit`` bytes; returns what was removed.

    Everything in it can be made again. Files that other processes have mapped stay theirs until they close them.
    """
    entries = sorted(_entries(cache), key=lambda entry: entry.used)
    excess = sum(entry.size for entry in entries) - limit
    removed: list[Path] = []
    for entry in entries:
        if excess <= 0 or entry.used > now() - SPARED_SECONDS:
            break
        if entry.path.is_dir():
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            entry.path.unlink(missing_ok=True)
        excess -= entry.size
        removed.append(entry.path)
    return removed


def _entries(cache: Path) -> list[_Entry]:
    found: list[_Entry] = []
    with contextlib.suppress(OSError):  # others may tidy up at the same time
        for folder in cache.iterdir():
            for path in folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ():
                files = [path, *path.rglob("*")] if path.is_dir() else [path]
                status = [file.lstat() for file in files]
                used = max(max(one.st_atime, one.st_mtime) for one in status)
                found.append(_Entry(path, sum(one.st_blocks * 512 for one in status), used))
    return found


def _unwritable(path: Path, error: OSError) -> ArtefactError:
    return ArtefactError(f"cannot write the cache at {path}: {error.strerror}; HEADRACE_CACHE names another place")

"""The cache directory: where it is, and how things get into it whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from headrace.model_files.artefact_error import ArtefactError


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


def _unwritable(path: Path, error: OSError) -> ArtefactError:
    return ArtefactError(f"cannot write the cache at {path}: {error.strerror}; HEADRACE_CACHE names another place")

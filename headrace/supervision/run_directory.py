"""The private directory of one running server: sockets, tokens and Ray's files; gone when the server is.

A lock file says whether its owner lives, so the next server can clear what a killed one left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

PREFIX = "hr-"
PATH_LIMIT = 60
"""Bytes; a socket's path has about 100, and Ray puts 70 of its own below the directory."""


class RunDirectory:
    """Context manager: makes the directory (mode 0700) and removes it with everything in it."""

    def __init__(self, base: Path | None = None) -> None:
        self._base = base or _base()
        self._lock = -1
        self.path = Path()

    def __enter__(self) -> RunDirectory:
        remove_abandoned(self._base)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._base))
        self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def socket(self, name: str) -> str:
        """Address of a ZMQ socket in the directory."""
        return f"ipc://{self.path / name}"


def remove_abandoned(base: Path) -> list[Path]:
    """Remove this user's run directories whose owners are gone; returns what was removed."""
    removed = []
    for path in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid() and not path.is_symlink() and not _held(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _held(path: Path) -> bool:
    """Whether a live owner holds the directory; one without a lock file is not ours to judge."""
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _base() -> Path:
    """The temporary directory, or /tmp where that is too deep for socket paths."""
    base = Path(tempfile.gettempdir())
    return base if len(os.fsencode(base)) + len(PREFIX) + 9 <= PATH_LIMIT - 20 else Path("/tmp")

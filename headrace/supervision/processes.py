"""What the kernel knows of our processes: descendants and orphans. Off Linux, direct children only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class ProcessEntry:
    """One live process; zombies are not listed."""

    pid: int
    parent: int


def become_subreaper() -> None:
    """Orphans among our descendants become our children instead of init's, so that we can find and end them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def list_processes() -> list[ProcessEntry]:
    """All live processes."""
    entries = []
    for directory in Path("/proc").iterdir() if sys.platform == "linux" else ():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                # pid (command, which may hold anything) state parent …
                fields = (directory / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    entries.append(ProcessEntry(int(directory.name), int(fields[1])))
    return entries


def descendants(root: int) -> set[int]:
    """Live processes below ``root``, which is not one of them."""
    children: dict[int, list[int]] = {}
    for entry in list_processes():
        children.setdefault(entry.parent, []).append(entry.pid)
    found: set[int] = set()
    waiting = [root]
    while waiting:
        below = [pid for pid in children.get(waiting.pop(), []) if pid not in found]
        found.update(below)
        waiting.extend(below)
    return found


def kill(pids: set[int], how: signal.Signals = signal.SIGKILL) -> None:
    """Signal each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)


def reap_orphans(ours: set[int]) -> list[int]:
    """Collect ended children that nobody waits for; ``ours`` are waited for elsewhere and left alone."""
    reaped = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in ours:
                break  # its waiter collects it soon, and the next call sees what is behind it
            os.waitpid(ended.si_pid, 0)
            reaped.append(ended.si_pid)
    return reaped


def end_descendants() -> None:
    """Kill everything below this process, which must be a subreaper, and wait until nothing is left.

    Orphans become our children, so "no children" means that nothing is left, whatever session or group a process
    had moved to.
    """
    while True:
        kill(descendants(os.getpid()))
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return

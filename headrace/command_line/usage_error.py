"""The one error of a command line, apart from everything that reads one."""

from __future__ import annotations


class UsageError(ValueError):
    """A command line that cannot be followed; the message is one line for the person who typed it."""

"""What ``serve`` tells the person who typed it: progress while it starts, the ready line, and why it failed."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable
from typing import TextIO


def version() -> str:
    """Of the installed distribution."""
    import importlib.metadata  # slow to import, and needed once the server is ready

    return importlib.metadata.version("headrace")


class Announcer:
    """Progress goes to ``err``: one line that is rewritten on a terminal, one line a change elsewhere.

    Whoever read it may be gone, a closed terminal or pipe; what is said then is lost, and the server lives on.
    """

    def __init__(
        self,
        out: TextIO = sys.stdout,
        err: TextIO = sys.stderr,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._err = err
        self._clock = clock
        self._began = clock()
        self._stage = ""
        self._drawn = False

    def progress(self, text: str) -> None:
        """What the server waits for now."""
        if self._err.isatty():
            self._write(self._err, f"\r\x1b[K{self._seconds():4.1f} s  {text} …")
            self._drawn = True
        elif (stage := text.rstrip("0123456789% ")) != self._stage:
            # Without a terminal a percentage is noise: one line a stage.
            self._stage = stage
            self._write(self._err, f"{stage} …\n")

    def ready(self, name: str, url: str, detail: str, *, asks_for_keys: bool = False) -> None:
        """The line that scripts wait for, and a call to paste."""
        self.erase()
        body = json.dumps({"model": name, "messages": [{"role": "user", "content": "What is the capital of France?"}]})
        key = "    -H 'authorization: Bearer KEY' \\\n" if asks_for_keys else ""
        self._write(
            self._out,
            f"headrace {version()} serves {name} at {url}/v1  ({detail}, {self._seconds():.1f} s)\n\n"
            f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n{key}"
            f"    -d {shlex.quote(body)}\n\n",
        )

    def say(self, text: str) -> None:
        """A line about the life of the server, on stderr."""
        self.erase()
        self._write(self._err, f"headrace: {text}\n")

    def erase(self) -> None:
        """Take the progress line back."""
        if self._drawn:
            self._write(self._err, "\r\x1b[K")
            self._drawn = False

    def _write(self, stream: TextIO, text: str) -> None:
        with contextlib.suppress(OSError):
            stream.write(text)
            stream.flush()

    def _seconds(self) -> float:
        return self._clock() - self._began

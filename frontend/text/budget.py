"""What one template render may cost: time, bytes made, bytes put out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

SECONDS = 2.0
OUTPUT_BYTES = 4 << 20
WORKING_BYTES = 256 << 20


class RenderLimitExceeded(Exception):
    """A render went past one of its limits."""


@dataclass(frozen=True)
class RenderLimits:
    """Bounds of one render."""

    seconds: float = SECONDS
    output_bytes: int = OUTPUT_BYTES
    """Bytes of UTF-8 in the result."""
    working_bytes: int = WORKING_BYTES
    """Characters and list cells made on the way, kept or not; it bounds both memory and the cost of one operation."""


class Budget:
    """The running account of one render. Every loop step, call and operation that makes a value charges it."""

    def __init__(self, limits: RenderLimits, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._monotonic = monotonic
        self._deadline = monotonic() + limits.seconds
        self._left = limits.working_bytes
        self._output_left = limits.output_bytes

    def tick(self) -> None:
        """One step of control flow."""
        if self._monotonic() > self._deadline:
            raise RenderLimitExceeded(f"rendering took more than {self._limits.seconds:g} s")

    def charge(self, size: int) -> None:
        """About to make, or just made, a value of `size` characters or list cells."""
        self._left -= size
        if self._left < 0:
            raise RenderLimitExceeded(f"rendering made more than {self._limits.working_bytes >> 20} MiB of text")
        self.tick()

    def output(self, text: str) -> None:
        """Text that goes into the result."""
        self._output_left -= len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if self._output_left < 0:
            raise RenderLimitExceeded(f"the rendered text is longer than {self._limits.output_bytes >> 20} MiB")
        self.tick()

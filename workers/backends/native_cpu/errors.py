"""What can go wrong with the native library."""

from __future__ import annotations


class NativeCpuUnavailable(RuntimeError):
    """The library cannot be had on this machine: no compiler, a failed build, or a CPU without the instructions.

    The message is one line for the log; another backend can serve the same model.
    """


class NativeCpuError(RuntimeError):
    """The library refused a call: its arguments contradict the model. The message names the value and the bound."""

"""How many prefill tokens a step may carry beside decodes, so that a long prompt does not hold up those who stream.

A step with decodes is stretched by its prefill. What decodes alone take, and what a prefill token adds, is measured on
the steps themselves; the prefill of a step is bounded so that it stretches to ``most_stretch`` times at most. The same
bound serves a CPU, where a token costs what a decode costs, and a GPU, where a thousand do.

Knows nothing of slots or of who prefills.
"""

from __future__ import annotations

WEIGHT = 0.2
"""Of the newest step in an average."""
SMALLEST_SHARE = 1 / 16
"""Of a step's tokens: prefill gets as much whatever it costs, or it would never end."""
UNKNOWN_SHARE = 1 / 4
"""Of a step's tokens, until steps were measured."""
FEW_TOKENS = 16
"""A step with less prefill says little about what a token costs."""


class PrefillPace:
    """Measured step times of one group, in microseconds."""

    def __init__(self, most_stretch: float, max_tokens_per_step: int) -> None:
        self._most_stretch = most_stretch
        self._max_tokens = max_tokens_per_step
        self._decodes_us = 0.0
        self._token_us = 0.0

    def bound(self, decodes: int) -> int:
        """Prefill tokens that the next step may carry beside this many decodes."""
        if not decodes or not self._most_stretch:
            return self._max_tokens
        if not (self._decodes_us and self._token_us):
            return max(1, int(self._max_tokens * UNKNOWN_SHARE))
        affordable = (self._most_stretch - 1.0) * self._decodes_us / self._token_us
        return max(1, int(self._max_tokens * SMALLEST_SHARE), min(int(affordable), self._max_tokens))

    def step_took(self, step_us: int, decodes: int, prefill_tokens: int) -> None:
        """A step is done."""
        if not prefill_tokens:
            self._decodes_us = _average(self._decodes_us, step_us)
        elif prefill_tokens >= FEW_TOKENS and (self._decodes_us or not decodes):
            alone = step_us - (self._decodes_us if decodes else 0.0)
            if alone > 0.0:
                self._token_us = _average(self._token_us, alone / prefill_tokens)


def _average(known: float, newest: float) -> float:
    return known + WEIGHT * (newest - known) if known else float(newest)

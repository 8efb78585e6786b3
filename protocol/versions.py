"""Protocol versions: a greeting carries a range, Welcome picks one; N and N-1 live together."""

from __future__ import annotations

OLDEST = 1
NEWEST = 1


def negotiate(oldest: int, newest: int, *, our_oldest: int = OLDEST, our_newest: int = NEWEST) -> int | None:
    """The newest version both sides speak, or None when the ranges are disjoint."""
    best = min(newest, our_newest)
    return best if best >= max(oldest, our_oldest) else None


def refusal(oldest: int, newest: int) -> str:
    """Why a peer with this range was refused; goes into Unwelcome and the log."""
    return f"protocol versions {oldest}..{newest} are not spoken here; this side speaks {OLDEST}..{NEWEST}"

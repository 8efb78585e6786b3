"""A rank inside a Ray actor."""

from __future__ import annotations

import logging

import msgspec

from workers.options import WorkerOptions


class RankActor:
    """One rank. Calls are served one at a time, so ``ended`` is answered when ``run`` is over: a sentinel for a
    launcher that was not there when ``run`` was called."""

    def __init__(self) -> None:
        self._status: int | None = None

    def run(self, options: bytes, ranks_on_host: int) -> int:
        """Run the rank of these options (JSON) to its end; returns its exit status."""
        from workers.rank import run

        # Ray keeps what is written to stderr in its session's log directory.
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        decoded = msgspec.json.decode(options, type=WorkerOptions)
        self._status = run(decoded, ranks_on_host=ranks_on_host, handle_signals=False)
        return self._status

    def ended(self) -> int | None:
        """The status ``run`` ended with."""
        return self._status

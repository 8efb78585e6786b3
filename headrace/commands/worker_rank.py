"""``headrace worker-rank``: one rank of a group, started by a launcher with its options in the environment."""

from __future__ import annotations

import os

import msgspec

from headrace.commands.common import EXIT_USAGE, complain, configure_logging
from workers.options import WorkerOptions
from workers.rank import OPTIONS_VARIABLE, run


def main(arguments: list[str]) -> int:
    text = os.environ.pop(OPTIONS_VARIABLE, None)
    if text is None or arguments:
        complain("worker-rank is started by a launcher; use headrace workers")
        return EXIT_USAGE
    configure_logging()
    return run(msgspec.json.decode(text, type=WorkerOptions))

"""``headrace ray-head``: the guard of a private Ray head, started by ``serve``."""

from __future__ import annotations

from headrace.commands.common import EXIT_USAGE, complain, configure_logging, settings_from_supervisor
from headrace.supervision.ray_head import RayHeadSettings, run


def main(arguments: list[str]) -> int:
    settings = settings_from_supervisor(RayHeadSettings)
    if settings is None or arguments:
        complain("ray-head is started by headrace serve; to use a running Ray cluster give --ray-address")
        return EXIT_USAGE
    configure_logging()
    return run(settings)

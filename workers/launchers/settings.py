"""What a launcher process is told."""

from __future__ import annotations

from typing import Literal

import msgspec

from workers.options import WorkerOptions


class LauncherSettings(WorkerOptions, frozen=True, kw_only=True):
    """A launcher's own settings, and every field of WorkerOptions as the template of its ranks.

    ``lease`` is held by the launcher and by each rank on its own.
    """

    kind: Literal["ray", "local"] = "ray"
    name: str = ""
    """Distinguishes launchers of one scheduler: their groups are called ``<name>-g0`` …, or ``g0`` … without one."""
    groups: int = 1
    ray_address: str = ""
    """Empty: RAY_ADDRESS; ``fd:N``: read from that descriptor until its end, so that a head may still be starting."""
    ray_namespace: str = "headrace-default"
    """``headrace-<cell>``"""
    group: str = ""
    """Set per rank, like incarnation."""
    incarnation: int = 0

    @property
    def group_prefix(self) -> str:
        """What the names of this launcher's groups begin with; a number follows."""
        return f"{self.name}-g" if self.name else "g"

    def rank_options(self, group: str, incarnation: int) -> tuple[WorkerOptions, ...]:
        """The options of every rank of one launch."""
        template = {field: getattr(self, field) for field in WorkerOptions.__struct_fields__}
        return tuple(
            msgspec.convert({**template, "group": group, "incarnation": incarnation, "rank": rank}, WorkerOptions)
            for rank in range(self.tp)
        )

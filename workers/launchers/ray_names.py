"""What actors and placement groups are called in a Ray namespace, so that any launcher finds them again."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote

from protocol.ids import GroupId, Incarnation


@dataclass(frozen=True)
class RankName:
    """``<model>/<group>/<incarnation>/<rank>``; a slash inside a model's or group's name travels as ``%2F``."""

    model: str
    group: GroupId
    incarnation: Incarnation
    rank: int

    def __str__(self) -> str:
        return f"{launch_name(self.model, self.group, self.incarnation)}/{self.rank}"


def launch_name(model: str, group: str, incarnation: int) -> str:
    """What the placement group of a launch is called: its ranks' names without the rank."""
    return f"{quote(model, safe='')}/{quote(group, safe='')}/{incarnation}"


def parse_rank_name(name: str) -> RankName | None:
    """The parts of an actor's name, or None for a name that is not a rank's."""
    parts = name.split("/")
    if len(parts) != 4 or not (parts[2].isdecimal() and parts[3].isdecimal()):
        return None
    return RankName(unquote(parts[0]), GroupId(unquote(parts[1])), Incarnation(int(parts[2])), int(parts[3]))

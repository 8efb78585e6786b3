"""How much of the memory may be request bodies, counted from their first byte until their prompts are made.

Parsed, a body may be twenty times its size, so that many large ones at once would be more than a machine has.
"""

from __future__ import annotations

from types import TracebackType

from frontend import errors


class BodyRoom:
    """Bytes for all bodies together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.used = 0

    def hold(self) -> HeldBody:
        """Room for one body, used as it arrives: ``with room.hold() as held``."""
        return HeldBody(self)

    def take(self, size: int) -> None:
        """Raise ApiError 429 when there is no room for so many bytes more."""
        if size and self.used + size > self._most:
            raise errors.overloaded("Too many large requests are being read here; try again later.")
        self.used += size

    def give_back(self, size: int) -> None:
        self.used -= size


class HeldBody:
    """The room of one body. A context manager that gives it back, if ``release`` did not before."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._size = 0

    def add(self, size: int) -> None:
        """So many bytes more are there. Raises ApiError 429."""
        self._room.take(size)
        self._size += size

    def release(self) -> None:
        """Neither the body nor what was parsed from it is needed any more."""
        self._room.give_back(self._size)
        self._size = 0

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

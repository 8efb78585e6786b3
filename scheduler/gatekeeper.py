"""Who may come in: answers, for one ZMQ context, whether a key that proved itself is on the list of its door.

Each door of the scheduler is a ZAP domain named after the role it is for, so a frontend's key opens no worker's door.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from protocol.keys import KeysError, PeerRole, allowed_keys

logger = logging.getLogger(__name__)

FRESH = 1.0
"""Seconds that a read of the folder is good for: handshakes by the thousand cost no more than one read a second."""


BETWEEN_WARNINGS = 10.0
"""Seconds; every failed handshake is counted, not every one is worth a line."""


class KeyList:
    """The keys of one role, read again as the folder changes: rotation needs no restart of the scheduler."""

    def __init__(self, directory: Path, role: PeerRole, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises KeysError."""
        self._directory, self._role, self._clock = directory, role, clock
        self._keys = allowed_keys(directory, role)
        self._read_at, self._warned_at = clock(), float("-inf")

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether ``key`` may come in; what the authenticator asks, on its own thread."""
        if self._clock() - self._read_at >= FRESH:
            self._read_at = self._clock()
            try:
                self._keys = allowed_keys(self._directory, self._role)
            except KeysError as error:
                logger.error("the keys of role %s stay as they were: %s", self._role.value, error)
        if key in self._keys:
            return True
        if self._clock() - self._warned_at >= BETWEEN_WARNINGS:
            self._warned_at = self._clock()
            logger.warning("a key that is not of role %s was turned away: %s", self._role.value, key.decode("ascii"))
        return False


class Gatekeeper:
    """The ZAP handler of a context; start it before anything binds, stop it after everything closed."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: str) -> None:
        """``keys`` is a folder. Raises KeysError."""
        self._authenticator = ThreadAuthenticator(context, log=logging.getLogger(f"{__name__}.zap"))
        for role in PeerRole:
            self._authenticator.configure_curve_callback(role.value, KeyList(Path(keys), role))
        self._authenticator.start()

    def stop(self) -> None:
        """Nobody new comes in any more."""
        self._authenticator.stop()

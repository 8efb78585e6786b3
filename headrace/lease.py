"""The lease: one unix-socket connection per child process, by which parent and child notice each other's end.

The supervisor listens in its run directory (``LeaseServer``); every process that must not outlive it connects
(``LeaseClient``). Lines of JSON go from child to supervisor only: a hello, states, and a beat each second that carries
the child's main-loop counter. End of file is the whole protocol of death, in both directions: the kernel sends it
however a process ends.

Knows nothing of what a role does, nor of what to do about a child that is gone or stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

LINE_LIMIT = 16 * 1024
"""Bytes of a line; longer ones are junk."""
MESSAGE_LIMIT = 4096
"""Characters of a string in a report; the rest is cut."""
OUTBOX_LIMIT = 64 * 1024
"""Bytes a client keeps for a supervisor that does not read; later reports are dropped."""
CONNECT_SECONDS = 5.0
CLOSE_SECONDS = 1.0
"""How long ``LeaseClient.close`` waits for its last report to leave."""

WATCHED_STATES = frozenset({"ready", "bound", "draining"})
"""States in which a main loop turns. While starting or loading, a process may be busy for long."""

UNWATCHED_ROLES = frozenset({"rank"})
"""A rank's loop stands still while a step runs, which may be long; the scheduler knows each step's deadline."""


class LeaseClient:
    """A child's end. Does nothing when ``path`` is empty.

    ``on_lost`` is called once, on the client's own thread, when the supervisor is gone or was never there; it is not
    called after ``close``. ``progress`` is the main loop's counter, read once a beat.
    """

    def __init__(
        self,
        path: str,
        *,
        role: str,
        name: str,
        on_lost: Callable[[], None],
        progress: Callable[[], int],
        beat_seconds: float = 1.0,
    ) -> None:
        self._path = path
        self._on_lost = on_lost
        self._progress = progress
        self._beat_seconds = beat_seconds
        self._closing = False
        self._lock = threading.Lock()
        self._outbox = bytearray(_line({"role": role, "name": name, "pid": os.getpid()}))
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="headrace-lease", daemon=True)
        if path:
            self._thread.start()

    def report(self, state: str, **details: Any) -> None:
        """Tell the supervisor a state, with ``stage``, ``fraction``, ``message`` or whatever else the role tells.

        Any thread; never blocks. Reports are dropped while a supervisor does not read.
        """
        if not self._path:
            return
        line = _line({"state": state, **{key: _bounded(value) for key, value in details.items()}})
        with self._lock:
            if len(self._outbox) + len(line) <= OUTBOX_LIMIT:
                self._outbox += line
        self._wake()

    def close(self) -> None:
        """Let the last report leave, bounded in time, and end the connection."""
        self._closing = True
        self._wake()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _wake(self) -> None:
        # A full pipe means that a wake-up is already waiting.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_writer.send(b"\0")

    def _run(self) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as supervisor:
                supervisor.settimeout(CONNECT_SECONDS)
                supervisor.connect(self._path)
                supervisor.setblocking(False)
                self._keep(supervisor)
        except OSError:
            pass  # whatever went wrong, the connection is gone: that is what on_lost says
        if not self._closing:
            self._on_lost()

    def _keep(self, supervisor: socket.socket) -> None:
        """Write lines until closed; returns or raises OSError when the supervisor is gone."""
        next_beat = time.monotonic() + self._beat_seconds
        while not (self._closing and not self._outbox):
            self._write(supervisor)
            if self._closing and not self._outbox:
                return
            if not self._wait(supervisor, max(0.0, next_beat - time.monotonic())):
                return
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._beat_seconds
                self._beat()

    def _write(self, supervisor: socket.socket) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            while self._outbox:
                del self._outbox[: supervisor.send(self._outbox)]

    def _wait(self, supervisor: socket.socket, seconds: float) -> bool:
        """Sleep until something happens; False at end of file."""
        writing = [supervisor] if self._outbox else []
        readable, _, _ = select.select([supervisor, self._wake_reader], writing, [], seconds)
        if self._wake_reader in readable:
            self._wake_reader.recv(4096)
        # The supervisor never speaks: readable means the end, and stray bytes are read away.
        return supervisor not in readable or bool(supervisor.recv(4096))

    def _beat(self) -> None:
        with self._lock:
            if not self._outbox:
                self._outbox += _line({"beat": self._progress()})


class LeaseEventKind(Enum):
    """What a child's connection told."""

    HELLO = "hello"
    STATE = "state"
    """``details["state"]`` and whatever else the child reported."""
    BEAT = "beat"
    """``details["beat"]`` is the main loop's counter."""
    GONE = "gone"


@dataclass(frozen=True)
class LeaseEvent:
    """One line of a child, or its end."""

    role: str
    name: str
    pid: int
    kind: LeaseEventKind
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LeaseStatistics:
    """Counters since start, and what is connected now."""

    children: int
    lines: int
    junk: int
    """Lines that said nothing understood; they have no other effect."""


class LeaseServer:
    """The supervisor's end: ``on_event`` is called in the event loop, in order per child."""

    def __init__(self, on_event: Callable[[LeaseEvent], None]) -> None:
        self._on_event = on_event
        self._server: asyncio.Server | None = None
        self._path = Path()
        self._writers: set[asyncio.StreamWriter] = set()
        self._children = self._lines = self._junk = 0

    async def start(self, path: str | Path) -> None:
        """Listen on ``path``, which must not exist; its directory should be private (mode 0700)."""
        self._path = Path(path)
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=LINE_LIMIT)
        self._path.chmod(0o600)

    async def close(self) -> None:
        """End every lease: each connected child sees end of file."""
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._writers):
            writer.close()
        while self._writers:
            await asyncio.sleep(0)
        self._path.unlink(missing_ok=True)
        self._server = None

    def statistics(self) -> LeaseStatistics:
        """A frozen view of the counters."""
        return LeaseStatistics(children=self._children, lines=self._lines, junk=self._junk)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        child: LeaseEvent | None = None
        try:
            async for line in _lines(reader):
                event = _parse(line, child, writer)
                if event is None:
                    self._junk += 1
                    continue
                self._lines += 1
                if event.kind is LeaseEventKind.HELLO:
                    child = event
                    self._children += 1
                self._on_event(event)
        finally:
            self._writers.discard(writer)
            writer.close()
            if child is not None:
                self._children -= 1
                self._on_event(LeaseEvent(child.role, child.name, child.pid, LeaseEventKind.GONE))


class StallWatch:
    """Which children's main loops have stopped turning. Pure: the time is passed in."""

    def __init__(self, limit_seconds: float = 10.0, exempt_roles: frozenset[str] = UNWATCHED_ROLES) -> None:
        self._limit = limit_seconds
        self._exempt_roles = exempt_roles
        self._states: dict[int, str] = {}
        self._turned: dict[int, tuple[int, float]] = {}

    def observe(self, event: LeaseEvent, now: float) -> None:
        """Take every event of a ``LeaseServer``."""
        if event.role in self._exempt_roles:
            return
        if event.kind is LeaseEventKind.GONE:
            self._states.pop(event.pid, None)
            self._turned.pop(event.pid, None)
        elif event.kind is LeaseEventKind.STATE:
            self._states[event.pid] = str(event.details["state"])
            self._turned.pop(event.pid, None)
        elif event.kind is LeaseEventKind.BEAT and self._states.get(event.pid) in WATCHED_STATES:
            counter = int(event.details["beat"])
            if event.pid not in self._turned or self._turned[event.pid][0] != counter:
                self._turned[event.pid] = (counter, now)

    def paused(self, now: float) -> None:
        """This process itself stood still: nobody's silence means anything yet."""
        self._turned = {pid: (counter, now) for pid, (counter, _) in self._turned.items()}

    def stalled(self, now: float) -> list[int]:
        """Processes whose counter has not moved for the limit while they should be turning."""
        return [pid for pid, (_, since) in self._turned.items() if now - since > self._limit]


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        try:
            line = await reader.readline()
        except ValueError:  # longer than the limit: asyncio has dropped what it had of it
            line = b"\n"
        except ConnectionError:
            return
        if not line:
            return
        yield line


def _parse(line: bytes, child: LeaseEvent | None, writer: asyncio.StreamWriter) -> LeaseEvent | None:
    """The event of a line, or None for junk. A hello comes first and once."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    if child is None:
        role, name, pid = fields.get("role"), fields.get("name"), fields.get("pid")
        if isinstance(role, str) and isinstance(name, str) and isinstance(pid, int) and pid > 0:
            return LeaseEvent(role, name, _peer_pid(writer, pid), LeaseEventKind.HELLO)
    elif isinstance(fields.get("state"), str):
        return LeaseEvent(child.role, child.name, child.pid, LeaseEventKind.STATE, fields)
    elif isinstance(fields.get("beat"), int):
        return LeaseEvent(child.role, child.name, child.pid, LeaseEventKind.BEAT, fields)
    return None


def _peer_pid(writer: asyncio.StreamWriter, claimed: int) -> int:
    """The pid the kernel knows: a supervisor signals it. Where the kernel does not tell, what the child said."""
    if not hasattr(socket, "SO_PEERCRED"):
        return claimed
    connection: socket.socket = writer.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0]) or claimed


def _line(fields: dict[str, Any]) -> bytes:
    return msgspec.json.encode(fields) + b"\n"


def _bounded(value: Any) -> Any:
    return value[:MESSAGE_LIMIT] if isinstance(value, str) else value

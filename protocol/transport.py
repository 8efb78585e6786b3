"""Sockets between processes: one class for both ends, which never blocks and never grows without bound.

Knows socket options, addresses and backlogs; knows nothing of messages.
"""

from __future__ import annotations

import ipaddress
import stat
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.keys import ConnectorSecurity, CurveConnector, CurveListener, ListenerSecurity, NullSecurity

MEBIBYTE = 1 << 20
IPC_PATH_LIMIT = 100
"""Bytes of an ipc path; the kernel's own limit is 107 and ZMQ needs none of the rest."""


NOW, NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""As plain numbers: pyzmq's flags are enums, which take longer to combine than a small frame takes to send."""


class AddressError(ValueError):
    """An address that cannot be used, or must not be used as asked."""


@dataclass(frozen=True)
class TransportOptions:
    """Bounds and times of a socket. Seconds and bytes."""

    high_water_mark: int = 1000
    max_message_bytes: int = 16 * MEBIBYTE
    backlog_bytes: int = 64 * MEBIBYTE
    """Most bytes kept for one peer that does not take them."""
    backlog_seconds: float = 10.0
    heartbeat_interval: float = 2.0
    heartbeat_timeout: float = 10.0
    reconnect_min: float = 0.05
    reconnect_max: float = 1.0
    linger: float = 1.0


class Sent(Enum):
    """What became of a frame."""

    SENT = "sent"
    BACKLOGGED = "backlogged"
    GONE = "gone"
    """The peer is not there, or took nothing for too long; its backlog is dropped."""


@dataclass(frozen=True)
class TransportStatistics:
    """Counters since start, and what waits now."""

    frames_sent: int
    frames_received: int
    malformed_received: int
    connections: int
    """Accepted by a listener so far."""
    connections_let_in: int
    """Of these, those that got through the handshake; the others spoke no ZMTP, or had no key of the role. (ZMQ tells
    of so many at once; of thousands within a quarter of a second some may be missing in both.)"""
    peers_backlogged: int
    bytes_backlogged: int


@dataclass
class _Backlog:
    since: float
    frames: deque[bytes] = field(default_factory=deque)
    size: int = 0


def check_address(address: str, security: ListenerSecurity | ConnectorSecurity) -> None:
    """Raise AddressError unless the address may be used with this security; says what to do instead."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        if not rest or len(rest.encode()) > IPC_PATH_LIMIT:
            raise AddressError(f"an ipc path must have 1 to {IPC_PATH_LIMIT} bytes: {address!r}")
        return
    if scheme != "tcp":
        raise AddressError(f"{address!r} is neither ipc://PATH nor tcp://HOST:PORT")
    host = rest.rpartition(":")[0].strip("[]")
    if not host:
        raise AddressError(f"{address!r} has no HOST:PORT")
    if isinstance(security, NullSecurity) and not (_is_loopback(host) or security.insecure_sockets):
        raise AddressError(
            f"{address} is not a loopback address and this socket is not encrypted; "
            "give --keys (`headrace keys DIR` makes them), or --insecure-sockets on a network you trust"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_ipc_directory(address: str) -> None:
    directory = Path(address.removeprefix("ipc://")).parent
    if not directory.is_dir():
        raise AddressError(f"the directory of {address} does not exist")
    if stat.S_IMODE(directory.stat().st_mode) & 0o077:
        raise AddressError(f"{directory} is open to other users; an ipc socket needs a directory of mode 0700")


class Transport:
    """One ZMQ socket: a ROUTER that was bound (``listen``) or a DEALER that was connected (``connect``).

    No identity is ever set: the ROUTER names each connection, so ``peer`` is a connection, not a process.
    Use it from one thread.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        address: str,
        options: TransportOptions,
        clock: Callable[[], float],
    ) -> None:
        self.socket = socket
        self.address = address
        """The address as bound: a ``*`` or 0 port is replaced by the real one."""
        self._routes = socket.type == zmq.ROUTER
        self._options = options
        self._clock = clock
        self._backlogs: dict[bytes, _Backlog] = {}
        self._sent = self._received = self._malformed = self._connections = self._let_in = 0
        self._monitor = (
            socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED) if self._routes else None
        )

    @classmethod
    def listen(
        cls,
        address: str,
        *,
        security: ListenerSecurity,
        context: zmq.Context[zmq.Socket[bytes]],
        options: TransportOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Transport:
        """Bind a ROUTER. Raises AddressError when the address is refused or taken.

        With keys the context must have its ZAP handler already: without one every key would be let in.
        """
        check_address(address, security)
        if address.startswith("ipc://"):
            _check_ipc_directory(address)
        options = options or TransportOptions()
        socket = context.socket(zmq.ROUTER)
        _set_options(socket, options)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if isinstance(security, CurveListener) and address.startswith("tcp://"):
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, security.secret)
            socket.setsockopt_string(zmq.ZAP_DOMAIN, security.role.value)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise AddressError(f"cannot bind {address}: {error}") from error
        return cls(socket, socket.getsockopt_string(zmq.LAST_ENDPOINT), options, clock)

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        security: ConnectorSecurity,
        context: zmq.Context[zmq.Socket[bytes]],
        options: TransportOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Transport:
        """Connect a DEALER, which keeps trying; a peer that is not there yet is no error."""
        check_address(address, security)
        options = options or TransportOptions()
        socket = context.socket(zmq.DEALER)
        _set_options(socket, options)
        # Queue for finished connections only: otherwise frames pile up for a scheduler that is away.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, int(options.reconnect_min * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(options.reconnect_max * 1000))
        if isinstance(security, CurveConnector) and address.startswith("tcp://"):
            socket.setsockopt(zmq.CURVE_PUBLICKEY, security.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, security.secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, security.scheduler)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise AddressError(f"cannot connect to {address}: {error}") from error
        return cls(socket, address, options, clock)

    def send(self, frame: bytes, peer: bytes = b"") -> Sent:
        """Send now, or keep the frame in the peer's bounded backlog. Order per peer is kept."""
        backlog = self._backlogs.get(peer)
        if backlog is None:
            sent = self._try_send(frame, peer)
            if sent is not Sent.BACKLOGGED:
                return sent
            backlog = self._backlogs[peer] = _Backlog(since=self._clock())
        backlog.frames.append(frame)
        backlog.size += len(frame)
        if backlog.size > self._options.backlog_bytes:
            del self._backlogs[peer]
            return Sent.GONE
        return Sent.BACKLOGGED

    def flush(self) -> list[bytes]:
        """Send what waits, as far as peers take it; returns the peers that are gone or took nothing for too long."""
        return [peer for peer in list(self._backlogs) if self._flush_peer(peer) is Sent.GONE]

    def forget(self, peer: bytes) -> None:
        """Drop a peer's backlog: its session is over."""
        self._backlogs.pop(peer, None)

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next (peer, frame), or None when nothing waits. Messages of the wrong shape are counted and skipped."""
        while True:
            try:
                parts = self.socket.recv_multipart(NOW)
            except zmq.Again:
                return None
            if len(parts) == (2 if self._routes else 1):
                self._received += 1
                return (parts[0], parts[1]) if self._routes else (b"", parts[0])
            self._malformed += 1

    @property
    def backlogged(self) -> bool:
        """True while some peer has frames waiting."""
        return bool(self._backlogs)

    def statistics(self) -> TransportStatistics:
        """A frozen view of the counters."""
        self._count_connections()
        return TransportStatistics(
            frames_sent=self._sent,
            frames_received=self._received,
            malformed_received=self._malformed,
            connections=self._connections,
            connections_let_in=self._let_in,
            peers_backlogged=len(self._backlogs),
            bytes_backlogged=sum(backlog.size for backlog in self._backlogs.values()),
        )

    def close(self) -> None:
        """Close the socket; frames already handed to ZMQ get the linger time to leave."""
        self._backlogs.clear()
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
        self.socket.close(linger=int(self._options.linger * 1000))

    def _count_connections(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_ACCEPTED:
                self._connections += 1
            else:
                self._let_in += 1

    def _flush_peer(self, peer: bytes) -> Sent:
        backlog = self._backlogs[peer]
        while backlog.frames:
            sent = self._try_send(backlog.frames[0], peer)
            if sent is Sent.BACKLOGGED:
                if self._clock() - backlog.since <= self._options.backlog_seconds:
                    return sent
                sent = Sent.GONE
            if sent is Sent.GONE:
                del self._backlogs[peer]
                return sent
            backlog.size -= len(backlog.frames.popleft())
            backlog.since = self._clock()
        del self._backlogs[peer]
        return Sent.SENT

    def _try_send(self, frame: bytes, peer: bytes) -> Sent:
        try:
            if self._routes:
                self.socket.send(peer, NOW_AND_MORE)
            self.socket.send(frame, NOW)
        except zmq.Again:
            return Sent.BACKLOGGED
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.ENOTCONN):
                return Sent.GONE
            raise
        self._sent += 1
        return Sent.SENT


def _set_options(socket: zmq.Socket[bytes], options: TransportOptions) -> None:
    socket.setsockopt(zmq.SNDHWM, options.high_water_mark)
    socket.setsockopt(zmq.RCVHWM, options.high_water_mark)
    socket.setsockopt(zmq.MAXMSGSIZE, options.max_message_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(options.heartbeat_interval * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(options.heartbeat_timeout * 1000))
    socket.setsockopt(zmq.LINGER, int(options.linger * 1000))

"""The simulation in real time: hundreds of groups and some frontends on the real sockets of one scheduler.

::

    poll ─► frames and plans in ─► steps that are over: StepDone out ─► requests that are due: Submit out ─► poll …

One process, one poller and one heap of timers; no thread or task per group. A group's step takes what its model says,
counted from when its plan was there; when this process is late, so is the step, and ``late`` says by how much.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import zmq

from bench.simulation.frontend import SimulatedFrontend
from bench.simulation.group import SimulatedGroup
from protocol import codec
from protocol.base import Wire
from protocol.codec import Decoder, encode
from protocol.frontend import Hello, Welcome
from protocol.keys import NullSecurity
from protocol.session import Ping
from protocol.transport import Transport
from protocol.versions import NEWEST, OLDEST
from protocol.worker import Plan, Register, Reset
from workers.simulated import StepTimes

LONGEST_POLL = 0.05
PING_SECONDS = 2.0


class Peer:
    """One DEALER and what is on this side of it."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, decoder: Decoder[Any], clock: Callable[[], float]
    ) -> None:
        self.transport = Transport.connect(address, security=NullSecurity(), context=context, clock=clock)
        self._decoder = decoder

    def greet(self, message: Wire) -> None:
        """The first message, once there is a connection."""
        if not self.transport.socket.poll(10_000, zmq.POLLOUT):
            raise RuntimeError(f"no scheduler at {self.transport.address}")
        self.send(message)

    def send(self, message: Wire) -> None:
        self.transport.send(encode(message))

    def received(self) -> Iterator[Any]:
        """Everything that is there."""
        if self.transport.backlogged:
            self.transport.flush()
        while (received := self.transport.receive()) is not None:
            yield self._decoder.decode(received[1])


@dataclass(eq=False)
class GroupPeer:
    """One group on its socket."""

    peer: Peer
    group: SimulatedGroup
    due: float = 0.0
    """When the running step is over."""


@dataclass
class Turnaround:
    """What was seen from the workers' side."""

    steps: int = 0
    late: list[float] = field(default_factory=list)
    """Seconds each StepDone left after its step was over."""
    waited: int = 0
    """Steps after which no plan was there: the group stood still."""


class SocketSimulation:
    """Groups and frontends of one scheduler. Use as a context manager."""

    def __init__(
        self, *, frontend_address: str, worker_address: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.turnaround = Turnaround()
        self.frontends: list[SimulatedFrontend] = []
        self._addresses = (frontend_address, worker_address)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8192)
        self._poller = zmq.Poller()
        self._by_socket: dict[Any, GroupPeer | tuple[SimulatedFrontend, Peer]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.at(clock(), self._ping)

    def __enter__(self) -> SocketSimulation:
        return self

    def __exit__(self, *of: object) -> None:
        for peer in self._peers():
            peer.transport.close()
        self._context.term()

    def add_group(self, register: Register, times: StepTimes) -> GroupPeer:
        """A group registers."""
        peer = Peer(self._context, self._addresses[1], codec.scheduler_to_leader, self.clock)
        group = GroupPeer(peer, SimulatedGroup(register, times))
        self._watch(peer, group)
        peer.greet(register)
        return group

    def kill(self, end: GroupPeer) -> None:
        """A group is gone between one message and the next."""
        socket = end.peer.transport.socket
        self._poller.unregister(socket)
        del self._by_socket[socket]
        end.group.receive(Reset(0, 0))  # whatever it was doing comes to nothing
        end.peer.transport.close()

    def add_frontend(self, instance: int) -> SimulatedFrontend:
        """A frontend says hello, and is welcome when this returns."""
        peer = Peer(self._context, self._addresses[0], codec.scheduler_to_frontend, self.clock)
        frontend = SimulatedFrontend(peer.send)
        self._watch(peer, (frontend, peer))
        peer.greet(Hello(instance, instance, OLDEST, NEWEST))
        while True:
            peer.transport.socket.poll(10_000)
            for message in peer.received():
                frontend.receive(message, self.clock())
                if isinstance(message, Welcome):
                    self.frontends.append(frontend)
                    return frontend

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something once the time has come."""
        heapq.heappush(self._timers, (when, next(self._count), action))

    def run(self, until: float) -> None:
        """Let time pass."""
        while (now := self.clock()) < until:
            next_due = self._timers[0][0] if self._timers else until
            wait = min(max(min(next_due, until) - now, 0.0), LONGEST_POLL)
            for socket, _ in self._poller.poll(int(wait * 1000)):
                self._read(self._by_socket[socket])
            self._ring()

    def _ring(self) -> None:
        while self._timers and self._timers[0][0] <= self.clock():
            heapq.heappop(self._timers)[2]()

    def _ping(self) -> None:
        for peer in self._peers():
            peer.send(Ping(0))
        self.at(self.clock() + PING_SECONDS, self._ping)

    def _peers(self) -> list[Peer]:
        return [end.peer if isinstance(end, GroupPeer) else end[1] for end in self._by_socket.values()]

    def _watch(self, peer: Peer, end: GroupPeer | tuple[SimulatedFrontend, Peer]) -> None:
        self._by_socket[peer.transport.socket] = end
        self._poller.register(peer.transport.socket, zmq.POLLIN)

    def _read(self, end: GroupPeer | tuple[SimulatedFrontend, Peer]) -> None:
        now = self.clock()
        if isinstance(end, GroupPeer):
            for message in end.peer.received():
                end.group.receive(message)
                if isinstance(message, Plan) and not end.group.busy:
                    self._begin(end, now)
        else:
            frontend, peer = end
            for message in peer.received():
                frontend.receive(message, now)

    def _begin(self, end: GroupPeer, now: float) -> None:
        end.due = now + end.group.begin()
        self.at(end.due, lambda: self._finish(end))

    def _finish(self, end: GroupPeer) -> None:
        """A step is over; the next one begins at that moment when its plan is there."""
        if not end.group.busy:
            return
        end.peer.send(end.group.end())
        self.turnaround.steps += 1
        self.turnaround.late.append(self.clock() - end.due)
        if end.group.plans:
            self._begin(end, end.due)
        else:
            self.turnaround.waited += 1

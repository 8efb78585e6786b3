"""A scheduler's loop on real sockets, and peers driven by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from protocol import codec
from protocol.base import Wire
from protocol.codec import Decoder, encode
from protocol.frontend import Frame, Frames, Hello, Welcome
from protocol.keys import NullSecurity
from protocol.session import Ping, Pong
from protocol.transport import Transport
from protocol.versions import NEWEST, OLDEST
from protocol.worker import Plan, Reset, StepDone, WorkerWelcome
from scheduler.loop import SchedulerLoop
from scheduler.settings import SchedulerSettings
from tests.scheduler.fake_worker import FakeWorker, register

WAIT_MS = 20_000


class Clock:
    """The machine's clock, plus what a test adds."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Peer:
    """A DEALER driven by hand."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, decoder: Decoder[Any]) -> None:
        self.transport = Transport.connect(address, security=NullSecurity(), context=context)
        self._decoder = decoder
        self._unread: list[Frame] = []
        """Frames that came together with one that was read."""

    def send(self, *messages: Wire | bytes) -> None:
        for message in messages:
            assert self.transport.socket.poll(WAIT_MS, zmq.POLLOUT), "no connection"
            self.transport.send(message if isinstance(message, bytes) else encode(message))

    def next(self) -> Any:
        if self._unread:
            return self._unread.pop(0)
        assert self.transport.socket.poll(WAIT_MS), "nothing arrived"
        received = self.transport.receive()
        assert received is not None
        message = self._decoder.decode(received[1])
        if isinstance(message, Frames):
            message, *self._unread = message.frames
        return message

    def next_of(self, *kinds: type) -> Any:
        """Skips what comes by itself: loads, and what the test did not ask for."""
        while True:
            message = self.next()
            if isinstance(message, kinds):
                return message


class Bench:
    """A running loop and peers."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        directory.chmod(0o700)
        self.clock = Clock()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.loop = SchedulerLoop(
            SchedulerSettings(frontend_bind=f"ipc://{directory}/f", worker_bind=f"ipc://{directory}/w", **settings),
            clock=self.clock,
        )
        self._peers: list[Peer] = []
        self._thread = threading.Thread(target=self.loop.run)
        self._thread.start()

    def frontend(self) -> Peer:
        return self._peer(self.loop.frontends.transport.address, codec.scheduler_to_frontend)

    def worker(self) -> Peer:
        return self._peer(self.loop.workers.transport.address, codec.scheduler_to_leader)

    def launcher(self) -> Peer:
        return self._peer(self.loop.workers.transport.address, codec.scheduler_to_launcher)

    def _peer(self, address: str, decoder: Decoder[Any]) -> Peer:
        peer = Peer(self.context, address, decoder)
        self._peers.append(peer)
        return peer

    def hello(self, peer: Peer, instance: int = 1, nonce: int = 77) -> Welcome:
        peer.send(Hello(nonce, instance, OLDEST, NEWEST))
        welcome = peer.next_of(Welcome)
        assert welcome.nonce == nonce
        return welcome

    def leader(self, incarnation: int = 1, **registration: Any) -> tuple[Peer, FakeWorker]:
        peer, worker = self.worker(), FakeWorker(register(incarnation=incarnation, **registration))
        peer.send(worker.registration)
        welcome, reset = peer.next(), peer.next()
        assert isinstance(welcome, WorkerWelcome) and isinstance(reset, Reset), "Reset comes right after Welcome"
        assert reset.epoch == welcome.epoch
        worker.receive(reset)
        return peer, worker

    def serve(self, peer: Peer, worker: FakeWorker, until: Callable[[StepDone], bool]) -> None:
        """Answer plans until a step says that it is enough."""
        while True:
            message = peer.next_of(Plan, Reset)
            worker.receive(message)
            if isinstance(message, Plan):
                done = worker.step()
                peer.send(done)
                if until(done):
                    return

    def advance(self, seconds: float, *awake: Peer) -> None:
        """Time passes, and the loop has seen it before this returns; these peers are heard meanwhile."""
        self.clock.ahead += seconds
        turns = self.loop.turns
        while self.loop.turns < turns + 2:
            for peer in awake:
                peer.send(Ping(1))
                peer.next_of(Pong)

    def close(self) -> None:
        """The loop ends; its accounts still add up."""
        self.loop.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()
        for peer in self._peers:
            peer.transport.close()
        self.context.term()
        self.loop.cell.check_integrity()

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive(), "the loop did not end"

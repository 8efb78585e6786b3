"""The scheduler's side of a worker socket, driven by hand from a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from protocol import codec
from protocol.base import Wire
from protocol.ids import Incarnation
from protocol.keys import NullSecurity
from protocol.packing import pack_u32, unpack_u8, unpack_u32
from protocol.requests import Sampling
from protocol.session import Ping, Pong
from protocol.transport import Transport
from protocol.versions import NEWEST
from protocol.worker import LauncherHello, Plan, Register, Reset, SlotAdd, StepDone, WorkerWelcome

WAIT_MS = 20_000
EPOCH = 77

MessageT = TypeVar("MessageT")


class HandDrivenScheduler:
    """Binds the worker socket, answers pings, and gives the test every other message in order."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.transport = Transport.listen(address, security=NullSecurity(), context=self.context)

    def next(self, wait_ms: int = WAIT_MS) -> tuple[bytes, object]:
        """The next message that is not a ping."""
        while True:
            peer, message = self._receive(wait_ms)
            if not isinstance(message, Ping):
                return peer, message

    def next_ping(self) -> Ping:
        """The next message, which must be a ping."""
        _, message = self._receive(WAIT_MS)
        assert isinstance(message, Ping)
        return message

    def _receive(self, wait_ms: int) -> tuple[bytes, object]:
        assert self.transport.socket.poll(wait_ms), "nothing arrived"
        received = self.transport.receive()
        assert received is not None
        message = codec.worker_side_to_scheduler.decode(received[1])
        if isinstance(message, Ping):
            self.send(received[0], Pong(EPOCH, message.progress))
        return received[0], message

    def next_of(
        self,
        kind: type[MessageT],
        where: Callable[[MessageT], bool] = lambda message: True,
        wait_ms: int = WAIT_MS,
    ) -> tuple[bytes, MessageT]:
        """The next message of a kind; others are passed over."""
        while True:
            peer, message = self.next(wait_ms)
            if isinstance(message, kind) and where(message):
                return peer, message

    def expect(self, kind: type[MessageT]) -> MessageT:
        """The next message, which must be of this kind; repeated greetings are passed over."""
        while True:
            _, message = self.next()
            if isinstance(message, kind):
                return message
            assert isinstance(message, Register | LauncherHello), f"{message} instead of a {kind.__name__}"

    def welcome(self, epoch: int = EPOCH, where: Callable[[Register], bool] = lambda message: True) -> Group:
        """Take a Register and open its session; no Reset yet."""
        peer, register = self.next_of(Register, where)
        self.send(peer, WorkerWelcome(register.nonce, epoch, 1, NEWEST))
        return Group(self, peer, register, epoch)

    def open_group(self, epoch: int = EPOCH, where: Callable[[Register], bool] = lambda message: True) -> Group:
        """Take a Register, open its session and reset it."""
        group = self.welcome(epoch, where)
        group.reset()
        return group

    def open_launcher(self) -> bytes:
        """Take a LauncherHello and open its session; returns the peer."""
        peer, hello = self.next_of(LauncherHello)
        self.send(peer, WorkerWelcome(hello.nonce, EPOCH, 1, NEWEST))
        return peer

    def send(self, peer: bytes, message: Wire) -> None:
        self.transport.send(codec.encode(message), peer)

    def close(self) -> None:
        self.transport.close()
        self.context.term()


class Group:
    """One leader's session, with plans made by hand."""

    def __init__(self, scheduler: HandDrivenScheduler, peer: bytes, register: Register, epoch: int) -> None:
        self.scheduler = scheduler
        self.peer = peer
        self.register = register
        self.incarnation = Incarnation(register.incarnation)
        self.epoch = epoch
        self.step = 1

    def send(self, message: Wire) -> None:
        self.scheduler.send(self.peer, message)

    def reset(self, first_step: int = 1) -> None:
        self.step = first_step
        self.send(Reset(self.epoch, first_step))

    def make_plan(
        self,
        *,
        drops: tuple[int, ...] = (),
        adds: tuple[SlotAdd, ...] = (),
        blocks: tuple[tuple[int, int], ...] = (),
        chunks: tuple[tuple[int, int], ...] = (),
        step: int | None = None,
        epoch: int | None = None,
        incarnation: int | None = None,
    ) -> Plan:
        """The plan of the next step, unless told otherwise."""
        plan = Plan(
            self.epoch if epoch is None else epoch,
            self.incarnation if incarnation is None else incarnation,
            self.step if step is None else step,
            drops=pack_u32(drops),
            adds=adds,
            blocks=pack_u32([item for pair in blocks for item in pair]),
            chunks=pack_u32([item for pair in chunks for item in pair]),
        )
        self.step = plan.step + 1
        return plan

    def plan(self, **changes: object) -> None:
        """Send the next plan."""
        self.send(self.make_plan(**changes))  # type: ignore[arg-type]

    def add(self, slot: int, tokens: list[int] | bytes, block: int = 0, *, chunk: int | None = None) -> None:
        """A plan that adds one sequence with one block and prefills it, or the first ``chunk`` tokens of it."""
        whole = len(tokens) if chunk is None else chunk
        self.plan(adds=(slot_add(slot, tokens),), blocks=((slot, block),), chunks=((slot, whole),))

    def done(self) -> tuple[StepDone, list[int], list[int]]:
        """The next StepDone, its counts and its ids."""
        done = self.scheduler.expect(StepDone)
        return done, unpack_u8(done.counts).tolist(), unpack_u32(done.ids).tolist()


def slot_add(
    slot: int, tokens: list[int] | bytes, prompt_len: int | None = None, seed: int = 1, **sampling: Any
) -> SlotAdd:
    prompt_len = len(tokens) if prompt_len is None else prompt_len
    return SlotAdd(slot, pack_u32(tokens), prompt_len, seed, Sampling(**sampling))

"""A socket never blocks, never grows without bound, and is never open to a stranger by accident."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from protocol.keys import NullSecurity
from protocol.transport import AddressError, Sent, Transport, TransportOptions, check_address

WAIT_MS = 10_000


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"ipc://{tmp_path}/s"


def receive(transport: Transport) -> tuple[bytes, bytes]:
    assert transport.socket.poll(WAIT_MS), "nothing arrived"
    received = transport.receive()
    assert received is not None
    return received


def wait_until_sent(send: Callable[[], Sent], transport: Transport) -> None:
    transport.socket.poll(WAIT_MS, zmq.POLLOUT)
    assert send() is Sent.SENT


def test_frames_travel_both_ways(context, address) -> None:
    server = Transport.listen(address, security=NullSecurity(), context=context)
    client = Transport.connect(address, security=NullSecurity(), context=context)
    wait_until_sent(lambda: client.send(b"up"), client)
    peer, frame = receive(server)
    assert frame == b"up" and server.send(b"down", peer) is Sent.SENT
    assert receive(client) == (b"", b"down")
    assert server.receive() is None
    assert (server.statistics().frames_received, server.statistics().frames_sent) == (1, 1)


def test_a_peer_that_is_not_there_is_gone_and_not_silently_dropped(context, address) -> None:
    server = Transport.listen(address, security=NullSecurity(), context=context)
    assert server.send(b"x", b"\0nobody") is Sent.GONE


def test_messages_of_the_wrong_shape_are_counted_and_skipped(context, address) -> None:
    server = Transport.listen(address, security=NullSecurity(), context=context)
    stranger = context.socket(zmq.DEALER)
    stranger.connect(address)
    stranger.send_multipart([b"a", b"b", b"c"])
    stranger.send(b"one frame")
    assert receive(server)[1] == b"one frame"
    assert server.statistics().malformed_received == 1


def small() -> TransportOptions:
    return TransportOptions(high_water_mark=1, backlog_bytes=10_000_000, backlog_seconds=10.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def backlogged_server(
    context: zmq.Context[zmq.Socket[bytes]], address: str, options: TransportOptions
) -> tuple[Transport, Transport, bytes, list[bytes], Clock]:
    """A server whose one peer reads nothing, filled until frames stay in the backlog."""
    clock = Clock()
    server = Transport.listen(address, security=NullSecurity(), context=context, options=options, clock=clock)
    client = Transport.connect(address, security=NullSecurity(), context=context, options=options)
    wait_until_sent(lambda: client.send(b"hello"), client)
    peer, _ = receive(server)
    frames = []
    while not server.backlogged:
        frames.append(len(frames).to_bytes(4, "little") + b"\0" * 100_000)
        assert server.send(frames[-1], peer) is not Sent.GONE
    for _ in range(3):
        frames.append(len(frames).to_bytes(4, "little"))
        assert server.send(frames[-1], peer) is Sent.BACKLOGGED
    return server, client, peer, frames, clock


def test_what_a_slow_peer_does_not_take_waits_in_order(context, address) -> None:
    server, client, _, frames, _ = backlogged_server(context, address, small())
    taken = []
    for _ in range(100 * len(frames)):
        assert server.flush() == []
        if client.socket.poll(100):
            taken.append(client.receive()[1])
        if len(taken) == len(frames):
            break
    assert taken == frames
    assert not server.backlogged and server.statistics().bytes_backlogged == 0


def test_a_peer_that_takes_nothing_for_too_long_is_given_up(context, address) -> None:
    server, client, peer, _, clock = backlogged_server(context, address, small())
    assert server.flush() == []
    clock.now = 10.1
    assert server.flush() == [peer]
    assert server.statistics().bytes_backlogged == 0
    client.close()  # until then it is there, and takes nothing


def test_a_backlog_is_bounded_in_bytes(context, address) -> None:
    server, client, peer, _, _ = backlogged_server(context, address, small())
    assert server.send(b"\0" * 10_000_001, peer) is Sent.GONE
    assert server.statistics().bytes_backlogged == 0
    client.close()


def test_an_oversized_message_ends_its_connection_only(context, address) -> None:
    options = TransportOptions(max_message_bytes=1000)
    server = Transport.listen(address, security=NullSecurity(), context=context, options=options)
    good = Transport.connect(address, security=NullSecurity(), context=context)
    bad = Transport.connect(address, security=NullSecurity(), context=context)
    wait_until_sent(lambda: bad.send(b"x" * 1001), bad)
    wait_until_sent(lambda: good.send(b"fine"), good)
    assert receive(server)[1] == b"fine"
    assert server.receive() is None


def test_an_ipc_socket_needs_a_private_directory(context, tmp_path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(AddressError, match="0700"):
        Transport.listen(f"ipc://{tmp_path}/s", security=NullSecurity(), context=context)


def test_a_taken_port_is_an_address_error(context) -> None:
    first = Transport.listen("tcp://127.0.0.1:*", security=NullSecurity(), context=context)
    with pytest.raises(AddressError, match="cannot bind"):
        Transport.listen(first.address, security=NullSecurity(), context=context)


@pytest.mark.parametrize("address", ["ipc:///tmp/x", "tcp://127.0.0.1:5570", "tcp://[::1]:5570", "tcp://localhost:1"])
def test_local_addresses_need_no_encryption(address) -> None:
    check_address(address, NullSecurity())


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5570", "tcp://10.0.0.7:5570", "tcp://*:5570", "tcp://scheduler:5570"]
)
def test_an_unencrypted_address_beyond_this_host_is_refused_unless_asked_for(address) -> None:
    with pytest.raises(AddressError, match="--insecure-sockets"):
        check_address(address, NullSecurity())
    check_address(address, NullSecurity(insecure_sockets=True))


@pytest.mark.parametrize(
    "address", ["", "ipc://", "http://127.0.0.1:1", "tcp://:5570", "ipc:///" + "x" * 101, "inproc://a"]
)
def test_an_address_that_is_none_is_refused(address) -> None:
    with pytest.raises(AddressError):
        check_address(address, NullSecurity(insecure_sockets=True))

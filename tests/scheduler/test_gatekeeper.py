"""Encrypted doors over real TCP: who comes in, who does not, and that strangers only count."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from protocol import codec
from protocol.codec import encode
from protocol.frontend import Hello, Welcome
from protocol.keys import ConnectorSecurity, NullSecurity, PeerRole, connector_security, make_keys
from protocol.link import LinkTimes, Opened, PeerLink
from protocol.transport import Transport
from protocol.versions import NEWEST, OLDEST
from protocol.worker import LauncherHello, WorkerWelcome
from scheduler.gatekeeper import FRESH, KeyList
from scheduler.loop import SchedulerLoop
from scheduler.settings import SchedulerSettings

WAIT_MS = 20_000


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    for name in ("scheduler", "frontend", "worker"):
        make_keys(tmp_path / "keys", name)
    return tmp_path / "keys"


@pytest.fixture
def loop(keys: Path) -> Iterator[SchedulerLoop]:
    loop = SchedulerLoop(
        SchedulerSettings(frontend_bind="tcp://127.0.0.1:*", worker_bind="tcp://127.0.0.1:*", keys=str(keys))
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield loop
    loop.stop()
    thread.join()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def _hello(context: zmq.Context[zmq.Socket[bytes]], loop: SchedulerLoop, security: ConnectorSecurity) -> object:
    """What a frontend with this security is answered; None when it is turned away."""
    before = _strangers(loop)
    with contextlib.closing(
        Transport.connect(loop.frontends.transport.address, security=security, context=context)
    ) as transport:
        while not transport.socket.poll(20, zmq.POLLOUT):
            if _turned_away(loop, before):
                return None
        transport.send(encode(Hello(7, 1, OLDEST, NEWEST)))
        assert transport.socket.poll(WAIT_MS)
        received = transport.receive()
        assert received is not None
        return codec.scheduler_to_frontend.decode(received[1])


def _strangers(loop: SchedulerLoop) -> int:
    """Connections that did not get through the handshake, or have not yet."""
    published = loop.published()
    if published is None:
        return 0
    transport = published.frontends.transport
    return transport.connections - transport.connections_let_in


def _turned_away(loop: SchedulerLoop, before: int) -> bool:
    """Whether another stranger was counted, and not only one whose handshake was going on."""
    published = loop.published()
    if _strangers(loop) <= before:
        return False
    while loop.published() is published:
        time.sleep(0.02)
    return _strangers(loop) > before


def _wait_for_stranger(loop: SchedulerLoop) -> None:
    ends = time.monotonic() + WAIT_MS / 1000
    while not _strangers(loop):
        assert time.monotonic() < ends, "no stranger was counted"
        time.sleep(0.02)


def test_a_frontend_with_its_key_comes_in(context, loop, keys) -> None:
    assert isinstance(_hello(context, loop, _frontend(keys)), Welcome)


def test_a_worker_with_its_key_comes_in_at_its_own_door(context, loop, keys) -> None:
    security = connector_security(str(keys), PeerRole.WORKER, insecure_sockets=False)
    with contextlib.closing(
        Transport.connect(loop.workers.transport.address, security=security, context=context)
    ) as transport:
        assert transport.socket.poll(WAIT_MS, zmq.POLLOUT)
        transport.send(encode(LauncherHello(7, OLDEST, NEWEST, 1)))
        assert transport.socket.poll(WAIT_MS)
        received = transport.receive()
        assert received is not None
        assert isinstance(codec.scheduler_to_launcher.decode(received[1]), WorkerWelcome)


def test_a_key_opens_only_the_door_of_its_role(context, loop, keys) -> None:
    assert _hello(context, loop, connector_security(str(keys), PeerRole.WORKER, insecure_sockets=False)) is None


def test_a_key_that_is_on_no_list_opens_nothing(context, loop, keys, tmp_path) -> None:
    make_keys(tmp_path / "stranger", "frontend")
    (tmp_path / "stranger" / "scheduler.key").write_bytes((keys / "scheduler.key").read_bytes())
    assert _hello(context, loop, _frontend(tmp_path / "stranger")) is None


def test_no_encryption_opens_nothing(context, loop) -> None:
    assert _hello(context, loop, NullSecurity()) is None


def test_a_peer_does_not_talk_to_a_scheduler_with_another_key(context, loop, keys, tmp_path) -> None:
    make_keys(tmp_path / "other", "scheduler")
    (tmp_path / "other" / "frontend.key_secret").write_bytes((keys / "frontend.key_secret").read_bytes())
    (tmp_path / "other" / "frontend.key_secret").chmod(0o600)
    with contextlib.closing(
        Transport.connect(loop.frontends.transport.address, security=_frontend(tmp_path / "other"), context=context)
    ) as transport:
        _wait_for_stranger(loop)
        assert not transport.socket.poll(0, zmq.POLLOUT)


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        b"\xff" + bytes(8) + b"\x01\x7f\x03\x00NULL" + bytes(64),
        b"\n" * 4096,
    ],
    ids=["http", "tls", "null", "scan"],
)
def test_bytes_of_a_stranger_are_counted_and_nothing_else(context, loop, keys, junk) -> None:
    address = loop.frontends.transport.address.removeprefix("tcp://")
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as stranger:
        stranger.sendall(junk)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):  # its greeting, then the end
                pass
    _wait_for_stranger(loop)
    assert isinstance(_hello(context, loop, _frontend(keys)), Welcome)
    published = loop.published()
    assert published is not None and published.frontends.frames_dropped == 0


def test_a_peer_that_was_turned_away_gets_in_once_its_key_is_listed(loop, keys, tmp_path) -> None:
    make_keys(tmp_path / "new", "frontend")
    (tmp_path / "new" / "scheduler.key").write_bytes((keys / "scheduler.key").read_bytes())
    opened = threading.Event()
    link = PeerLink(
        loop.frontends.transport.address,
        security=lambda: _frontend(tmp_path / "new"),
        decoder=codec.scheduler_to_frontend,
        greet=lambda nonce: Hello(nonce, 1, OLDEST, NEWEST),
        deliver=lambda events: opened.set() if any(isinstance(event, Opened) for event in events) else None,
        progress=lambda: 0,
        times=LinkTimes(reconnect=0.2, greet=0.1),
    )
    with contextlib.closing(link):
        link.start()
        _wait_for_stranger(loop)
        assert not opened.is_set()
        (keys / "frontend-next.key").write_bytes((tmp_path / "new" / "frontend.key").read_bytes())
        assert opened.wait(WAIT_MS / 1000)


def test_keys_are_rotated_without_a_restart(tmp_path: Path) -> None:
    make_keys(tmp_path, "frontend")
    now = [0.0]
    listed = KeyList(tmp_path, PeerRole.FRONTEND, clock=lambda: now[0])
    make_keys(tmp_path, "frontend-next")
    (key,) = {_public(tmp_path / "frontend-next.key")}
    assert not listed.callback("frontend", key)
    now[0] += FRESH
    assert listed.callback("frontend", key)
    (tmp_path / "frontend-next.key").unlink()
    now[0] += FRESH
    assert not listed.callback("frontend", key)


def test_a_broken_key_file_leaves_the_list_as_it_was(tmp_path: Path) -> None:
    make_keys(tmp_path, "frontend")
    key = _public(tmp_path / "frontend.key")
    now = [0.0]
    listed = KeyList(tmp_path, PeerRole.FRONTEND, clock=lambda: now[0])
    (tmp_path / "frontend-broken.key").write_text("")
    now[0] += FRESH
    assert listed.callback("frontend", key)


def _public(path: Path) -> bytes:
    return path.read_text().split('public-key = "')[1].split('"')[0].encode()


def _frontend(keys: Path) -> ConnectorSecurity:
    return connector_security(str(keys), PeerRole.FRONTEND, insecure_sockets=False)

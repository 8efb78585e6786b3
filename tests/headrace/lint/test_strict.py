"""Nothing is forgiven: not in JSON, not in event streams, not in HTTP."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.lint.strict import StrictError, decode_json, read_events
from headrace.lint.wire import Address, AddressError, Connection, Reply, WireFault


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1, "a": 2}',
        b"\xff",
        b'"\\ud800"',
        b"\xef\xbb\xbf{}",
        b"1 2",
        b"",
        b"[" * 9999,
    ],
)
def test_bytes_that_are_no_strict_json_are_refused(data: bytes) -> None:
    with pytest.raises(StrictError):
        decode_json(data)


def test_a_good_stream_has_no_faults() -> None:
    stream = read_events(b': ping\n\ndata: {"a": "\xf0\x9f\xa6\xa6"}\n\ndata: [DONE]\n\n')
    assert (stream.faults, stream.chunks, stream.done, stream.comments) == ([], [{"a": "🦦"}], 1, 1)


@pytest.mark.parametrize(
    "body",
    [
        b"data: {}\n",
        b"data: {}",
        b"data:{}\n\n",
        b"event: x\ndata: {}\n\n",
        b"error: {}\n\n",
        b"data: {}\ndata: {}\n\n",
        b"data: {]\n\n",
        b"data: 5\n\n",
        b"data: [DONE]\n\ndata: {}\n\n",
        b'data: {"a": "\xf0\x9f"}\n\n',
        b"data: {}\n\n\n\n",
    ],
)
def test_each_fault_of_a_stream_is_named(body: bytes) -> None:
    assert read_events(body).faults


@given(st.binary(max_size=200))
def test_any_bytes_can_be_read_as_a_stream(body: bytes) -> None:
    read_events(body)


def reply_to(data: bytes, method: str = "GET") -> Reply:
    """What the reader makes of these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with Connection(Address("127.0.0.1", listener.getsockname()[1]), time.monotonic() + 10, 10.0) as connection:
            connection.send(b"GET / HTTP/1.1\r\n\r\n")
            try:
                return connection.reply(method)
            finally:
                thread.join()


def test_chunks_are_joined_and_informational_replies_passed_over() -> None:
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = reply_to(head + b"2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n")
    assert (reply.status, reply.body, reply.faults, reply.informational) == (200, b"abc", [], 1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\nab\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Le",
    ],
)
def test_a_reply_that_is_not_whole_is_a_fault(data: bytes) -> None:
    with pytest.raises(WireFault):
        reply_to(data)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nBad Header: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\n\r\n",
        b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_a_fault_that_leaves_the_reply_readable_is_noted(data: bytes) -> None:
    assert reply_to(data).faults


@pytest.mark.parametrize("url", ["http://h:80", "h:80", "http://h/v1", "http://h/v1/", "https://h/base/v1"])
def test_a_base_url_may_end_with_v1(url: str) -> None:
    address = Address.of(url)
    assert (address.host, address.root) == ("h", "/base" if "base" in url else "")


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:x", ""])
def test_what_names_no_server_is_refused(url: str) -> None:
    with pytest.raises(AddressError):
        Address.of(url)

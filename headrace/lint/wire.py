"""HTTP/1.1 as it is on the wire: one connection, replies with their faults, and bodies as they arrive.

A fault that leaves the reply readable is noted in it; what cannot be read at all is a ``WireFault``.
"""

from __future__ import annotations

import re
import select
import socket
import ssl
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

MAX_HEAD = 64 << 10
MAX_BODY = 32 << 20
PIECE = 64 << 10

STATUS_LINE = re.compile(rb"HTTP/1\.[01] [1-5][0-9][0-9]( [\t\x20-\x7e\x80-\xff]*)?")
HEADER_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[\t ]*([\t\x20-\x7e\x80-\xff]*?)[\t ]*")


class AddressError(ValueError):
    """A URL that names no server; one line for people."""


class WireFault(Exception):
    """No reply could be read, or not all of it; the text says what came instead."""


class Unreachable(WireFault):
    """Nobody listens there."""


class Silence(WireFault):
    """Time was up before the reply was whole."""


@dataclass(frozen=True)
class Address:
    """Where a server is."""

    host: str
    port: int
    secure: bool = False
    root: str = ""
    """Path before ``/v1``."""

    @classmethod
    def of(cls, url: str) -> Address:
        """From a base URL, with or without ``/v1``. Raises AddressError."""
        try:
            parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise AddressError(f"{url!r} is not http://HOST:PORT: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise AddressError(f"{url!r} is not http://HOST:PORT")
        secure = parts.scheme == "https"
        root = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(parts.hostname, port or (443 if secure else 80), secure, root)

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"


@dataclass
class Reply:
    """A response; ``body`` is without its transfer coding."""

    status: int
    head: bytes
    headers: tuple[tuple[str, str], ...]
    """Names in lower case."""
    body: bytes = b""
    faults: list[str] = field(default_factory=list)
    informational: int = 0
    """1xx responses that came before."""

    def header(self, name: str) -> str:
        """A header's value; empty when it is absent."""
        return next((value for key, value in self.headers if key == name), "")

    def all(self, name: str) -> list[str]:
        """All values of a header."""
        return [value for key, value in self.headers if key == name]


def request_bytes(address: Address, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """A request as it is sent. A header given in ``headers`` replaces the one that would be made here."""
    merged = {"Host": address.authority, "User-Agent": "headrace-lint", "Accept": "*/*"}
    given = {name.lower() for name in headers}
    merged = {name: value for name, value in merged.items() if name.lower() not in given}
    if body is not None and not given & {"content-length", "transfer-encoding"}:
        merged["Content-Length"] = str(len(body))
    merged |= headers
    lines = [f"{method} {address.root}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in merged.items())]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + (body or b"")


class Connection:
    """One connection; it waits ``patience`` seconds for the next byte, and not beyond ``deadline`` (monotonic)."""

    def __init__(self, address: Address, deadline: float, patience: float) -> None:
        self._deadline = deadline
        self._patience = patience
        self._buffer = bytearray()
        try:
            raw = socket.create_connection((address.host, address.port), self._left())
            self._socket = raw
            if address.secure:
                self._socket = ssl.create_default_context().wrap_socket(raw, server_hostname=address.host)
        except OSError as error:
            raise Unreachable(f"no connection: {error}") from None
        self._plain = not address.secure

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close at once, whatever is still to come."""
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Send; stops early when the server answers or hangs up before all is sent, as it may."""
        view = memoryview(data)
        try:
            while view:
                self._socket.settimeout(self._left())
                if self._plain and len(view) < len(data) and select.select([self._socket], [], [], 0)[0]:
                    return
                sent = self._socket.send(view[:PIECE])
                view = view[sent:]
        except (BrokenPipeError, ConnectionResetError):
            return
        except OSError as error:
            raise WireFault(f"could not send: {error}") from None

    def head(self) -> Reply:
        """Read up to the end of the headers of the final response."""
        informational = 0
        while True:
            reply = self._one_head()
            if reply.status >= 200:
                reply.informational = informational
                return reply
            informational += 1

    def parts(self, reply: Reply, method: str = "GET") -> Iterator[bytes]:
        """The body as it arrives, also added to the reply; it is whole when the iterator ends."""
        for part in self._parts(reply, method):
            reply.body += part
            if len(reply.body) > MAX_BODY:
                raise WireFault(f"the body is longer than {MAX_BODY} bytes")
            yield part

    def reply(self, method: str = "GET") -> Reply:
        """A whole response."""
        reply = self.head()
        for _ in self.parts(reply, method):
            pass
        return reply

    def at_end(self, seconds: float) -> bool:
        """Whether the server closes within some seconds without sending more."""
        try:
            self._socket.settimeout(min(seconds, self._left()))
            return not self._buffer and not self._socket.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True

    def _one_head(self) -> Reply:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEAD:
                raise WireFault(f"no end of headers in {MAX_HEAD} bytes: {bytes(self._buffer[:200])!r}")
            if not self._more():
                got = bytes(self._buffer[:200])
                raise WireFault(f"closed amid the headers: {got!r}" if got else "closed without a reply")
        head = bytes(self._buffer[: end + 4])
        del self._buffer[: end + 4]
        return _parse_head(head)

    def _parts(self, reply: Reply, method: str) -> Iterator[bytes]:
        if method == "HEAD" or reply.status in (204, 304):
            return
        coding, lengths = reply.header("transfer-encoding").lower(), set(reply.all("content-length"))
        if coding and lengths:
            reply.faults.append("both Transfer-Encoding and Content-Length")
        if len(lengths) > 1:
            reply.faults.append(f"several Content-Length headers: {sorted(lengths)}")
        if coding == "chunked":
            yield from self._chunks(reply)
        elif coding:
            raise WireFault(f"Transfer-Encoding {coding!r} cannot be read")
        elif lengths:
            yield from self._counted(lengths.pop())
        else:
            if "close" not in reply.header("connection").lower():
                reply.faults.append("neither Content-Length nor chunked nor Connection: close, so where does it end")
            yield from self._until_close()

    def _counted(self, text: str) -> Iterator[bytes]:
        if not text.isascii() or not text.isdigit():
            raise WireFault(f"Content-Length is {text!r}")
        left = int(text)
        while left:
            if not self._buffer and not self._more():
                raise WireFault(f"closed {left} bytes before the end of a body of {text} bytes")
            part = bytes(self._buffer[:left])
            del self._buffer[: len(part)]
            left -= len(part)
            yield part

    def _until_close(self) -> Iterator[bytes]:
        while True:
            if self._buffer:
                part = bytes(self._buffer)
                self._buffer.clear()
                yield part
            if not self._more():
                return

    def _chunks(self, reply: Reply) -> Iterator[bytes]:
        while True:
            line = self._line(reply)
            size, _, _ = line.partition(b";")
            if not re.fullmatch(rb"[0-9A-Fa-f]{1,16}", size):
                raise WireFault(f"chunk size {size[:40]!r}")
            length = int(size, 16)
            if length == 0:
                while self._line(reply):
                    pass
                return
            if length > MAX_BODY:
                raise WireFault(f"a chunk of {length} bytes")
            data = self._exactly(length)
            if self._exactly(2) != b"\r\n":
                raise WireFault("a chunk does not end with CR LF where its size says")
            yield data

    def _line(self, reply: Reply) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_HEAD or not self._more():
                raise WireFault(f"closed amid chunks: {bytes(self._buffer[:80])!r}; the last chunk never came")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        if not line.endswith(b"\r"):
            reply.faults.append("a chunk line ends with a bare LF")
        return line.removesuffix(b"\r")

    def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            if not self._more():
                raise WireFault("closed amid a chunk")
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _more(self) -> bool:
        try:
            self._socket.settimeout(self._left())
            data = self._socket.recv(PIECE)
        except TimeoutError:
            raise Silence("no more bytes in time") from None
        except OSError as error:
            raise WireFault(f"connection broke: {error}") from None
        self._buffer += data
        return bool(data)

    def _left(self) -> float:
        left = min(self._patience, self._deadline - time.monotonic())
        if left <= 0:
            raise Silence("no reply in time")
        return left


def _parse_head(head: bytes) -> Reply:
    first, *lines = head[:-4].split(b"\r\n")
    match = re.match(rb"HTTP/1\.[01] +(\d{3})", first)
    if match is None:
        raise WireFault(f"not an HTTP/1.1 response: {first[:80]!r}")
    faults = [] if STATUS_LINE.fullmatch(first) else [f"status line {first[:80]!r}"]
    headers = []
    for line in lines:
        parsed = HEADER_LINE.fullmatch(line)
        if parsed is None:
            faults.append(f"header line {line[:80]!r}")
            continue
        headers.append((parsed[1].decode("ascii").lower(), parsed[2].decode("latin-1")))
    return Reply(int(match[1]), head, tuple(headers), faults=faults)

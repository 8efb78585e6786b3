"""How checks talk to the server: one Session per check, with a deadline and a bound on its requests."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.lint.exchange import Exchange
from headrace.lint.verdicts import NotOffered, Wrong
from headrace.lint.wire import Address, Connection, Reply, Silence, Unreachable, WireFault, request_bytes

if TYPE_CHECKING:
    from headrace.lint.facts import Facts

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MAX_REQUESTS = 200
"""Of one check."""
CHECK_SECONDS = 300.0
MAX_UNREACHABLE = 5
"""Connections that could not be made, until no more are tried."""
MAX_SILENCES = 5
IMPATIENT_SECONDS = 3.0
"""The longest wait once several never came: a server that hangs is judged soon."""

QUESTION = "Count from one to twenty in words."
BEGINNING = "One, two, three, four, five,"

ROUTES: Mapping[str, str] = {"chat": CHAT, "completions": COMPLETIONS}


@dataclass(frozen=True)
class Target:
    """The server under judgement, as the person named it."""

    address: Address
    model: str
    api_key: str = ""
    request_seconds: float = 120.0
    """Longest wait for the next byte."""


@dataclass
class Record:
    """Every exchange of a run, kept for the judges of all."""

    exchanges: list[Exchange] = field(default_factory=list)
    requests: int = 0
    silences: int = 0
    """Requests that were waited for in vain."""
    unreachable: int = 0
    """Connections that could not be made."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, exchange: Exchange) -> None:
        with self._lock:
            self.exchanges.append(exchange)

    def begin(self) -> bool:
        """Count a request; False when so many were waited for in vain that no one should wait long any more."""
        with self._lock:
            self.requests += 1
            return self.silences < MAX_SILENCES

    def fault(self, fault: WireFault) -> None:
        """Count what says that the server is in trouble as a whole."""
        with self._lock:
            self.silences += isinstance(fault, Silence)
            self.unreachable += isinstance(fault, Unreachable)


class Session:
    """Requests of one check."""

    def __init__(self, target: Target, record: Record, facts: Facts) -> None:
        self.target = target
        self.facts = facts
        self.last: Exchange | None = None
        self._record = record
        self._requests = 0
        self._end = time.monotonic() + CHECK_SECONDS
        self._lock = threading.Lock()

    def get(self, path: str, **options: Any) -> Exchange:
        """GET a path."""
        return self.send("GET", path, None, **options)

    def post(self, path: str, body: Mapping[str, Any] | bytes, **options: Any) -> Exchange:
        """POST a JSON object, or bytes as they are."""
        return self.send("POST", path, body, **options)

    def chat(self, **fields: Any) -> Exchange:
        """A short greedy chat completion with these fields changed; ``...`` leaves a field out."""
        return self.post(CHAT, self.chat_fields(**fields))

    def complete(self, **fields: Any) -> Exchange:
        """A short greedy completion with these fields changed; ``...`` leaves a field out."""
        return self.post(COMPLETIONS, self.completion_fields(**fields))

    def ask(self, route: str, **fields: Any) -> Exchange:
        """``chat`` or ``complete`` by the name of the route."""
        return self.chat(**fields) if route == "chat" else self.complete(**fields)

    def chat_fields(self, **fields: Any) -> dict[str, Any]:
        """The body that ``chat`` sends."""
        messages = [{"role": "user", "content": QUESTION}]
        return _without({"model": self.target.model, "messages": messages, **SHORT, **fields})

    def completion_fields(self, **fields: Any) -> dict[str, Any]:
        """The body that ``complete`` sends."""
        return _without({"model": self.target.model, "prompt": BEGINNING, **SHORT, **fields})

    def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None,
        *,
        headers: Mapping[str, str] | None = None,
        key: bool = True,
        record: bool = True,
        patience: float | None = None,
    ) -> Exchange:
        """One request on its own connection. Raises Wrong when no whole reply comes."""
        with self.opened(method, path, body, headers=headers, key=key, patience=patience) as open_reply:
            open_reply.read()
            return open_reply.finish(record=record)

    @contextlib.contextmanager
    def opened(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None,
        *,
        headers: Mapping[str, str] | None = None,
        key: bool = True,
        patience: float | None = None,
    ) -> Iterator[OpenReply]:
        """A request whose reply is read as far as wanted; leaving the block hangs up."""
        data = encode(body) if isinstance(body, Mapping) else body
        sent_headers = self._headers(data, headers or {}, key)
        fields = body if isinstance(body, Mapping) else None
        blank = Exchange(method, path, data or b"", Reply(0, b"", ()), fields, headers=headers or {})
        try:
            with self.connect(patience) as connection:
                connection.send(request_bytes(self.target.address, method, path, sent_headers, data))
                yield OpenReply(self, connection, blank)
        except WireFault as fault:
            self._record.fault(fault)
            raise Wrong(str(fault), blank) from None

    def connect(self, patience: float | None = None) -> Connection:
        """A bare connection. Raises WireFault."""
        with self._lock:
            self._requests += 1
            if self._requests > MAX_REQUESTS:
                raise Wrong(f"more than {MAX_REQUESTS} requests in one check")
        if self._record.unreachable >= MAX_UNREACHABLE:
            raise NotOffered("the server is gone")
        seconds = patience or self.target.request_seconds
        if not self._record.begin():
            seconds = min(seconds, IMPATIENT_SECONDS)
        return Connection(self.target.address, self._end, seconds)

    def raw(self, connection: Connection, method: str, path: str, body: Mapping[str, Any] | None) -> Exchange:
        """One request on a connection that stays open. Raises WireFault."""
        data = None if body is None else encode(body)
        connection.send(request_bytes(self.target.address, method, path, self._headers(data, {}, True), data))
        return self.keep(Exchange(method, path, data or b"", connection.reply(method), body))

    def keep(self, exchange: Exchange, *, record: bool = True) -> Exchange:
        """Remember an exchange for the judges of all."""
        self.last = exchange
        if record:
            self._record.add(exchange)
        return exchange

    def together(self, bodies: Sequence[tuple[str, Mapping[str, Any]]], *, headers: Any = None) -> list[Exchange]:
        """POST several at the same time; the exchanges in the order given. Raises the first Wrong."""
        results: list[Exchange | Wrong | None] = [None] * len(bodies)

        def one(index: int) -> None:
            path, body = bodies[index]
            try:
                results[index] = self.post(path, body, headers=headers)
            except Wrong as wrong:
                results[index] = wrong

        threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        exchanges: list[Exchange] = []
        for result in results:
            if isinstance(result, Wrong):
                raise result
            assert result is not None, "every thread left a result"
            exchanges.append(result)
        return exchanges

    def _headers(self, data: bytes | None, given: Mapping[str, str], key: bool) -> dict[str, str]:
        names = {name.lower() for name in given}
        headers = dict(given)
        if data is not None and "content-type" not in names:
            headers["Content-Type"] = "application/json"
        if key and self.target.api_key and "authorization" not in names:
            headers["Authorization"] = f"Bearer {self.target.api_key}"
        return {name: value for name, value in headers.items() if value}


SHORT: Mapping[str, Any] = {"max_tokens": 8, "temperature": 0}


class OpenReply:
    """A reply that is being read."""

    def __init__(self, session: Session, connection: Connection, blank: Exchange) -> None:
        self._session = session
        self._blank = blank
        self.connection = connection
        self._reply: Reply | None = None
        self._parts: Iterator[bytes] | None = None
        self._whole = False

    def head(self) -> Reply:
        """Wait for status and headers."""
        if self._reply is None:
            self._reply = self.connection.head()
        return self._reply

    def read(self, *, events: int | None = None) -> Reply:
        """Read the body to its end, or until so many events have come."""
        reply = self.head()
        if self._parts is None:
            self._parts = self.connection.parts(reply, self._blank.method)
        while events is None or reply.body.count(b"\n\n") + reply.body.count(b"\r\n\r\n") < events:
            if next(self._parts, None) is None:
                self._whole = True
                break
        return reply

    def finish(self, *, record: bool = True) -> Exchange:
        """What was exchanged so far; cut when the body was not read to its end."""
        blank = self._blank
        exchange = Exchange(
            blank.method, blank.path, blank.sent, self.head(), blank.fields, not self._whole, blank.headers
        )
        return self._session.keep(exchange, record=record)


def encode(body: Mapping[str, Any]) -> bytes:
    """A JSON object as sent: UTF-8, and lone surrogates as escapes."""
    try:
        return json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(body).encode("ascii")


def _without(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not ...}

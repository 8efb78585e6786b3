"""HTTP/1.1 on one connection: uvicorn's protocol, with bounds on a request's head, on a client that does not read, and
on requests sent ahead; errors in the one error body."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from frontend.errors import ApiError
from frontend.settings import FrontendSettings

HEAD_SECONDS = 30.0
"""For the whole head of a request, once its first byte is there."""
UNREAD_SECONDS = 600.0
"""A client that takes nothing of what waits for it loses its connection after so long."""
_LINE_EXTRA = 4
"""Bytes around a header's name and value: colon, space, line end."""


class HeadTooLarge(Exception):
    """The request line and headers are more than a request may have."""


def protocol_for(settings: FrontendSettings) -> type[HttpToolsProtocol]:
    """The protocol class of a server; uvicorn makes its instances, so what it should know is in the class."""

    class Protocol(BoundedProtocol):
        max_head = settings.max_header_bytes
        idle_seconds = settings.keep_alive
        frontend_name = settings.name

    return Protocol


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    max_head: int
    """Bytes of request line and headers."""
    idle_seconds: float
    """A connection without a request is closed after so long."""
    frontend_name: str
    unread_seconds = UNREAD_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._application = self.app
        self.app = self._call_application
        self.timeout_keep_alive = self.idle_seconds  # type: ignore[assignment]
        self._in_head = False
        self._head_bytes = 0
        """Of complete headers and the request line so far."""
        self._unfinished_bytes = 0
        """Of whole reads that ended inside a head, which the parser keeps until a header is complete."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        """The request that is being answered, or was last; ``cycle`` is the newest, which may wait behind it."""
        self._broken = False
        """Nothing more is read: what came is no HTTP."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_no_head()
        self.resume_writing()
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:  # the base class tells the newest request alone
            running.disconnected = True
            running.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        within = self._in_head
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and within:
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > self.max_head:
                self._refuse(_too_large(self.max_head))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._unfinished_bytes = 0
        self._expect_head(HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Also trailers of a chunked body, which count on.
        self._count(len(name) + len(value) + _LINE_EXTRA)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._expect_no_head()
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for whatever the parser could not go on with."""
        if self._head_bytes > self.max_head:
            self._refuse(_too_large(self.max_head))
        else:
            self._refuse(ApiError(400, "This is not HTTP/1.1 as servers read it.", code="invalid_http"))

    async def _call_application(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = self.cycle
        if scope["http_version"] == "1.0" and cycle.scope is scope:
            send = _unframed(cycle)
        await self._application(scope, receive, send)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.max_head:
            raise HeadTooLarge  # ends the parser's run, which uvicorn answers with send_400_response

    def _expect_head(self, seconds: float) -> None:
        self._expect_no_head()
        self._head_timer = self.loop.call_later(seconds, self._head_overdue)

    def _expect_no_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_overdue(self) -> None:
        if self._in_head:
            self._refuse(ApiError(408, "The request's headers took too long.", headers={"x-should-retry": "false"}))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer and close; requests that were complete before what is refused get their answers first."""
        self._expect_no_head()
        self._broken = True
        running = self._running
        if running is None or running.response_complete:
            self._close_with(error)
        elif running.more_body:
            self._close_with(None if running.response_started else error)
        else:
            for waiting in [one for one in self.pipeline if one[0].more_body]:
                self.pipeline.remove(waiting)
            last = self.pipeline[0][0] if self.pipeline else running
            last.keep_alive = False  # the connection ends with its answer

    def _close_with(self, error: ApiError | None) -> None:
        if error is not None:
            body = error.body()
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                "x-request-id": f"req-{secrets.token_hex(12)}",
                "x-headrace-frontend": self.frontend_name,
                **error.headers,
            }
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            self.transport.write(STATUS_LINE[error.status] + lines.encode("latin-1", "replace") + b"\r\n" + body)
        self.transport.close()


def _unframed(cycle: RequestResponseCycle) -> Send:
    """Sends an answer of unknown length to a client of HTTP/1.0, which cannot read chunks: the body as it is, and the
    end of the connection is its end. uvicorn counts what is still due of a body without chunks, so each piece is due
    when it is sent."""
    streamed = False

    async def send(message: Message) -> None:
        nonlocal streamed
        if message["type"] == "http.response.start":
            streamed = not any(name.lower() == b"content-length" for name, _ in message["headers"])
            if streamed:
                cycle.chunked_encoding = False
        elif streamed:
            cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(message)  # type: ignore[arg-type]

    return send


def _too_large(limit: int) -> ApiError:
    return ApiError(431, f"The request line and headers are larger than {limit} bytes.", code="headers_too_large")

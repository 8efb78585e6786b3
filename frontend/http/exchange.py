"""One HTTP exchange below the routes: the body read once, the client's presence watched, answers sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from frontend import errors
from frontend.http.body_room import HeldBody

ResultT = TypeVar("ResultT")

BODY_SECONDS = 30.0
"""Between two pieces of a request's body."""

JSON_HEADERS = {"content-type": "application/json"}
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
_CLOSE = {"Connection": "close"}


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


class Exchange:
    """Scope, receive and send of one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.committed = False
        """The status is on the wire."""

    def header(self, name: bytes) -> str | None:
        """A request header; ``name`` in lower case."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value).decode("latin-1")
        return None

    async def json_body(self, limit: int, held: HeldBody) -> bytes:
        """The whole body, at most ``limit`` bytes of JSON. Raises ApiError 408, 413, 415 or 429, and ClientGone."""
        self._check_content_type()
        length = self.header(b"content-length")
        if length is not None and length.isdecimal() and int(length[:20]) > limit:
            raise _too_large(limit)
        body = bytearray()
        while True:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    message = await self._receive()
            except TimeoutError as error:
                raise errors.ApiError(408, "The request's body took too long.", headers=_CLOSE) from error
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            if len(body) + len(piece) > limit:
                raise _too_large(limit)
            held.add(len(piece))
            body += piece
            if not message.get("more_body", False):
                return bytes(body)

    async def while_connected(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run ``work`` while the client is there; when it leaves, cancel it and raise ClientGone.

        Call it after the body was read: it reads on to learn of the disconnect.
        """
        gone = asyncio.create_task(self._disconnected())
        working = asyncio.create_task(work)
        try:
            await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientGone
            return working.result()
        finally:
            for task in (working, gone):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, errors.ApiError):
                await working

    async def respond(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """Send a whole answer."""
        await self.start(status, {**headers, "content-length": str(len(body))})
        await self.send(body, more=False)

    async def start(self, status: int, headers: dict[str, str]) -> None:
        """Commit the status."""
        self.committed = True
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def send(self, body: bytes, *, more: bool = True) -> None:
        """Send a piece of the body; waits while the client reads slower than we write."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _check_content_type(self) -> None:
        given = self.header(b"content-type")
        kind = "" if given is None else given.partition(";")[0].strip().lower()
        if kind and kind != "application/json" and not kind.endswith("+json"):
            raise errors.ApiError(
                415, f"Unsupported content type '{kind[:64]}'; send JSON with -H 'Content-Type: application/json'."
            )


def _too_large(limit: int) -> errors.ApiError:
    return errors.ApiError(413, f"The body is larger than {limit} bytes.", headers=_CLOSE)

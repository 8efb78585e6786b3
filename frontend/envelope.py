"""What every response has, whatever made it: a request id, this frontend's name, a count, and JSON errors.

A plain ASGI wrapper outside the framework, so that it also covers what the framework answers by itself.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.service import Frontend

OTHER_ROUTE = "other"
_REQUEST_ID = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,254}[\x21-\x7e])?")


class Envelope:
    """Wraps the application. ``routes`` are the paths counted by name; all others count as one."""

    def __init__(self, app: ASGIApp, frontend: Frontend, routes: frozenset[str]) -> None:
        self._app = app
        self._frontend = frontend
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics = self._frontend.metrics
        route = self._route_of(scope)
        extra = [
            (b"x-request-id", _request_id(scope) or f"req-{self._frontend.new_id()}".encode()),
            (b"x-headrace-frontend", self._frontend.settings.name.encode("latin-1", "replace")),
        ]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                closing = [(b"connection", b"close")] if self._frontend.draining else []
                message = {**message, "headers": [*message["headers"], *extra, *closing]}
                metrics.http_requests.labels(route, str(message["status"])).inc()
            await send(message)

        with self._frontend.answering():
            await self._app(scope, receive, send_named)

    def _route_of(self, scope: Scope) -> str:
        path: str = scope["path"].removeprefix(self._frontend.settings.root_path)
        if path in self._routes:
            return path
        if f"/v1{path}" in self._routes:
            return f"/v1{path}"
        return "/v1/models/{id}" if path.startswith("/v1/models/") else OTHER_ROUTE


def _request_id(scope: Scope) -> bytes | None:
    """The client's id, when it is one: at most 256 printable characters."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return bytes(value) if _REQUEST_ID.fullmatch(value) else None
    return None

"""What every response has, whatever made it: a request id, this frontend's name, a count, and JSON errors.

A plain ASGI wrapper outside the framework, so that it also covers what the framework answers by itself.
"""

from __future__ import annotations

import re

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.errors import ApiError
from frontend.http.route_table import OTHER_ROUTE, route_of, route_path
from frontend.service import Frontend

_STATE = "request_id"
_REQUEST_ID = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,254}[\x21-\x7e])?")


def error_response(error: ApiError) -> Response:
    """An error as its client gets it."""
    return Response(error.body(), error.status, error.headers, media_type="application/json")


def request_id_of(scope: Scope) -> str:
    """The id that this request's response carries, unless its body brings another."""
    request_id: str = scope.get("state", {}).get(_STATE, "")
    return request_id


class Envelope:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, frontend: Frontend) -> None:
        self._app = app
        self._frontend = frontend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics = self._frontend.metrics
        route = self._route_of(scope)
        request_id = (b"x-request-id", _request_id(scope) or f"req-{self._frontend.new_id()}".encode())
        named = (b"x-headrace-frontend", self._frontend.settings.name.encode("latin-1", "replace"))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                closing = [(b"connection", b"close")] if self._frontend.draining else []
                given: list[tuple[bytes, bytes]] = message["headers"]
                identity = [] if any(name == b"x-request-id" for name, _ in given) else [request_id]
                message = {**message, "headers": [*given, *identity, named, *closing]}
                metrics.http_requests.labels(route, str(message["status"])).inc()
            await send(message)

        state = {**scope.get("state", {}), _STATE: request_id[1].decode("latin-1")}
        with self._frontend.answering():
            await self._app({**scope, "state": state}, receive, send_named)

    def _route_of(self, scope: Scope) -> str:
        """The name a request is counted under: a route's own path, or one name for all that is no route."""
        spec = route_of(route_path(scope, self._frontend.settings.root_path))
        return OTHER_ROUTE if spec is None else spec.path


def _request_id(scope: Scope) -> bytes | None:
    """The client's id, when it is one: at most 256 printable characters."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return bytes(value) if _REQUEST_ID.fullmatch(value) else None
    return None

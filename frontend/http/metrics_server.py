"""/metrics on a port of its own, without keys: whoever reaches the port may read it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.errors import ApiError
from frontend.http.envelope import error_response
from frontend.http.http_protocol import protocol_for
from frontend.service import Frontend


class MetricsServer(uvicorn.Server):
    """A second server in the frontend's event loop, which only knows /metrics."""

    def __init__(self, frontend: Frontend, listener: socket.socket) -> None:
        self._frontend = frontend
        self._listener = listener
        super().__init__(
            uvicorn.Config(
                self._answer,
                interface="asgi3",
                http=protocol_for(frontend.settings),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
            )
        )

    async def run_until_told(self) -> None:
        """Serve until ``should_exit`` is set."""
        await self.serve(sockets=[self._listener])

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the frontend's."""
        yield

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/metrics":
            response = error_response(ApiError(404, "There is only /metrics on this port.", code="route_not_found"))
        elif scope["method"] not in ("GET", "HEAD"):
            response = error_response(ApiError(405, "/metrics takes GET, HEAD.", headers={"Allow": "GET, HEAD"}))
        else:
            response = Response(self._frontend.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
        await response(scope, receive, send)

"""Cross-origin requests: starlette's middleware, with errors in the one error body."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from frontend.errors import ApiError
from frontend.http.envelope import error_response

METHODS = ("GET", "HEAD", "POST", "OPTIONS")
EXPOSED = ("x-request-id", "x-headrace-frontend", "x-ignored-fields", "x-clamped", "x-should-retry", "retry-after")
"""Response headers that a page's script may read."""
MAX_AGE_SECONDS = 600


class Cors(CORSMiddleware):
    """Pages of ``origins`` may call the API; ``*`` stands for every origin. Keys travel in headers, so no cookies."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=list(origins),
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=EXPOSED,
            max_age=MAX_AGE_SECONDS,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        if response.status_code < 400:
            return Response(status_code=204, headers=kept)
        return error_response(
            ApiError(403, "This origin, method or header is not allowed; see --cors-origin.", headers=kept)
        )

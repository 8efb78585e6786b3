"""The routes, and how whatever goes wrong on any of them becomes the one error body."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from frontend import page
from frontend.errors import ApiError
from frontend.generate import Generation, Route
from frontend.requests import ChatRequest, CompletionRequest
from frontend.service import Frontend
from frontend.shapes import ChatAnswer, CompletionAnswer

log = logging.getLogger("headrace.frontend")

CHAT = Route(ChatRequest, ChatAnswer, "chatcmpl")
COMPLETIONS = Route(CompletionRequest, CompletionAnswer, "cmpl")

Handler = Callable[..., Awaitable[Response]]

NOT_OFFERED = (
    "/v1/tokenize",
    "/v1/detokenize",
    "/tokenize",
    "/detokenize",
    "/v1/chat/completions/render",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/files",
    "/v1/batches",
    "/version",
    "/load",
    "/openapi.json",
    "/docs",
)
"""Known to clients and not built yet; also what lies below them."""


COUNTED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/livez",
    "/readyz",
    "/health",
    "/metrics",
    "/",
)
"""Paths that metrics count by name."""


class ModelCard(msgspec.Struct):
    """One entry of /v1/models."""

    id: str
    created: int
    max_model_len: int
    status: str
    capabilities: dict[str, bool]
    root: str
    object: str = "model"
    owned_by: str = "headrace"


def add_routes(app: FastAPI, frontend: Frontend) -> None:
    """Register every route and every error handler."""

    async def chat() -> Response:
        return Generation(frontend, CHAT)

    async def completions() -> Response:
        return Generation(frontend, COMPLETIONS)

    async def models() -> Response:
        return _json({"object": "list", "data": [_card(frontend, name) for name in frontend.names]})

    async def model(model_id: str) -> Response:
        frontend.check_model(model_id)
        return _json(_card(frontend, model_id))

    async def live() -> Response:
        return _json({"status": "alive"})

    async def ready() -> Response:
        reason = frontend.not_ready_because()
        if reason:
            raise ApiError(503, f"Not ready: {reason}.", kind="server_error", code="unavailable")
        return _json({"status": "ready", "model": frontend.name, "model_status": frontend.client.status})

    async def metrics() -> Response:
        return Response(frontend.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def root(request: Request) -> Response:
        base = str(request.base_url).rstrip("/")
        return HTMLResponse(page.render(frontend.name, base, frontend.settings.root_path, frontend.client.status))

    for path in ("/v1/chat/completions", "/chat/completions"):
        app.add_api_route(path, chat, methods=["POST"])
    for path in ("/v1/completions", "/completions"):
        app.add_api_route(path, completions, methods=["POST"])
    for path, handler in (("/v1/models", models), ("/models", models), ("/metrics", metrics), ("/", root)):
        app.add_api_route(path, handler, methods=["GET"])
    for path in ("/v1/models/{model_id:path}", "/models/{model_id:path}"):
        app.add_api_route(path, model, methods=["GET"])
    for path, handler in (("/livez", live), ("/readyz", ready), ("/health", ready)):
        app.add_api_route(path, handler, methods=["GET", "HEAD"])
    _add_error_handlers(app, frontend)


def _add_error_handlers(app: FastAPI, frontend: Frontend) -> None:
    def answer(error: ApiError) -> Response:
        frontend.metrics.errors.labels(error.code or "none").inc()
        return Response(error.body(), error.status, error.headers, media_type="application/json")

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return answer(error)

    async def of_framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return answer(_translated(request, error))

    async def unexpected(request: Request, error: Exception) -> Response:
        # The framework raises it again after this answer, so that the server logs the traceback.
        return answer(ApiError(500, "The server made a mistake; it is logged.", kind="server_error", code="internal"))

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(HTTPException, of_framework)
    app.add_exception_handler(Exception, unexpected)


def _translated(request: Request, error: HTTPException) -> ApiError:
    """The framework's own 404, 405 and the like."""
    path: str = request.scope["path"]
    if error.status_code == 404:
        known = any(path == offered or path.startswith(f"{offered}/") for offered in NOT_OFFERED)
        if known:
            return ApiError(404, f"{path} is not offered here yet.", code="route_not_offered")
        return ApiError(404, f"There is no route {request.method} {path[:256]}.", code="route_not_found")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{path} does not take {request.method}; it takes {allowed}."
        return ApiError(405, message, headers={"Allow": allowed})
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return ApiError(error.status_code, str(error.detail), kind=kind, headers=dict(error.headers or {}))


def _card(frontend: Frontend, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=frontend.created,
        max_model_len=frontend.preparer.context(frontend.client.model),
        status=frontend.client.status,
        capabilities={"tools": False, "reasoning": False, "json": False},
        root=frontend.name,
    )


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")

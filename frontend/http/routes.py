"""What each route does, and how whatever goes wrong on any of them becomes the one error body."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from frontend.answer.answers import ChatAnswer, CompletionAnswer
from frontend.answer.generate import Generation, Route
from frontend.errors import ApiError
from frontend.http import debug_routes, docs_page, openapi, page, probes, token_routes
from frontend.http.envelope import error_response
from frontend.http.route_table import ROUTES, Access, RouteSpec, is_offered_elsewhere, route_of, route_path
from frontend.request.requests import ChatRequest, CompletionRequest
from frontend.service import Frontend

CHAT = Route(ChatRequest, ChatAnswer, "chatcmpl")
COMPLETIONS = Route(CompletionRequest, CompletionAnswer, "cmpl")

Handler = Callable[..., Awaitable[Response]]


def add_routes(app: FastAPI, frontend: Frontend, *, for_admins: bool = False) -> None:
    """Register every route of the table and every error handler; those for admins where there are some."""
    handlers = {**_generation(frontend), **_about(frontend), **_documents(frontend)}
    for spec in ROUTES:
        if spec.access is Access.DOCS and frontend.settings.docs == "off":
            continue
        if spec.access is Access.ADMIN and not for_admins:
            continue
        for path in spec.paths:
            pattern = path.replace("}", ":path}")
            app.add_api_route(pattern, handlers[spec.path], methods=list(spec.methods))
            app.add_api_route(pattern, _options(spec), methods=["OPTIONS"])
    _add_error_handlers(app, frontend)


def _generation(frontend: Frontend) -> dict[str, Handler]:
    """The routes that work on a prompt."""

    async def chat() -> Response:
        return Generation(frontend, CHAT)

    async def completions() -> Response:
        return Generation(frontend, COMPLETIONS)

    async def render() -> Response:
        return token_routes.TokenWork(frontend, token_routes.render)

    async def tokenize() -> Response:
        return token_routes.TokenWork(frontend, token_routes.tokenize)

    async def detokenize() -> Response:
        return token_routes.TokenWork(frontend, token_routes.detokenize)

    return {
        "/v1/chat/completions": chat,
        "/v1/chat/completions/render": render,
        "/v1/completions": completions,
        "/v1/tokenize": tokenize,
        "/v1/detokenize": detokenize,
    }


def _about(frontend: Frontend) -> dict[str, Handler]:
    """The routes that tell about the server."""

    async def models() -> Response:
        return _json(probes.ModelList([probes.model_card(frontend, name) for name in frontend.names]))

    async def model(model_id: str) -> Response:
        frontend.check_model(model_id)
        return _json(probes.model_card(frontend, model_id))

    async def live() -> Response:
        return _json(probes.Alive())

    async def ready() -> Response:
        reason = frontend.not_ready_because()
        if reason:
            raise ApiError(503, f"Not ready: {reason}.", kind="server_error", code="unavailable")
        return _json(probes.Ready(frontend.name, frontend.client.status))

    async def metrics() -> Response:
        return Response(frontend.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def request(id: str) -> Response:
        return _json(await debug_routes.report(frontend, id))

    async def version() -> Response:
        return _json(probes.VersionInfo(probes.version()))

    async def load() -> Response:
        return _json(probes.load_report(frontend))

    return {
        "/v1/models": models,
        "/v1/models/{model_id}": model,
        "/livez": live,
        "/readyz": ready,
        "/metrics": metrics,
        "/debug/requests/{id}": request,
        "/version": version,
        "/load": load,
    }


def _documents(frontend: Frontend) -> dict[str, Handler]:
    """The routes that explain the others."""
    root_path = frontend.settings.root_path

    @functools.cache
    def described() -> dict[str, Any]:
        return openapi.document(probes.version(), root_path)

    async def root(request: Request) -> Response:
        base = str(request.base_url).rstrip("/")
        return HTMLResponse(page.render(frontend.name, base, root_path, frontend.client.status))

    async def description() -> Response:
        return _json(described())

    async def docs() -> Response:
        return HTMLResponse(docs_page.render(described(), root_path))

    return {"/": root, "/openapi.json": description, "/docs": docs}


def _options(spec: RouteSpec) -> Handler:
    async def options() -> Response:
        return Response(status_code=204, headers={"Allow": _allow(spec)})

    return options


def _allow(spec: RouteSpec) -> str:
    return ", ".join((*spec.methods, "OPTIONS"))


def _add_error_handlers(app: FastAPI, frontend: Frontend) -> None:
    def answer(error: ApiError) -> Response:
        frontend.metrics.errors.labels(error.code or "none").inc()
        return error_response(error)

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return answer(error)

    async def of_framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return answer(_translated(request, error, frontend.settings.root_path))

    async def unexpected(request: Request, error: Exception) -> Response:
        # The framework raises it again after this answer, so that the server logs the traceback.
        return answer(ApiError(500, "The server made a mistake; it is logged.", kind="server_error", code="internal"))

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(HTTPException, of_framework)
    app.add_exception_handler(Exception, unexpected)


def _translated(request: Request, error: HTTPException, root_path: str) -> ApiError:
    """The framework's own 404, 405 and the like."""
    path = route_path(request.scope, root_path)
    spec = route_of(path)
    if error.status_code == 405 and spec is not None:
        allowed = _allow(spec)
        return ApiError(
            405, f"{path[:256]} does not take {request.method}; it takes {allowed}.", headers={"Allow": allowed}
        )
    if error.status_code == 404:
        if is_offered_elsewhere(path):
            return ApiError(404, f"{path[:256]} is not offered here yet.", code="route_not_offered")
        return ApiError(404, f"There is no route {request.method} {path[:256]}.", code="route_not_found")
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return ApiError(error.status_code, str(error.detail), kind=kind, headers=dict(error.headers or {}))


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")

"""The ASGI application of a frontend."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.types import ASGIApp

from frontend.http.cors import Cors
from frontend.http.envelope import Envelope
from frontend.http.guard import Guard
from frontend.http.keys import KeyRing
from frontend.http.routes import add_routes
from frontend.service import Frontend


def create_app(frontend: Frontend, ring: KeyRing | None = None) -> ASGIApp:
    """The application; its lifespan holds the session with the scheduler. ``ring`` None: no key is asked for."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with frontend.running():
            yield

    settings = frontend.settings
    routes = FastAPI(
        title="headrace",
        lifespan=lifespan,
        # Bodies are declared as msgspec structs, which the framework's own schema does not see.
        openapi_url=None,
        redirect_slashes=False,
        root_path=settings.root_path,
    )
    add_routes(routes, frontend, for_admins=ring is not None and ring.has_admin)
    app: ASGIApp = Guard(
        routes,
        ring,
        root_path=settings.root_path,
        metrics_public=settings.metrics_public,
        docs_public=settings.docs == "public",
        on_error=lambda error: frontend.metrics.errors.labels(error.code or "none").inc(),
    )
    if settings.cors_origins:
        app = Cors(app, settings.cors_origins)
    return Envelope(app, frontend)

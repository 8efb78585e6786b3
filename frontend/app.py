"""The ASGI application of a frontend."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.types import ASGIApp

from frontend.envelope import Envelope
from frontend.routes import COUNTED, add_routes
from frontend.service import Frontend


def create_app(frontend: Frontend) -> ASGIApp:
    """The application; its lifespan holds the session with the scheduler."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with frontend.running():
            yield

    app = FastAPI(
        title="headrace",
        lifespan=lifespan,
        # Bodies are declared as msgspec structs, which the framework's own schema does not see.
        openapi_url=None,
        redirect_slashes=False,
        root_path=frontend.settings.root_path,
    )
    add_routes(app, frontend)
    return Envelope(app, frontend, frozenset(COUNTED))

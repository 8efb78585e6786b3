"""A frontend between a fake scheduler and a client: in process, or behind a real HTTP server on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from frontend.errors import unavailable
from frontend.http.app import create_app
from frontend.http.server import FrontendServer
from frontend.service import Frontend
from frontend.settings import FrontendSettings
from headrace.model_files.artefacts import Artefacts
from tests.frontend.fake_scheduler import FakeScheduler, described

MODEL = "llama-8b"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SECONDS = 20.0


def chat(content: str = "hi", **fields: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def completion(prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    """A completion request."""
    return {"model": MODEL, "prompt": prompt, **fields}


class Bench:
    """A running frontend and what stands on either side of it."""

    def __init__(self, frontend: Frontend, scheduler: FakeScheduler, client: httpx.AsyncClient) -> None:
        self.frontend = frontend
        self.scheduler = scheduler
        self.client = client
        self.server: FrontendServer | None = None
        self.port = 0
        self.listener: socket.socket | None = None

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The parsed data of a stream, ``[DONE]`` included."""
        response = await self.client.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        return parse_events(response.content)

    async def until(self, condition: Any, what: str) -> None:
        """Wait, off the event loop, for a condition on the fake scheduler."""
        await asyncio.to_thread(self.scheduler.wait_for, condition, what)

    async def until_here(self, condition: Any, what: str) -> None:
        """Let the event loop turn until a condition on the frontend holds."""
        async with asyncio.timeout(SECONDS):
            while not condition():
                await asyncio.sleep(0.001)


def parse_events(raw: bytes) -> list[Any]:
    """The data of each event, in order; fails on anything that is no event of the contract."""
    assert raw.endswith(b"\n\n")
    found: list[Any] = []
    for block in raw[:-2].split(b"\n\n"):
        assert block.startswith(b"data: ") and b"\n" not in block and b"\r" not in block, block
        data = block[6:]
        found.append("[DONE]" if data == b"[DONE]" else msgspec.json.decode(data))
    return found


def settings_for(directory: Path, **changes: Any) -> FrontendSettings:
    directory.chmod(0o700)
    fields = {
        "model": "byte",
        "tokenizer": "byte",
        "scheduler": f"ipc://{directory}/s",
        "served_model_names": (MODEL, "alias"),
        "name": "frontend-7",
        "scheduler_grace": SECONDS,
        **changes,
    }
    return FrontendSettings(**fields)


@contextlib.asynccontextmanager
async def bench(
    directory: Path, artefacts: Artefacts, *, registered: bool = True, in_session: bool = True, **changes: Any
) -> AsyncIterator[Bench]:
    """A frontend in this process, called without sockets."""
    settings = settings_for(directory, **changes)
    model = described(MODEL, artefacts.tokenizer_digest())
    scheduler = FakeScheduler(settings.scheduler, model, registered=registered)
    if not in_session:
        scheduler.mute()
    try:
        frontend = Frontend(settings, artefacts)
        transport = httpx.ASGITransport(create_app(frontend), raise_app_exceptions=False)
        async with frontend.running(), httpx.AsyncClient(transport=transport, base_url="http://bench") as client:
            made = Bench(frontend, scheduler, client)
            if in_session:
                await made.until_here(lambda: not frontend.client.not_ready_because(), "in session")
            yield made
    finally:
        scheduler.close()


@contextlib.asynccontextmanager
async def live_bench(directory: Path, artefacts: Artefacts, **changes: Any) -> AsyncIterator[Bench]:
    """The same behind a real server."""
    settings = settings_for(directory, **changes)
    scheduler = FakeScheduler(settings.scheduler, described(MODEL, artefacts.tokenizer_digest()))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    frontend = Frontend(settings, artefacts)
    server = FrontendServer(create_app(frontend), frontend)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as client:
            made = Bench(frontend, scheduler, client)
            made.server, made.port, made.listener = server, port, listener
            await made.until_here(lambda: server.started and frontend.client.status == "ready", "ready")
            yield made
    finally:
        frontend.client.fail_all(unavailable("the test is over"))
        server.should_exit = True
        await serving
        scheduler.close()

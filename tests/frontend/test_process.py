"""A frontend as a process of its own: what it imports, how it drains, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest

from frontend.settings import FrontendSettings
from headrace.lease import LeaseEvent, LeaseEventKind, LeaseServer
from headrace.model_files.artefacts import Artefacts
from tests.frontend.fake_scheduler import FakeScheduler, Script, described
from tests.frontend.harness import CHAT, MODEL, SECONDS, chat, parse_events, settings_for

pytestmark = pytest.mark.slow

MAIN = """
import os, sys
from pathlib import Path
import msgspec
from frontend.main import run
from frontend.settings import FrontendSettings
settings = msgspec.json.decode(os.environ["SETTINGS"], type=FrontendSettings)
code = run(settings)
print("imported:", *sorted({"torch", "transformers", "ray"} & set(sys.modules)))
sys.exit(code)
"""


@dataclass
class Process:
    """A running frontend with its scheduler."""

    process: asyncio.subprocess.Process
    scheduler: FakeScheduler
    client: httpx.AsyncClient

    async def ended(self) -> tuple[int, str]:
        async with asyncio.timeout(SECONDS):
            out, _ = await self.process.communicate()
            return self.process.returncode or 0, out.decode()

    async def until(self, condition: object, what: str) -> None:
        await asyncio.to_thread(self.scheduler.wait_for, condition, what)  # type: ignore[arg-type]


async def start(settings: FrontendSettings, *fds: int) -> asyncio.subprocess.Process:
    environment = {**os.environ, "SETTINGS": msgspec.json.encode(settings).decode()}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", MAIN, env=environment, pass_fds=fds,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def running(directory: Path, artefacts: Artefacts, **changes: object) -> AsyncIterator[Process]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = settings_for(directory, fd=listener.fileno(), **changes)
        scheduler = FakeScheduler(settings.scheduler, described(MODEL, artefacts.tokenizer_digest()))
        process = await start(settings, listener.fileno())
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=base, timeout=SECONDS) as client:
                made = Process(process, scheduler, client)
                await made.until(lambda: scheduler.sessions == 1, "in session")
                yield made
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            scheduler.close()


@pytest.fixture(autouse=True)
def one_cache(monkeypatch: pytest.MonkeyPatch, artefacts: Artefacts) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(artefacts.directory.parent.parent))


async def test_a_drain_lets_streams_finish_takes_nothing_new_and_exits_zero(tmp_path, artefacts) -> None:
    async with running(tmp_path, artefacts) as made:
        made.scheduler.script = lambda submit: Script.text("abcdef", gate=3)
        streams = [asyncio.create_task(made.client.post(CHAT, json=chat(stream=stream))) for stream in (True, False)]
        await made.until(lambda: len(made.scheduler.jobs) == 2, "two under way")
        made.process.send_signal(signal.SIGTERM)
        while (ready := await made.client.get("/readyz")).status_code == 200:
            pass
        assert ready.status_code == 503 and ready.headers["connection"] == "close"
        assert (await made.client.get("/livez")).status_code == 200
        refused = await made.client.post(CHAT, json=chat())
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "unavailable"
        made.scheduler.open_gates()
        streamed, whole = [await task for task in streams]
        events = parse_events(streamed.content)
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "stop"
        assert whole.json()["choices"][0]["message"]["content"] == "abcdef"
        code, output = await made.ended()
        assert code == 0 and "imported:\n" in output, output


async def test_past_the_drain_limit_a_stream_ends_with_an_error_event(tmp_path, artefacts) -> None:
    async with running(tmp_path, artefacts, drain_timeout=0.1) as made:
        made.scheduler.script = lambda submit: Script.text("abcdef", gate=3)
        streams = [asyncio.create_task(made.client.post(CHAT, json=chat(stream=stream))) for stream in (True, False)]
        await made.until(lambda: [job.position for job in made.scheduler.jobs.values()] == [3, 3], "at the gate")
        made.process.send_signal(signal.SIGTERM)
        streamed, whole = [await task for task in streams]
        events = parse_events(streamed.content)
        assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "unavailable"
        assert whole.status_code == 503 and whole.json() == {"error": events[-2]["error"]}
        assert (await made.ended())[0] == 0


async def test_a_second_signal_ends_at_once(tmp_path, artefacts) -> None:
    async with running(tmp_path, artefacts, drain_timeout=600.0) as made:
        made.scheduler.script = lambda submit: Script.text("abcdef", gate=3)
        stream = asyncio.create_task(made.client.post(CHAT, json=chat(stream=True)))
        await made.until(lambda: len(made.scheduler.jobs) == 1, "under way")
        made.process.send_signal(signal.SIGTERM)
        while (await made.client.get("/readyz")).status_code == 200:
            pass
        made.process.send_signal(signal.SIGTERM)
        assert (await made.ended())[0] == 0
        await asyncio.gather(stream, return_exceptions=True)


async def test_a_lease_tells_of_readiness_and_its_loss_drains(tmp_path, artefacts) -> None:
    told: asyncio.Queue[LeaseEvent] = asyncio.Queue()
    server = LeaseServer(told.put_nowait)
    await server.start(tmp_path / "lease")

    async def next_state() -> str:
        async with asyncio.timeout(SECONDS):
            while (event := await told.get()).kind is not LeaseEventKind.STATE:
                assert (event.role, event.name) == ("frontend", "frontend-7")
            return str(event.details["state"])

    async with running(tmp_path, artefacts, lease=str(tmp_path / "lease")) as made:
        assert [await next_state(), await next_state()] == ["starting", "ready"]
        made.scheduler.script = lambda submit: Script.text("abcdef", gate=3)
        whole = asyncio.create_task(made.client.post(CHAT, json=chat()))
        await made.until(lambda: len(made.scheduler.jobs) == 1, "under way")
        await server.close()
        while (await made.client.get("/readyz")).status_code == 200:
            pass
        made.scheduler.open_gates()
        assert (await whole).json()["choices"][0]["message"]["content"] == "abcdef"
        assert (await made.ended())[0] == 0


async def test_a_frontend_that_no_scheduler_will_take_ends_with_an_error(tmp_path, artefacts) -> None:
    settings = settings_for(tmp_path, port=0)
    scheduler = FakeScheduler(settings.scheduler, described(MODEL, artefacts.tokenizer_digest()))
    scheduler.refusal = "protocol versions 9..9 are not spoken here"
    try:
        process = await start(settings)
        async with asyncio.timeout(SECONDS):
            output, _ = await process.communicate()
    finally:
        scheduler.close()
    assert process.returncode == 1 and "protocol versions 9..9" in output.decode()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer": "model", "model": "/no/such/model.gguf"}, "no such file"),
        ({"scheduler": "tcp://192.0.2.1:5570"}, "--insecure-sockets"),
        ({"chat_template": "{% if %}"}, "template"),
        ({"host": "127.0.0.1", "port": "busy"}, "cannot listen on 127.0.0.1"),
    ],
)
async def test_what_makes_serving_impossible_is_said_in_one_line(tmp_path, artefacts, changes, said) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if changes.get("port") == "busy":
            changes = {**changes, "port": taken.getsockname()[1]}
        process = await start(settings_for(tmp_path, **{"port": 0, **changes}))
        output, _ = await process.communicate()
    assert process.returncode == 1
    line, *rest = output.decode().splitlines()
    assert line.startswith("headrace frontend: ") and said in line and rest == ["imported:"]


def test_importing_the_frontend_loads_no_heavy_library() -> None:
    code = "import sys, frontend.main; print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

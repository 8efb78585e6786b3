"""One connection over its life: idle and used again, requests sent ahead, bodies that break off, and clients that wait.

Timers are read, not waited for, wherever that can be.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from frontend.http import exchange as exchanges
from frontend.http.http_protocol import BoundedProtocol
from frontend.settings import FrontendSettings
from headrace.model_files.artefacts import Artefacts
from tests.frontend.fake_scheduler import Script
from tests.frontend.harness import CHAT, COMPLETIONS, MODEL, SECONDS, Bench, chat, completion, live_bench
from tests.frontend.test_http_protocol import error_of, exchange

JUNK = [b"BAD\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n"]
ENDLESS = Script([*b"x" * 900], steps=(3,), gate=3)


def request(path: str, body: dict[str, Any], *, headers: str = "") -> bytes:
    data = msgspec.json.encode(body)
    return head(path, f"Content-Length: {len(data)}\r\n{headers}") + data


def head(path: str, more: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}\r\n".encode()


def connections(bench: Bench) -> list[BoundedProtocol]:
    assert bench.server is not None
    return [one for one in bench.server.server_state.connections if isinstance(one, BoundedProtocol)]


async def answer(reader: asyncio.StreamReader, end: bytes = b"}") -> bytes:
    """One whole answer on a connection that stays open."""
    async with asyncio.timeout(SECONDS):
        top = await reader.readuntil(b"\r\n\r\n")
        if b"chunked" in top:
            return top + await reader.readuntil(b"0\r\n\r\n")
        length = int(top.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return top + await reader.readexactly(length)


# Idle connections


def test_idle_connections_outlive_those_of_proxies() -> None:
    assert FrontendSettings(model="m", scheduler="ipc://x").keep_alive >= 75


async def test_a_connection_waits_anew_after_each_answer_and_not_during_one(live: Bench) -> None:
    """Sixty seconds is the common idle timeout of proxies; what is waited for is longer, after every kind of answer."""
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    kinds = (
        request(CHAT, chat()),
        request(CHAT, chat(stream=True)),
        request(CHAT, {"model": "nobody"}),
        b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n",
    )
    for sent in kinds * 4:
        began = loop.time()
        writer.write(sent)
        await answer(reader)
        [connection] = connections(live)
        timer = connection.timeout_keep_alive_task
        assert timer is not None and not timer.cancelled() and timer.when() >= began + 75
    live.scheduler.script = lambda submit: ENDLESS
    writer.write(request(CHAT, chat(stream=True)))
    await reader.readuntil(b'"xxx"')
    [connection] = connections(live)
    assert connection.timeout_keep_alive_task is None
    writer.close()
    await live.until_here(lambda: live.frontend.under_way == 0, "nothing under way")


async def test_a_stream_may_last_longer_than_an_idle_connection(tmp_path: Path, artefacts: Artefacts) -> None:
    async with live_bench(tmp_path, artefacts, keep_alive=0.05, early_commit=0.0, ping_interval=0.03) as live:
        live.scheduler.script = lambda submit: Script.text("late", gate=0)
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(request(CHAT, chat(stream=True)) * 2)
        for _ in range(5):
            await reader.readuntil(b": ping\n\n")
        live.scheduler.open_gates()
        for _ in range(2):
            assert b'"finish_reason":"stop"' in await reader.readuntil(b"0\r\n\r\n")
        assert await reader.read() == b""  # idle now, and so it ends
        writer.close()


async def test_many_connections_are_used_again_and_again(live: Bench) -> None:
    async def use(at: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        for turn in range(5):
            body = completion(stream=True) if (at + turn) % 2 else completion()
            writer.write(request(COMPLETIONS, body))
            assert b'"text":"o' in await answer(reader)
        writer.close()

    await asyncio.gather(*(use(at) for at in range(60)))


async def test_a_draining_server_says_that_the_connection_ends(live: Bench) -> None:
    live.scheduler.script = lambda submit: Script.text("abc", gate=1)
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(request(CHAT, chat()))
    await live.until(lambda: len(live.scheduler.jobs) == 1, "under way")
    live.frontend.draining = True
    live.scheduler.open_gates()
    raw = await reader.read()
    assert raw.startswith(b"HTTP/1.1 200") and b"connection: close" in raw and b'"abc"' in raw
    writer.close()


# Requests sent ahead


@pytest.mark.parametrize(
    "junk", [b"BAD\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_complete_before_junk_is_answered_first(live: Bench, junk: bytes, stream: bool) -> None:
    live.scheduler.script = lambda submit: Script.text("abcdef", gate=2)
    data = request(CHAT, chat(stream=stream)) * 2 + junk
    asking = asyncio.create_task(exchange(live, data, b"and more", b"and more"))
    await live.until(lambda: len(live.scheduler.jobs) == 1, "the first one under way")
    live.scheduler.open_gates()
    raw = await asking
    assert raw.count(b"HTTP/1.1 200") == 2
    assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if stream else raw.count(b'"abcdef"') == 2
    assert (await live.client.get("/livez")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_sent_ahead_and_leaves_aborts_what_runs(
    tmp_path: Path, artefacts: Artefacts, stream: bool
) -> None:
    async with live_bench(tmp_path, artefacts, early_commit=0.0, ping_interval=0.01) as live:
        live.scheduler.script = lambda submit: ENDLESS
        _, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(request(CHAT, chat(stream=True)) + request(CHAT, chat(stream=stream)))
        await live.until(lambda: len(live.scheduler.jobs) == 1, "under way")
        writer.transport.abort()
        await live.until(lambda: not live.scheduler.jobs, "aborted")
        await live.until_here(lambda: live.frontend.under_way == 0, "nothing under way")
        assert len(live.scheduler.submits) == 1


# Bodies


@pytest.mark.parametrize(
    ("more", "body"),
    [
        ("Transfer-Encoding: chunked\r\n", b"zz\r\n"),
        ("Transfer-Encoding: chunked\r\n", b"ffffffffffffffffff\r\n"),
        ("Transfer-Encoding: chunked\r\n", b"3\r\nabcdef"),
        ("Transfer-Encoding: identity\r\n", b"{}"),
    ],
)
async def test_a_body_that_is_no_http_gets_the_one_error_body(live: Bench, more: str, body: bytes) -> None:
    assert error_of(await exchange(live, head(CHAT, more) + body), 400)["code"] == "invalid_http"
    await live.until_here(lambda: live.frontend.under_way == 0, "nothing under way")


@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize"])
async def test_a_body_that_breaks_off_is_not_waited_for(
    live: Bench, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges, "BODY_SECONDS", 0.02)
    for more, part in (("Content-Length: 500\r\n", b'{"mod'), ("Transfer-Encoding: chunked\r\n", b"fff\r\n{")):
        raw = await exchange(live, head(path, more) + part)
        assert "too long" in str(error_of(raw, 408)["message"])
    assert live.frontend.bodies.used == 0


async def test_bodies_share_a_room_and_give_it_back(tmp_path: Path, artefacts: Artefacts) -> None:
    async with live_bench(tmp_path, artefacts, max_bodies_bytes=100_000) as live:
        large = chat("x" * 70_000)
        waiting = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
            writer.write(request(CHAT, large)[:45_000])
            waiting.append((reader, writer))
        await live.until_here(lambda: live.frontend.bodies.used > 80_000, "two halves of bodies read")
        for path in (CHAT, "/v1/tokenize"):
            response = await live.post(path, large)
            assert response.status_code == 429 and response.json()["error"]["code"] == "overloaded"
            assert int(response.headers["retry-after"]) > 0
        assert (await live.post(CHAT, chat())).status_code == 200
        for _, writer in waiting:
            writer.close()
        await live.until_here(lambda: live.frontend.bodies.used == 0, "their room given back")
        assert (await live.post("/v1/tokenize", large)).json()["count"] > 70_000
        live.scheduler.script = lambda submit: ENDLESS
        asking = asyncio.create_task(live.post(CHAT, chat()))
        await live.until(lambda: len(live.scheduler.jobs) == 1, "under way")
        assert live.frontend.bodies.used == 0
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_under_way_holds_nothing_of_its_requests_body(here: Bench, path: str) -> None:
    here.scheduler.script = lambda submit: Script.text("abc", gate=1)
    body = chat() if path == CHAT else completion()
    data = msgspec.json.encode(body)[:-1] + b',"metadata":{"a":[' + b"[]," * 90_000 + b"0]}}"
    gc.collect()
    before = len(gc.get_objects())
    asking = asyncio.create_task(here.client.post(path, content=data, headers={"content-type": "application/json"}))
    await here.until(lambda: [job.position for job in here.scheduler.jobs.values()] == [1], "under way")
    gc.collect()
    assert len(gc.get_objects()) - before < 30_000
    here.scheduler.open_gates()
    assert (await asking).status_code == 200


# Clients that do not read


async def test_a_client_that_never_reads_loses_its_connection(live: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "unread_seconds", 0.05)
    live.scheduler.script = lambda submit: Script([*b"y" * 900])
    _, writer = await asyncio.open_connection("127.0.0.1", live.port, limit=1024)
    body = completion(["x"] * 100, n=2, max_tokens=900, logprobs=20, stream=True)
    writer.write(request(COMPLETIONS, {**body, "model": MODEL}))
    await live.until_here(lambda: live.frontend.under_way == 1, "under way")
    await live.until_here(lambda: live.frontend.under_way == 0, "given up")
    await live.until(lambda: not live.scheduler.jobs, "aborted")
    writer.transport.abort()
    assert isinstance(await live.client.get("/livez"), httpx.Response)

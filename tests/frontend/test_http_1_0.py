"""Clients of HTTP/1.0, as proxies are by default: no chunks, and the connection's end is the body's."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.frontend.fake_scheduler import Script
from tests.frontend.harness import CHAT, Bench, chat, parse_events

EOS = 258


async def exchange(bench: Bench, head: str, body: bytes = b"") -> tuple[bytes, bytes]:
    """Head and body of what comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    writer.write(f"{head}Host: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return answer.lower(), rest


async def test_a_stream_is_the_events_alone(live: Bench) -> None:
    live.scheduler.script = lambda submit: Script([*"Grüße, 世界! 👩‍👩‍👧".encode(), EOS], steps=(3, 1))
    body = msgspec.json.encode(chat(stream=True))
    head, raw = await exchange(live, f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\n", body)
    assert b"transfer-encoding" not in head and b"connection: close" in head and b" 200 " in head
    *chunks, done = parse_events(raw)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Grüße, 世界! 👩‍👩‍👧"


async def test_a_stream_asked_for_with_keep_alive_ends_the_connection_too(live: Bench) -> None:
    body = msgspec.json.encode(chat(stream=True))
    start = f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\nConnection: keep-alive\r\n"
    head, raw = await exchange(live, start, body)
    assert b"transfer-encoding" not in head and raw.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["/v1/models", "/livez", "/nowhere", "/openapi.json"])
async def test_other_answers_say_their_length(live: Bench, path: str) -> None:
    head, raw = await exchange(live, f"GET {path} HTTP/1.0\r\n")
    assert f"content-length: {len(raw)}".encode() in head and b"transfer-encoding" not in head
    assert msgspec.json.decode(raw)


async def test_http_1_1_still_gets_chunks(live: Bench) -> None:
    body = msgspec.json.encode(chat(stream=True))
    start = f"POST {CHAT} HTTP/1.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head, raw = await exchange(live, start, body)
    assert b"transfer-encoding: chunked" in head and raw.endswith(b"0\r\n\r\n")

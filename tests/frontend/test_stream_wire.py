"""Streams, byte by byte, from a real server."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest

from protocol.frontend import RejectCode
from tests.frontend.fake_scheduler import Script
from tests.frontend.harness import CHAT, COMPLETIONS, Bench, chat, completion, parse_events

TEXT = "Grüße 世界, \u2028 done"
CHUNK_KEYS = ["id", "object", "created", "model", "system_fingerprint", "choices"]


async def raw_stream(bench: Bench, path: str, body: dict[str, Any]) -> bytes:
    """The body of a streamed answer, and the server's headers checked on the way."""
    async with bench.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache, no-transform"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"] and response.headers["x-headrace-frontend"] == "frontend-7"
        return await response.aread()


def lint(events: list[Any], *, chat_stream: bool, usage: bool) -> str:
    """Check the order and the keys of a stream of one choice; returns its text."""
    assert events.pop() == "[DONE]"
    kept = {key: {event[key] for event in events} for key in ("id", "created", "model", "system_fingerprint", "object")}
    assert all(len(values) == 1 for values in kept.values()), kept
    assert kept["object"] == {"chat.completion.chunk" if chat_stream else "text_completion"}
    if usage:
        last = events.pop()
        assert list(last) == [*CHUNK_KEYS, "usage"] and last["choices"] == []
    assert all(list(event) == CHUNK_KEYS and len(event["choices"]) == 1 for event in events)
    choices = [event["choices"][0] for event in events]
    assert all(choice["index"] == 0 and choice["logprobs"] is None for choice in choices)
    assert [choice["finish_reason"] is None for choice in choices] == [True] * (len(choices) - 1) + [False]
    assert ["stop_reason" in choice for choice in choices] == [False] * (len(choices) - 1) + [True]
    if not chat_stream:
        texts = [choice["text"] for choice in choices]
        assert all(texts[:-1]), "a chunk without text"
        return "".join(texts)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [choice["delta"] for choice in choices[1:]]
    assert all(list(delta) == ["content"] and delta["content"] for delta in deltas[:-1])
    assert deltas[-1] == {} or (list(deltas[-1]) == ["content"] and deltas[-1]["content"])
    return "".join(delta.get("content", "") for delta in deltas)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_events_come_in_the_contracts_order(live: Bench, path: str, usage: bool) -> None:
    for steps in ((1,), (2, 5), (8,)):
        live.scheduler.script = lambda submit, steps=steps: Script.text(TEXT, steps=steps)
        body = chat() if path == CHAT else completion(max_tokens=100)
        raw = await raw_stream(live, path, {**body, "stream_options": {"include_usage": usage}})
        raw.decode("utf-8")
        assert lint(parse_events(raw), chat_stream=path == CHAT, usage=usage) == TEXT


async def test_the_finish_rides_on_the_last_text_when_both_are_due_together(live: Bench) -> None:
    live.scheduler.script = lambda submit: Script.text("abcdefgh", steps=(8,))
    events = parse_events(await raw_stream(live, CHAT, chat(max_tokens=8)))
    last = events[-2]["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({"content": "abcdefgh"}, "length")


async def test_deltas_come_as_tokens_do_and_the_finish_alone_when_no_text_is_due(live: Bench) -> None:
    live.scheduler.script = lambda submit: Script([*b"ab", 258], gate=2)
    async with live.client.stream("POST", CHAT, json=chat(stream=True)) as response:
        received = b""
        pieces = response.aiter_raw()
        while b'"b"' not in received and b'"ab"' not in received:
            received += await anext(pieces)
        live.scheduler.open_gates()
        async for piece in pieces:
            received += piece
    last = parse_events(received)[-2]["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")


async def test_a_choice_without_text_has_a_role_and_a_finish(live: Bench) -> None:
    live.scheduler.script = lambda submit: Script.text("")
    events = parse_events(await raw_stream(live, CHAT, chat()))
    assert [event["choices"][0]["delta"] for event in events[:-1]] == [{"role": "assistant", "content": ""}, {}]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_error_before_the_first_token_keeps_its_status(live: Bench, path: str) -> None:
    live.scheduler.script = lambda submit: Script(reject=RejectCode.OVERLOADED, retry_after_ms=3000)
    body = chat() if path == CHAT else completion()
    response = await live.post(path, {**body, "stream": True})
    assert response.status_code == 429 and response.json()["error"]["code"] == "overloaded"
    assert 3 <= int(response.headers["retry-after"]) <= 5
    live.scheduler.script = lambda submit: Script(ids=b"abc", fault_at=0)
    response = await live.post(path, {**body, "stream": True})
    assert response.status_code == 500 and response.json()["error"]["code"] == "engine_error"
    assert response.headers["x-should-retry"] == "false"


async def test_an_error_after_the_commit_is_an_event_and_the_stream_still_ends(live: Bench) -> None:
    live.scheduler.script = lambda submit: Script(ids=b"abc", fault_at=3)
    events = parse_events(await raw_stream(live, CHAT, chat(stream_options={"include_usage": True})))
    assert events[-1] == "[DONE]"
    assert list(events[-2]) == ["error"] and events[-2]["error"]["code"] == "engine_error"
    assert "".join(event["choices"][0]["delta"]["content"] for event in events[:-2]) == "abc"
    whole = await live.post(CHAT, chat())
    assert whole.status_code == 500 and whole.json() == {"error": events[-2]["error"]}


async def test_a_slow_reader_gets_fewer_and_larger_chunks_and_all_of_the_text(live: Bench) -> None:
    """The server does not keep a chunk per token: it stops writing, and merges what arrives meanwhile."""
    length = 20_000
    live.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    live.scheduler.register(msgspec.structs.replace(live.scheduler.model, context=length + 1000))
    await live.until_here(lambda: live.frontend.client.model.context > length, "the larger context known")
    live.scheduler.script = lambda submit: Script(ids=b"x" * length, steps=(4,))
    body = msgspec.json.encode(chat(stream=True, max_tokens=length))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        await loop.sock_connect(slow, ("127.0.0.1", live.port))
        await loop.sock_sendall(slow, head.encode() + body)
        await live.until(lambda: live.scheduler.submits and not live.scheduler.jobs, "all tokens made")
        await live.until_here(lambda: live.frontend.client.statistics().open_choices == 0, "all tokens here")
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += await loop.sock_recv(slow, 1 << 20)
    events = parse_events(dechunked(received.partition(b"\r\n\r\n")[2]))
    assert lint(events, chat_stream=True, usage=False) == "x" * length
    assert len(events) < length / 8


def dechunked(body: bytes) -> bytes:
    """The content of a chunked body."""
    content = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        content += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return content

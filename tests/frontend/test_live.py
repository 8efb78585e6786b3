"""Behind a real server: clients that leave, connections, the official client, and bad bodies beside a good stream."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frontend.request import fields
from frontend.request.requests import ChatRequest, CompletionRequest
from tests.frontend.fake_scheduler import Script
from tests.frontend.harness import CHAT, COMPLETIONS, Bench, chat, completion, parse_events

pytestmark = pytest.mark.slow

ENDLESS = b"x" * 900


async def send_and_leave(bench: Bench, body: dict[str, Any], until: str) -> None:
    """Send a request on a connection of its own, and close it once something holds."""
    data = msgspec.json.encode(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    if until == "submitted":
        await bench.until(lambda: len(bench.scheduler.jobs) == 1, "submitted")
    elif until == "held":
        await bench.until_here(lambda: bench.frontend.preparing == 1, "held")
    else:
        await reader.readuntil(b'"xxx"')
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("stream", "gate", "until"), [(False, 3, "submitted"), (True, 0, "submitted"), (True, 3, "text")]
)
async def test_a_client_that_leaves_aborts_its_choice(live: Bench, stream: bool, gate: int, until: str) -> None:
    live.scheduler.script = lambda submit: Script(ENDLESS, steps=(3,), gate=gate)
    await send_and_leave(live, chat(stream=stream), until)
    rid = live.scheduler.submits[0].choices[0].rid
    await live.until(lambda: live.scheduler.aborted == [rid], "aborted")
    await live.until_here(lambda: live.frontend.under_way == 0, "nothing under way")
    assert "headrace_client_disconnects_total 1.0" in (await live.client.get("/metrics")).text


async def test_a_client_that_leaves_while_held_is_forgotten(live: Bench) -> None:
    live.scheduler.restart(registered=False)
    await live.until_here(lambda: live.frontend.client.status == "unavailable", "the model gone")
    await send_and_leave(live, chat(), "held")
    await live.until_here(lambda: live.frontend.preparing == 0, "forgotten")
    live.scheduler.register()
    assert (await live.post(CHAT, chat())).status_code == 200
    assert len(live.scheduler.submits) == 1


async def test_a_connection_serves_one_request_after_another(live: Bench) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    data = msgspec.json.encode(chat(stream=True))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write((head.encode() + data) * 2)
    for _ in range(2):
        answer = await reader.readuntil(b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200") and b"[DONE]" in answer
    writer.close()
    await live.until_here(lambda: live.frontend.under_way == 0, "nothing under way")


async def test_many_streams_at_once_keep_apart(live: Bench) -> None:
    def script(submit: Any) -> Script:
        prompt = submit.tokens[::4].decode("latin-1")
        return Script.text(
            prompt.partition("nonce-")[2].partition("\x02")[0] * 3, steps=(submit.choices[0].rid % 5 + 1,)
        )

    live.scheduler.script = script
    rng = random.Random(5)

    async def one(at: int) -> None:
        if rng.random() < 0.3:
            with contextlib.suppress(httpx.TimeoutException):
                await live.client.post(CHAT, json=chat(f"nonce-{at}-"), timeout=rng.random() * 0.02)
            return
        if at % 2:
            events = await live.events(CHAT, chat(f"nonce-{at}-"))
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
        else:
            text = (await live.post(CHAT, chat(f"nonce-{at}-"))).json()["choices"][0]["message"]["content"]
        assert text.startswith(f"{at}-") and text == text[: len(text) // 3] * 3

    await asyncio.gather(*(one(at) for at in range(64)))
    await live.until_here(lambda: live.frontend.under_way == 0, "nothing under way")
    await live.until(lambda: not live.scheduler.jobs, "nothing left running")
    assert live.frontend.client.statistics().open_choices == 0


async def test_the_official_client_works(live: Bench) -> None:
    live.scheduler.script = lambda submit: Script.text("Paris.")
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]

    def calls() -> None:
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{live.port}/v1", api_key="x", max_retries=0, _strict_response_validation=True
        )
        stream = client.chat.completions.create(
            model="llama-8b", messages=messages, stream=True, extra_body={"top_k": 40, "priority": 1}
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Paris."
        whole = client.chat.completions.create(model="llama-8b", messages=messages, seed=3)
        assert whole.choices[0].message.content == "Paris." and whole.usage is not None
        with client.chat.completions.stream(model="llama-8b", messages=messages) as helper:
            final = helper.get_final_completion()
        assert final.choices[0].message.content == "Paris." and final.choices[0].finish_reason == "stop"
        assert client.completions.create(model="llama-8b", prompt="x").choices[0].text == "Paris."
        assert [model.id for model in client.models.list()] == ["llama-8b", "alias"]
        assert client.models.retrieve("llama-8b").object == "model"
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="nobody", messages=messages)
        assert missing.value.code == "model_not_found" and missing.value.request_id
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="llama-8b", messages=messages, temperature=9)
        assert bad.value.param == "temperature"

    await asyncio.to_thread(calls)
    first = live.scheduler.submits[0]
    assert first.sampling.top_k == 40 and first.priority == 1


async def test_the_official_client_sees_an_error_in_the_middle_of_a_stream(live: Bench) -> None:
    live.scheduler.script = lambda submit: Script(ids=b"abc", fault_at=3)

    def calls() -> None:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key="x", max_retries=0)
        stream = client.chat.completions.create(
            model="llama-8b", messages=[{"role": "user", "content": "x"}], stream=True
        )
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "engine_error" and "by script" in caught.value.message

    await asyncio.to_thread(calls)


async def test_the_page_says_what_this_is(live: Bench) -> None:
    response = await live.client.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert f"curl http://127.0.0.1:{live.port}/v1/chat/completions" in response.text and "llama-8b" in response.text
    assert "src=" not in response.text and "@import" not in response.text


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(sorted({*fields.table_of(ChatRequest).rules, *fields.table_of(CompletionRequest).rules}))
objects = st.dictionaries(names | st.text(max_size=8), values, max_size=5)
bodies = st.binary(max_size=64) | st.builds(
    lambda base, extra: msgspec.json.encode({**base, **extra}),
    st.sampled_from([{}, chat(max_tokens=3), completion(max_tokens=3)]),
    objects,
)


async def test_no_body_gives_a_5xx_or_harms_a_stream_beside_it(live: Bench) -> None:
    live.scheduler.script = lambda submit: (
        Script.text("survived", gate=3) if b"s\0\0\0u\0\0\0r\0\0\0v" in submit.tokens else Script.text("ok")
    )
    survivor = asyncio.create_task(live.client.post(CHAT, json=chat("survivor", stream=True)))
    await live.until(lambda: len(live.scheduler.jobs) == 1, "the survivor under way")
    loop = asyncio.get_running_loop()

    async def attempt(path: str, body: bytes) -> None:
        response = await live.client.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code < 500, (body, response.text)
        if response.status_code != 200:
            assert list(response.json()["error"]) == ["message", "type", "param", "code"]

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.sampled_from([CHAT, COMPLETIONS]), bodies)
    def fuzz(path: str, body: bytes) -> None:
        asyncio.run_coroutine_threadsafe(attempt(path, body), loop).result()

    await asyncio.to_thread(fuzz)
    assert (await live.client.get("/health")).status_code == 200
    live.scheduler.open_gates()
    events = parse_events((await survivor).content)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == "survived"

"""Every error has its status, the one body, and the headers of any other response."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.frontend import Credit, Drain, Load, RejectCode
from tests.frontend.fake_scheduler import Script
from tests.frontend.harness import CHAT, COMPLETIONS, Bench, bench, chat, completion

JSON = {"content-type": "application/json"}


def check(response: Any, status: int, kind: str, code: str | None, param: str | None) -> str:
    """Check the error; returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] and response.headers["x-headrace-frontend"] == "frontend-7"
    body = response.json()
    assert list(body) == ["error"] and list(body["error"]) == ["message", "type", "param", "code"]
    error = body["error"]
    assert (error["type"], error["code"], error["param"]) == (kind, code, param), error
    assert error["message"] and len(response.content) < 16_384
    return error["message"]


BAD = "invalid_request_error"
REQUESTS: list[tuple[str, dict[str, Any], str, str | None]] = [
    (CHAT, {"messages": None}, "missing_required_parameter", "messages"),
    (CHAT, {"model": None}, "missing_required_parameter", "model"),
    (CHAT, {"messages": []}, "invalid_value", "messages"),
    (CHAT, {"messages": "hi"}, "invalid_type", "messages"),
    (CHAT, {"messages": ["hi"]}, "invalid_type", "messages[0]"),
    (CHAT, {"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "invalid_value", "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "invalid_type", "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "missing_required_parameter",
     "messages[0].content[0].text"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "x"}] * 2000}]}, "unsupported_parameter",
     "messages[0].content[0].type"),
    (CHAT, {"temperature": -0.1}, "invalid_value", "temperature"),
    (CHAT, {"temperature": 2.1}, "invalid_value", "temperature"),
    (CHAT, {"temperature": "hot"}, "invalid_type", "temperature"),
    (CHAT, {"top_p": 1.5}, "invalid_value", "top_p"),
    (CHAT, {"top_k": -2}, "invalid_value", "top_k"),
    (CHAT, {"min_p": 2}, "invalid_value", "min_p"),
    (CHAT, {"presence_penalty": 3}, "invalid_value", "presence_penalty"),
    (CHAT, {"frequency_penalty": -3}, "invalid_value", "frequency_penalty"),
    (CHAT, {"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    (CHAT, {"repetition_penalty": 1e-30}, "invalid_value", "repetition_penalty"),
    (CHAT, {"seed": 2**63}, "invalid_value", "seed"),
    (CHAT, {"seed": 1.5}, "invalid_type", "seed"),
    (CHAT, {"max_tokens": 0}, "invalid_value", "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "invalid_value", "max_completion_tokens"),
    (CHAT, {"max_tokens": -2}, "invalid_value", "max_tokens"),
    (CHAT, {"max_tokens": True}, "invalid_type", "max_tokens"),
    (CHAT, {"min_tokens": 9, "max_tokens": 8}, "invalid_value", "min_tokens"),
    (CHAT, {"stop": ""}, "invalid_value", "stop"),
    (CHAT, {"stop": ["ok", ""]}, "invalid_value", "stop[1]"),
    (CHAT, {"stop": ["x"] * 65}, "invalid_value", "stop"),
    (CHAT, {"stop": ["é" * 129]}, "invalid_value", "stop[0]"),
    (CHAT, {"stop_token_ids": [259]}, "invalid_value", "stop_token_ids[0]"),
    (CHAT, {"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids[0]"),
    (CHAT, {"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    (CHAT, {"priority": 101}, "invalid_value", "priority"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter", "tools"),
    (CHAT, {"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    (CHAT, {"temprature": 1}, "unknown_parameter", "temprature"),
    (CHAT, {"extra_body": {"top_k": 1}}, "unknown_parameter", "extra_body"),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "invalid_value", "continue_final_message"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "invalid_value", "messages"),
    (COMPLETIONS, {"prompt": None}, "missing_required_parameter", "prompt"),
    (COMPLETIONS, {"prompt": ""}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": []}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": {}}, "invalid_type", "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "invalid_value", "prompt[0]"),
    (COMPLETIONS, {"prompt": [1, 99_999_999]}, "invalid_value", "prompt[1]"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "invalid_type", "prompt[1]"),
    (COMPLETIONS, {"best_of": 2}, "unsupported_parameter", "best_of"),
    (COMPLETIONS, {"suffix": "x"}, "unsupported_parameter", "suffix"),
    (COMPLETIONS, {"prompt": "x" * 1000}, "context_length_exceeded", "prompt"),
]  # fmt: skip


async def test_a_bad_request_is_a_400_that_names_the_field_streamed_or_not(here: Bench) -> None:
    for path, fields, code, param in REQUESTS:
        body = {**(chat() if path == CHAT else completion()), **fields}
        message = check(await here.post(path, body), 400, BAD, code, param)
        streamed = {**body, "stream": True}
        if param != "stream_options":
            assert check(await here.post(path, streamed), 400, BAD, code, param) == message
    assert here.scheduler.submits == []


async def test_a_prompt_that_fills_the_context_is_told_the_numbers(here: Bench) -> None:
    message = check(
        await here.post(CHAT, chat("x" * 2000, max_tokens=7)), 400, BAD, "context_length_exceeded", "messages"
    )
    assert message == (
        "This model's maximum context length is 1000 tokens. However, you requested 2026 tokens "
        "(2019 in the messages, 7 in the completion)."
    )


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b'{"model": NaN}',
     b'{"model": "\\ud800"}', b"9" * 10_000, b'{"model": 1e999}'],
)  # fmt: skip
async def test_what_is_no_json_is_a_400(here: Bench, body: bytes) -> None:
    for path in (CHAT, COMPLETIONS):
        check(await here.client.post(path, content=body, headers=JSON), 400, BAD, "invalid_json", None)


@pytest.mark.parametrize(
    "value",
    [
        b"[" + b"[]," * 2_000_000 + b"0]",
        b"[" + b"{}," * 100_000 + b"0]",
        b'{"a":' + b"[[[]]]," * 40_000,
        b'"\\""' + b",[" * 200_000 + b'"' + b'\\"' * 500_000,
    ],
)
async def test_a_body_of_too_many_values_is_refused_before_any_is_made(here: Bench, value: bytes) -> None:
    for path in (CHAT, COMPLETIONS, "/v1/tokenize", "/v1/detokenize", "/v1/chat/completions/render"):
        body = b'{"model":"llama-8b","metadata":' + value + b"}"
        message = check(await here.client.post(path, content=body, headers=JSON), 400, BAD, "invalid_value", None)
        assert "100000 arrays and objects" in message


async def test_brackets_in_text_are_no_values(here: Bench) -> None:
    text = '{"[' * 60_000 + '\\"[{' * 60_000
    assert (await here.post("/v1/tokenize", {"prompt": text})).json()["count"] == len(text)


@pytest.mark.parametrize("body", [b"[]", b"3", b'"x"', b"null", b"true"])
async def test_a_body_that_is_no_object_is_a_400(here: Bench, body: bytes) -> None:
    check(await here.client.post(CHAT, content=body, headers=JSON), 400, BAD, "invalid_type", None)


async def test_unknown_models_routes_and_methods(here: Bench) -> None:
    client = here.client
    check(await here.post(CHAT, {**chat(), "model": "LLAMA-8B"}), 404, BAD, "model_not_found", "model")
    check(await client.get("/v1/models/nobody/here"), 404, BAD, "model_not_found", "model")
    check(await client.get("/v1/unknown"), 404, BAD, "route_not_found", None)
    check(await client.post("/v1/chat/completions/"), 404, BAD, "route_not_found", None)
    check(await client.post("/v1/embeddings", json={}), 404, BAD, "route_not_offered", None)
    check(await client.get("/v1/responses/resp_1"), 404, BAD, "route_not_offered", None)
    response = await client.get(CHAT)
    assert "POST" in check(response, 405, BAD, None, None) and response.headers["allow"] == "POST, OPTIONS"
    check(await client.delete("/v1/models"), 405, BAD, None, None)


async def test_other_content_types_are_a_415_that_shows_the_header(here: Bench) -> None:
    response = await here.client.post(CHAT, content=b"a=b", headers={"content-type": "text/plain"})
    assert "-H 'Content-Type: application/json'" in check(response, 415, BAD, None, None)
    response = await here.client.post(CHAT, content=b"{}", headers={"content-type": "application/json; charset=utf-8"})
    check(response, 400, BAD, "missing_required_parameter", "model")


async def test_a_body_that_is_too_large_is_a_413(here: Bench) -> None:
    large = b" " * (here.frontend.settings.max_body_bytes + 1)
    check(await here.client.post(CHAT, content=large, headers=JSON), 413, BAD, None, None)

    async def pieces() -> Any:
        for _ in range(9):
            yield b" " * (1 << 20)

    check(await here.client.post(CHAT, content=pieces(), headers=JSON), 413, BAD, None, None)


@pytest.mark.parametrize(
    ("code", "status", "kind", "text"),
    [
        (RejectCode.OVERLOADED, 429, "rate_limit_error", "overloaded"),
        (RejectCode.INVALID, 400, BAD, "invalid_value"),
        (RejectCode.UNSUPPORTED, 400, BAD, "unsupported_parameter"),
        (RejectCode.UNKNOWN_MODEL, 503, "server_error", "unavailable"),
        (RejectCode.NEVER_FITS, 400, BAD, "context_length_exceeded"),
        (RejectCode.UNAVAILABLE, 503, "server_error", "unavailable"),
    ],
)
async def test_a_rejection_has_its_status(here: Bench, code, status, kind, text) -> None:
    here.scheduler.script = lambda submit: Script(reject=code, retry_after_ms=100_000)
    for stream in (False, True):
        response = await here.post(CHAT, chat(stream=stream))
        check(response, status, kind, text, None)
        assert ("retry-after" in response.headers) == (status in (429, 503))
        assert int(response.headers.get("retry-after", 60)) == 60


async def test_a_request_that_meets_a_drain_on_its_way_waits_too(here: Bench) -> None:
    codes = [RejectCode.DRAINING, None]
    here.scheduler.script = lambda submit: Script(reject=code) if (code := codes.pop(0)) else Script.text("later")
    response = await here.post(CHAT, chat())
    assert (response.status_code, response.json()["choices"][0]["message"]["content"]) == (200, "later")
    assert not codes


async def test_without_credit_a_request_is_refused_before_any_work(here: Bench) -> None:
    here.scheduler.broadcast(Load(Credit(0, 100), 0, 1024, 9, 0, ()))
    await here.until_here(lambda: here.frontend.client.load is not None, "the load known")
    response = await here.post(CHAT, chat())
    check(response, 429, "rate_limit_error", "overloaded", None)
    assert response.headers["retry-after"] and here.scheduler.submits == []


async def test_what_comes_while_the_scheduler_drains_waits_for_its_successor(here: Bench) -> None:
    here.scheduler.broadcast(Drain(1000))
    await here.until_here(lambda: here.frontend.client.draining, "the drain known")
    waiting = asyncio.create_task(here.post(CHAT, chat()))
    await here.until_here(lambda: here.frontend.preparing == 1, "a request that waits")
    assert here.scheduler.submits == []
    here.scheduler.restart()
    assert (await waiting).status_code == 200


async def test_a_scheduler_that_drains_for_longer_than_the_grace_is_a_503(tmp_path, artefacts) -> None:
    async with bench(tmp_path, artefacts, scheduler_grace=0.1) as made:
        made.scheduler.broadcast(Drain(60_000))
        await made.until_here(lambda: made.frontend.client.draining, "the drain known")
        response = await made.post(CHAT, chat())
        check(response, 503, "server_error", "unavailable", None)
        assert "shutting down" in response.json()["error"]["message"]


async def test_a_draining_frontend_takes_nothing_new(here: Bench) -> None:
    here.frontend.draining = True
    response = await here.post(CHAT, chat())
    check(response, 503, "server_error", "unavailable", None)
    assert response.headers["connection"] == "close"
    check(await here.client.get("/readyz"), 503, "server_error", "unavailable", None)
    assert (await here.client.get("/livez")).status_code == 200


async def test_a_mistake_of_ours_is_a_500_in_the_same_form(here: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(here.frontend.preparer, "prepare", broken)
    check(await here.post(CHAT, chat()), 500, "server_error", "internal", None)


async def test_a_request_id_is_echoed_when_it_is_one_and_made_otherwise(here: Bench) -> None:
    for path in ("/livez", "/nowhere", "/metrics", "/"):
        for given, echoed in (("abc-1 2", True), ("x" * 256, True), ("x" * 257, False), ("é", False)):
            response = await here.client.get(path, headers={"x-request-id": given.encode()})
            assert (response.headers["x-request-id"] == given) == echoed
    ids = {(await here.client.get("/livez")).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


async def test_ignored_fields_are_named_in_a_header(here: Bench) -> None:
    response = await here.post(CHAT, chat(wholly_new=1, **{"weird\r\nname": 2, "é" * 80: 3}))
    assert response.status_code == 200
    names = response.headers["x-ignored-fields"].split(", ")
    assert names[:2] == ["wholly_new", "weird%0D%0Aname"] and len(names[2]) <= 64
    response = await here.post(CHAT, chat(**{f"unknown_field_{at}": at for at in range(100)}))
    assert len(response.headers["x-ignored-fields"].split(", ")) == 16


async def test_a_limit_beyond_the_room_is_clamped_and_said(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("ok")
    response = await here.post(COMPLETIONS, completion("12345", max_tokens=5000))
    assert response.headers["x-clamped"] == "max_tokens=995"
    assert here.scheduler.submits[-1].max_tokens == 995
    response = await here.post(COMPLETIONS, completion("x" * 990))
    assert "x-clamped" not in response.headers and here.scheduler.submits[-1].max_tokens == 10
    await here.post(CHAT, chat(max_tokens=-1))
    assert here.scheduler.submits[-1].max_tokens == 1000 - len(here.scheduler.submits[-1].tokens) // 4
    await here.post(CHAT, chat(max_tokens=7, max_completion_tokens=5))
    assert here.scheduler.submits[-1].max_tokens == 5
    await here.post(COMPLETIONS, completion())
    assert here.scheduler.submits[-1].max_tokens == 16


async def test_too_many_waiting_requests_are_refused(tmp_path, artefacts) -> None:
    from tests.frontend.harness import bench

    async with bench(tmp_path, artefacts, registered=False, max_preparing=2) as made:
        held = [asyncio.create_task(made.post(CHAT, chat())) for _ in range(2)]
        await made.until_here(lambda: made.frontend.preparing == 2, "two held")
        check(await made.post(CHAT, chat()), 429, "rate_limit_error", "overloaded", None)
        made.scheduler.register()
        assert [(await task).status_code for task in held] == [200, 200]

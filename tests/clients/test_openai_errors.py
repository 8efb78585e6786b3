"""Errors as the official Python client raises them, and what it tries again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.answers import (
    FAULTY_AT_ONCE,
    FAULTY_LATER,
    FAULTY_PREFIX,
    MODEL,
    PLAIN,
    PLAIN_TEXT,
    SLOW,
    SLOW_TEXT,
    STEP_SECONDS,
    ask,
)
from tests.end_to_end.serve_process import ServeProcess

pytestmark = pytest.mark.slow

RETRIES = 2


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> Iterator[openai.OpenAI]:
    """One that tries again whatever it believes to be worth it."""
    with server.client(max_retries=RETRIES) as client:
        yield client


def requests_answered(server: ServeProcess) -> float:
    """How many requests for chats were answered so far."""
    label = 'route="/v1/chat/completions"'
    gauges = server.gauges()
    return sum(n for name, n in gauges.items() if name.startswith("headrace_http_requests_total{") and label in name)


BAD_REQUESTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "out of range": ({"temperature": 9}, "temperature", "invalid_value"),
    "wrong type": ({"max_tokens": "many"}, "max_tokens", "invalid_type"),
    "no messages": ({"messages": None}, "messages", "missing_required_parameter"),
    "an unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
    "not offered": ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    "a misspelt field": ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter"),
    "too long": ({"messages": ask("x" * 100_000)}, "messages", "context_length_exceeded"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_a_bad_request_error_and_is_not_sent_again(
    server: ServeProcess, client: openai.OpenAI, case: str, stream: bool
) -> None:
    fields, param, code = BAD_REQUESTS[case]
    before = requests_answered(server)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": ask(PLAIN), "stream": stream, **fields})
    error = caught.value
    assert (error.status_code, error.type, error.param, error.code) == (400, "invalid_request_error", param, code)
    assert error.request_id and error.request_id.startswith("req-")
    assert isinstance(error.body, dict) and error.body["message"] in error.message
    assert requests_answered(server) == before + 1


def test_what_is_not_there_is_a_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=ask(PLAIN))
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model=MODEL, input="x")
    assert caught.value.code == "route_not_offered"
    with pytest.raises(openai.NotFoundError) as caught:
        client.post("/nowhere", body={}, cast_to=object)
    assert caught.value.code == "route_not_found"


def test_a_wrong_method_and_a_wrong_type_have_the_one_error_body(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.get("/chat/completions", cast_to=object)
    assert (caught.value.status_code, caught.value.type) == (405, "invalid_request_error")
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=MODEL, messages=ask(PLAIN), extra_headers={"Content-Type": "text/plain"})
    assert caught.value.status_code == 415 and "Content-Type: application/json" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_fault_before_the_first_token_is_a_server_error_sent_once(
    server: ServeProcess, client: openai.OpenAI, stream: bool
) -> None:
    before = requests_answered(server)
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=ask(f"{FAULTY_AT_ONCE}, stream {stream}"), stream=stream)
    assert (caught.value.status_code, caught.value.code, caught.value.type) == (500, "engine_error", "server_error")
    assert requests_answered(server) == before + 1


def test_an_engine_fault_in_a_stream_is_raised_after_what_was_said(client: openai.OpenAI) -> None:
    text = ""
    with pytest.raises(openai.APIError) as caught:
        for chunk in client.chat.completions.create(model=MODEL, messages=ask(f"{FAULTY_LATER} 1"), stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == FAULTY_PREFIX
    assert (caught.value.code, caught.value.type) == ("engine_error", "server_error")


def test_an_engine_fault_reaches_the_stream_helper(client: openai.OpenAI) -> None:
    with (
        pytest.raises(openai.APIError),
        client.chat.completions.stream(model=MODEL, messages=ask(f"{FAULTY_LATER} 2")) as stream,
    ):
        stream.until_done()


def test_a_cut_answer_is_no_answer(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=ask(f"{FAULTY_LATER} 3"))
    assert caught.value.code == "engine_error"


def test_a_clients_own_timeout_is_raised_and_frees_the_answers_blocks(server: ServeProcess) -> None:
    with server.client(timeout=STEP_SECONDS) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model=MODEL, messages=ask(SLOW))
    server.wait_until_no_blocks_are_used()


def test_a_deadline_before_the_first_token_is_an_error_that_is_not_sent_again(
    server: ServeProcess, client: openai.OpenAI
) -> None:
    before = requests_answered(server)
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=ask(SLOW), extra_body={"timeout": STEP_SECONDS / 10})
    assert (caught.value.status_code, caught.value.code, caught.value.type) == (504, "timeout", "timeout_error")
    assert requests_answered(server) == before + 1


def test_a_deadline_after_the_first_token_is_a_normal_end_in_both_transports(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ask(SLOW), "extra_body": {"timeout": 8 * STEP_SECONDS}}
    chunks = list(client.chat.completions.create(**asked, stream=True))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    whole = client.chat.completions.create(**asked)
    for choice, said in ((chunks[-1].choices[0], text), (whole.choices[0], whole.choices[0].message.content)):
        assert (choice.finish_reason, choice.to_dict()["stop_reason"]) == ("length", "timeout")
        assert said and len(said) < len(SLOW_TEXT) and SLOW_TEXT.startswith(said)
    assert whole.usage is not None and whole.usage.completion_tokens == len(whole.choices[0].message.content or "")


def test_the_helper_raises_its_length_error_for_a_cut_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=ask(PLAIN), max_completion_tokens=3) as events:
        events.until_done()
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            events.get_final_completion()
    assert caught.value.completion.choices[0].message.content == PLAIN_TEXT[:3]


def test_a_stream_that_is_closed_early_frees_its_blocks(server: ServeProcess, client: openai.OpenAI) -> None:
    with client.chat.completions.create(model=MODEL, messages=ask(SLOW), stream=True) as stream:
        texts = (chunk.choices[0].delta.content for chunk in stream)
        assert [next(texts) for _ in range(3)] == ["", "0", "1"]
    server.wait_until_no_blocks_are_used()


def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()


def test_answers_go_on_after_all_those_errors(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ask(PLAIN))
    assert answer.choices[0].message.content == PLAIN_TEXT

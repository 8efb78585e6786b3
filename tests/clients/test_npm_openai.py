"""The official JavaScript client, with Node."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.answers import (
    ALIAS,
    FAULTY_PREFIX,
    MODEL,
    PLAIN_TEXT,
    SLOW_TEXT,
    UNICODE,
    UNICODE_TEXT,
    answer_tokens,
    prompt_tokens,
)
from tests.clients.node import Node
from tests.end_to_end.serve_process import ServeProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(node: Node, server: ServeProcess) -> dict[str, Any]:
    return node.report("openai_client.mjs", server.url)


def test_npm_openai_reads_a_chat_in_both_transports(report: dict[str, Any]) -> None:
    whole, chunks = report["whole"], report["streamed"]
    message = whole["choices"][0]["message"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert message == {"role": "assistant", "content": UNICODE_TEXT, "refusal": None}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == UNICODE_TEXT
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    assert whole["usage"]["prompt_tokens"] == prompt_tokens(UNICODE)
    assert whole["usage"]["completion_tokens"] == answer_tokens(UNICODE_TEXT)


def test_npm_openai_stream_helper_ends_with_the_whole_answer(report: dict[str, Any]) -> None:
    helper = report["helper"]
    choice = helper["final"]["choices"][0]
    assert "".join(helper["deltas"]) == helper["content"] == choice["message"]["content"] == UNICODE_TEXT
    assert choice["finish_reason"] == "stop"
    spelt = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert spelt.decode() == UNICODE_TEXT
    assert helper["usage"]["completion_tokens"] == answer_tokens(UNICODE_TEXT)


def test_npm_openai_tells_two_choices_apart(report: dict[str, Any]) -> None:
    two = report["two_choices"]
    assert [choice["message"]["content"] for choice in two["whole"]["choices"]] == two["texts"] == [PLAIN_TEXT] * 2


def test_npm_openai_completes_a_list_of_prompts(report: dict[str, Any]) -> None:
    completions = report["completions"]
    choices = completions["whole"]["choices"]
    assert [choice["text"] for choice in choices] == completions["texts"] == [UNICODE_TEXT, PLAIN_TEXT]
    assert "".join(choices[1]["logprobs"]["tokens"]) == PLAIN_TEXT


def test_npm_openai_lists_models(report: dict[str, Any]) -> None:
    assert report["models"]["names"] == [MODEL, ALIAS]
    assert report["models"]["one"]["id"] == MODEL


def test_npm_openai_shows_the_headers(report: dict[str, Any]) -> None:
    assert report["response_headers"] == {"text": PLAIN_TEXT, "type": "application/json", "request_id": "mine-1"}


@pytest.mark.parametrize(
    ("case", "kind", "status", "code", "param"),
    [
        ("bad_value", "BadRequestError", 400, "invalid_value", "temperature"),
        ("bad_value_streamed", "BadRequestError", 400, "invalid_value", "temperature"),
        ("no_model", "NotFoundError", 404, "model_not_found", "model"),
        ("no_route", "NotFoundError", 404, "route_not_found", None),
        ("too_long", "BadRequestError", 400, "context_length_exceeded", "messages"),
        ("engine", "InternalServerError", 500, "engine_error", None),
    ],
)
def test_npm_openai_throws_the_right_error(
    report: dict[str, Any], case: str, kind: str, status: int, code: str, param: str | None
) -> None:
    error = report["errors"][case]
    assert (error["kind"], error["status"], error["code"], error["param"]) == (kind, status, code, param)
    assert error["requestID"].startswith("req-") and error["type"]


def test_npm_openai_throws_a_fault_in_a_stream_after_what_was_said(report: dict[str, Any]) -> None:
    fault = report["fault_in_a_stream"]
    assert fault["text"] == FAULTY_PREFIX
    assert (fault["failed"]["kind"], fault["failed"]["code"]) == ("APIError", "engine_error")


def test_npm_openai_aborts_a_stream_and_its_blocks_are_freed(report: dict[str, Any], server: ServeProcess) -> None:
    assert SLOW_TEXT.startswith(report["abort"]["text"]) and len(report["abort"]["text"]) >= 2
    server.wait_until_no_blocks_are_used()


def test_npm_openai_went_through_every_scenario(report: dict[str, Any]) -> None:
    odd = {name: found["unexpected"] for name, found in report.items() if "unexpected" in found}
    assert not odd

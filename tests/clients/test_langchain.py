"""LangChain's models for OpenAI, in an environment of their own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients import virtual_environment
from tests.clients.answers import (
    FAULTY_PREFIX,
    MODEL,
    PLAIN_TEXT,
    UNICODE,
    UNICODE_TEXT,
    answer_tokens,
    prompt_tokens,
)
from tests.end_to_end.serve_process import ServeProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

REQUIREMENTS = ("langchain-openai==1.7.4", "langchain-core==1.8.3", "openai==3.57.0")


@pytest.fixture(scope="module")
def report(server: ServeProcess) -> dict[str, Any]:
    return virtual_environment.report("langchain_client.py", REQUIREMENTS, server.url)


def test_langchain_invokes_and_streams_the_same(report: dict[str, Any]) -> None:
    whole, streamed = report["whole"], report["streamed"]
    assert whole["text"] == streamed["text"] == "".join(streamed["deltas"]) == UNICODE_TEXT
    assert whole["about"]["finish_reason"] == streamed["finish"] == "stop"
    assert whole["about"]["model_name"] == MODEL
    assert whole["usage"] == streamed["usage"]
    assert whole["usage"]["input_tokens"] == prompt_tokens(UNICODE)
    assert whole["usage"]["output_tokens"] == answer_tokens(UNICODE_TEXT)


def test_langchain_holds_a_conversation(report: dict[str, Any]) -> None:
    assert report["conversation"] == PLAIN_TEXT[:12]


def test_langchain_runs_a_chain_in_a_batch(report: dict[str, Any]) -> None:
    assert report["chain"] == [PLAIN_TEXT, UNICODE_TEXT, PLAIN_TEXT]


def test_langchain_reads_logprobs_and_two_choices(report: dict[str, Any]) -> None:
    assert report["logprobs"] == PLAIN_TEXT
    assert report["two"] == [PLAIN_TEXT] * 2


def test_langchain_completes_text(report: dict[str, Any]) -> None:
    assert report["completion"] == {"whole": UNICODE_TEXT, "streamed": UNICODE_TEXT}


def test_langchain_streams_side_by_side(report: dict[str, Any]) -> None:
    assert report["asynchronous"] == [PLAIN_TEXT, UNICODE_TEXT] * 4


def test_langchain_raises_the_clients_errors(report: dict[str, Any]) -> None:
    assert report["error"] == {"code": "invalid_value", "param": "temperature"}
    assert report["fault_in_a_stream"] == {"text": FAULTY_PREFIX, "code": "engine_error"}

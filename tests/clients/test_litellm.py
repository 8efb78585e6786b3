"""LiteLLM as a client of an OpenAI server and of a vLLM server, in an environment of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients import virtual_environment
from tests.clients.answers import FAULTY_PREFIX, MODEL, PLAIN_TEXT, UNICODE, UNICODE_TEXT, answer_tokens, prompt_tokens
from tests.end_to_end.serve_process import ServeProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

REQUIREMENTS = ("litellm==1.110.2", "openai==3.57.0")


@pytest.fixture(scope="module")
def report(server: ServeProcess) -> dict[str, Any]:
    return virtual_environment.report("litellm_client.py", REQUIREMENTS, server.url)


def test_litellm_answers_and_streams_the_same(report: dict[str, Any]) -> None:
    whole, streamed = report["whole"], report["streamed"]
    rebuilt = streamed["rebuilt"]
    assert whole["choices"][0]["message"]["content"] == streamed["text"] == UNICODE_TEXT
    assert rebuilt["choices"][0]["message"]["content"] == UNICODE_TEXT
    assert [whole["choices"][0]["finish_reason"]] == streamed["finishes"] == ["stop"]
    assert whole["model"] == rebuilt["model"] == MODEL
    counts = {"prompt_tokens": prompt_tokens(UNICODE), "completion_tokens": answer_tokens(UNICODE_TEXT)}
    for usage in (whole["usage"], rebuilt["usage"]):
        assert {name: usage[name] for name in counts} == counts


def test_litellm_takes_the_server_for_a_vllm(report: dict[str, Any]) -> None:
    assert report["as_hosted_vllm"] == {"whole": UNICODE_TEXT, "streamed": UNICODE_TEXT}


def test_litellm_passes_its_parameters(report: dict[str, Any]) -> None:
    found = [(choice["message"]["content"], choice["finish_reason"]) for choice in report["parameters"]]
    assert found == [(PLAIN_TEXT[:12], "length")] * 2
    assert report["logprobs"] == PLAIN_TEXT


def test_litellm_completes_text(report: dict[str, Any]) -> None:
    assert report["completion"] == {"whole": UNICODE_TEXT, "streamed": UNICODE_TEXT}


def test_litellm_streams_side_by_side(report: dict[str, Any]) -> None:
    assert report["asynchronous"] == [PLAIN_TEXT, UNICODE_TEXT] * 4


def test_litellm_maps_every_error(report: dict[str, Any]) -> None:
    assert report["errors"] == {
        "bad_value": {"kind": "BadRequestError", "status": 400},
        "too_long": {"kind": "ContextWindowExceededError", "status": 400},
        "no_model": {"kind": "NotFoundError", "status": 404},
        "engine": {"kind": "InternalServerError", "status": 500},
    }


def test_litellm_raises_a_fault_in_a_stream_after_what_was_said(report: dict[str, Any]) -> None:
    assert report["fault_in_a_stream"]["text"] == FAULTY_PREFIX
    assert report["fault_in_a_stream"]["kind"]

"""The Vercel AI SDK with its provider for compatible servers, with Node."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.answers import (
    FAULTY_PREFIX,
    MODEL,
    PLAIN,
    PLAIN_TEXT,
    UNICODE,
    UNICODE_TEXT,
    answer_tokens,
    prompt_tokens,
    tokens,
)
from tests.clients.node import Node
from tests.end_to_end.serve_process import ServeProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(node: Node, server: ServeProcess) -> dict[str, Any]:
    return node.report("ai_sdk.mjs", server.url)


def usage(prompt: int, answer: int) -> dict[str, int]:
    return {"input": prompt, "output": answer, "total": prompt + answer, "reasoning": 0}


def counted(reported: dict[str, int]) -> dict[str, int]:
    """Without what was cached, which depends on what was asked before."""
    assert 0 <= reported["cached"] < reported["input"]
    return {key: value for key, value in reported.items() if key != "cached"}


def test_npm_ai_sdk_generates_and_streams_the_same(report: dict[str, Any]) -> None:
    whole, streamed = report["whole"], report["streamed"]
    assert whole["text"] == "".join(streamed["deltas"]) == UNICODE_TEXT
    assert whole["finish"] == streamed["finish"] == "stop"
    assert counted(whole["usage"]) == counted(streamed["usage"])
    assert counted(whole["usage"]) == usage(prompt_tokens(UNICODE), answer_tokens(UNICODE_TEXT))
    assert whole["id"].startswith("chatcmpl-") and whole["model"] == MODEL


def test_npm_ai_sdk_sees_text_and_nothing_else_in_a_stream(report: dict[str, Any]) -> None:
    kinds = report["streamed"]["kinds"]
    assert set(kinds) == {"start", "start-step", "text-start", "text-delta", "text-end", "finish-step", "finish"}
    assert kinds.count("text-start") == kinds.count("finish") == 1 and not report["streamed"]["errors"]
    assert "" not in report["streamed"]["deltas"]


def test_npm_ai_sdk_holds_a_conversation(report: dict[str, Any]) -> None:
    assert (report["conversation"]["text"], report["conversation"]["finish"]) == (PLAIN_TEXT, "stop")


def test_npm_ai_sdk_reads_why_an_answer_ended(report: dict[str, Any]) -> None:
    assert (report["cut"]["text"], report["cut"]["finish"]) == (PLAIN_TEXT[:5], "length")
    assert ("".join(report["cut_streamed"]["deltas"]), report["cut_streamed"]["finish"]) == (PLAIN_TEXT[:5], "length")
    assert counted(report["cut"]["usage"]) == counted(report["cut_streamed"]["usage"])
    assert counted(report["cut"]["usage"]) == usage(prompt_tokens(PLAIN), 5)
    assert (report["stopped"]["text"], report["stopped"]["finish"]) == ("The capital of ", "stop")


def test_npm_ai_sdk_passes_our_own_parameters(report: dict[str, Any]) -> None:
    assert report["own_options"]["text"] == PLAIN_TEXT[:4]


def test_npm_ai_sdk_completes_text_in_both_transports(report: dict[str, Any]) -> None:
    whole, streamed = report["completion"], report["completion_streamed"]
    assert whole["text"] == "".join(streamed["deltas"]) == UNICODE_TEXT
    assert whole["finish"] == streamed["finish"] == "stop"
    assert whole["usage"] == streamed["usage"] and whole["usage"]["output"] == answer_tokens(UNICODE_TEXT)
    assert whole["usage"]["input"] >= tokens(UNICODE)


@pytest.mark.parametrize(
    ("case", "status", "code"), [("bad_value", 400, "invalid_value"), ("no_model", 404, "model_not_found")]
)
def test_npm_ai_sdk_throws_what_the_server_said(report: dict[str, Any], case: str, status: int, code: str) -> None:
    error = report["errors"][case]
    said = json.loads(error["body"])["error"]
    assert error["api"] and (error["status"], error["retryable"]) == (status, False)
    assert (said["code"], said["message"]) == (code, error["message"])


def test_npm_ai_sdk_throws_an_engine_fault(report: dict[str, Any]) -> None:
    error = report["errors"]["engine"]
    assert error["api"] and error["status"] == 500
    assert json.loads(error["body"])["error"]["code"] == "engine_error"


def test_npm_ai_sdk_streams_an_error_part(report: dict[str, Any]) -> None:
    refused, fault = report["bad_value_streamed"], report["fault_in_a_stream"]
    assert "error" in refused["kinds"] and "temperature" in refused["errors"][0]
    assert "".join(fault["deltas"]) == FAULTY_PREFIX
    assert "error" in fault["kinds"] and fault["errors"]


def test_npm_ai_sdk_aborts_and_its_blocks_are_freed(report: dict[str, Any], server: ServeProcess) -> None:
    assert report["abort"]["kinds"][-2:] == ["text-delta", "abort"]
    server.wait_until_no_blocks_are_used()


def test_npm_ai_sdk_went_through_every_scenario(report: dict[str, Any]) -> None:
    odd = {name: found["unexpected"] for name, found in report.items() if "unexpected" in found}
    assert not odd

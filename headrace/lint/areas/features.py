"""Tools, reasoning and structure: refused with 400, or offered correctly."""

from __future__ import annotations

import json
import re
from typing import Any

from headrace.lint.answers import Answer, answer_of
from headrace.lint.exchange import Exchange, refused
from headrace.lint.session import Session
from headrace.lint.verdicts import NotOffered, Wrong, check, check_each

FUNCTION = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
NAMED = {"type": "function", "function": {"name": "weather"}}

TOOL_FIELDS: dict[str, dict[str, Any]] = {
    "tools": {"tools": TOOLS},
    "tool_choice none": {"tools": TOOLS, "tool_choice": "none"},
    "tool_choice required": {"tools": TOOLS, "tool_choice": "required"},
    "a named tool": {"tools": TOOLS, "tool_choice": NAMED},
    "parallel_tool_calls false": {"tools": TOOLS, "parallel_tool_calls": False},
    "functions": {"functions": [FUNCTION]},
}

STRUCTURE: dict[str, tuple[dict[str, Any], str]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, ""),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        "",
    ),
    "structured_outputs json": ({"structured_outputs": {"json": SCHEMA}}, ""),
    "structured_outputs regex": ({"structured_outputs": {"regex": "(yes|no)"}}, "yes|no"),
    "structured_outputs choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    "guided_json": ({"guided_json": SCHEMA}, ""),
    "guided_regex": ({"guided_regex": "(yes|no)"}, "yes|no"),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, "yes|no"),
}

REASONING: dict[str, dict[str, Any]] = {
    "reasoning_effort": {"reasoning_effort": "low"},
    "include_reasoning": {"include_reasoning": False},
    "thinking_token_budget": {"thinking_token_budget": 16},
}


def _offered(exchange: Exchange, *fields: str) -> Answer:
    if exchange.status == 400:
        refused(exchange, 400)
        raise NotOffered(str(exchange.error.get("message", ""))[:120])
    return answer_of(exchange, *fields)


@check_each("7", "{case}: a 400, or tool calls of the right shape in both transports.", TOOL_FIELDS)
def tools(session: Session, fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    for stream in (False, True):
        answer = _offered(session.chat(messages=messages, max_tokens=96, stream=stream, **fields), *fields)
        choice = answer.choices[0]
        if bool(choice.tool_calls) != (choice.finish_reason == "tool_calls") and choice.finish_reason != "length":
            raise Wrong(f"{len(choice.tool_calls)} calls with finish_reason {choice.finish_reason!r}", answer.exchange)
        if fields.get("tool_choice") == "none" and choice.tool_calls:
            raise Wrong("calls in spite of none", answer.exchange)
        if (
            fields.get("tool_choice") in ("required", NAMED)
            and not choice.tool_calls
            and choice.finish_reason != "length"
        ):
            raise Wrong("no call though one is required", answer.exchange)
        for call in choice.tool_calls if choice.finish_reason == "tool_calls" else ():
            _call(answer, call)


def _call(answer: Answer, call: dict[str, Any]) -> None:
    function = call.get("function") or {}
    if call.get("type") != "function" or not call.get("id") or function.get("name") != "weather":
        raise Wrong(f"a call is {call!r}"[:200], answer.exchange)
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        raise Wrong(f"arguments are {function['arguments']!r}"[:200], answer.exchange) from None
    if not isinstance(arguments, dict):
        raise Wrong("arguments are not an object", answer.exchange)


@check_each("7", "{case}: a 400, or an answer that obeys, in both transports.", STRUCTURE)
def structure(session: Session, case: tuple[dict[str, Any], str]) -> None:
    fields, pattern = case
    messages = [{"role": "user", "content": "Is water wet? Answer in JSON or with yes or no."}]
    for stream in (False, True):
        answer = _offered(session.chat(messages=messages, max_tokens=96, stream=stream, **fields), *fields)
        if answer.finish_reason == "length":
            continue
        if pattern and not re.fullmatch(pattern, answer.text):
            raise Wrong(f"the answer is {answer.text!r}"[:200], answer.exchange)
        if not pattern:
            try:
                json.loads(answer.text)
            except ValueError:
                raise Wrong(f"the answer is no JSON: {answer.text!r}"[:200], answer.exchange) from None


@check_each("7", "{case}: a 400, or an answer.", REASONING)
def reasoning(session: Session, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        _offered(session.chat(stream=stream, **fields), *fields)


@check("7", "tool_choice required without tools, or naming one that is not there, is a 400.")
def choice_without_tool(session: Session) -> None:
    refused(session.chat(tool_choice="required"), 400)
    refused(session.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}}), 400)


@check("5", "A schema that cannot be one is a 400, and the server lives on.")
def broken_schema(session: Session) -> None:
    for schema in ({"type": "object", "properties": {"a": "bar"}}, {"type": "wizard"}, 5):
        bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
        refused(session.chat(response_format=bad), 400)
    refused(session.chat(response_format={"type": "hologram"}), 400)
    refused(session.chat(response_format="json"), 400)


@check("7", "Two constraints at once are a 400.")
def two_constraints(session: Session) -> None:
    refused(session.chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}), 400)

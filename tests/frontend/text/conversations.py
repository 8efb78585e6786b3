"""Conversations that templates are tried on."""

from __future__ import annotations

from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather in a city, as in "Zürich".',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
            "required": ["city"],
        },
    },
}

CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def _call(arguments: Any) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    "system and question": {
        "messages": [
            {"role": "system", "content": "You are a support assistant."},
            {"role": "user", "content": "Explain the KV cache in one sentence."},
        ]
    },
    "several turns": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello! How can I help?"},
            {"role": "user", "content": "Write\n\n1. one\n2. two\n\n    indented 3"},
        ]
    },
    "unicode and markup": {
        "messages": [
            {"role": "system", "content": "Répondez en français. <b>&amp;</b>"},
            {"role": "user", "content": "こんにちは 👋🏽 — {{ 7*7 }} {% raw %} 'quoted' \"twice\" \\n\t\u00a0end"},
        ]
    },
    "spaces around": {
        "messages": [
            {"role": "user", "content": "  leading and trailing  \n"},
            {"role": "assistant", "content": "\n ok \n"},
            {"role": "user", "content": ""},
        ]
    },
    "no generation prompt": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "add_generation_prompt": False,
    },
    "continued answer": {
        "messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,  "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "tools offered": {
        "messages": [{"role": "user", "content": "Weather in Zürich?"}],
        "tools": [WEATHER, CLOCK],
    },
    "tool call and result": {
        "messages": [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "Weather in Zürich?"},
            {"role": "assistant", "tool_calls": [_call({"city": "Zürich", "days": 2})]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": '{"c": 21.5}'},
        ],
        "tools": [WEATHER],
    },
    "thinking": {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "<think>\neasy\n</think>\n\n4", "reasoning": "easy"},
            {"role": "user", "content": "And 3+3?"},
        ],
        "template_kwargs": {"enable_thinking": False},
    },
    "documents": {
        "messages": [{"role": "user", "content": "Summarise."}],
        "documents": [{"title": "A", "text": "first"}, {"title": "B", "text": "second"}],
    },
    "two systems": {
        "messages": [
            {"role": "system", "content": "one"},
            {"role": "system", "content": "two"},
            {"role": "user", "content": "?"},
        ]
    },
}

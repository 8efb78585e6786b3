"""Messages as clients send them → messages as templates expect them."""

from __future__ import annotations

import json
from typing import Any, Literal

from frontend.text.errors import TemplateError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_UNTRUSTED_ROLES = frozenset({"user", "tool", "function"})
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]
ContentFormat = Literal["string", "openai"]
"""Whether a template wants a list of content parts joined into one string or iterates over it itself."""
ArgumentsFormat = Literal["object", "string"]
"""Whether a template wants the arguments of a tool call as an object (it writes JSON itself) or as JSON text."""


def normalise(
    messages: list[Message], *, content: ContentFormat, arguments: ArgumentsFormat, knows_developer: bool
) -> list[Message]:
    """Fresh messages in the form of transformers: no fields that are null, reasoning under its known names.

    Raises TemplateError naming the field at fault.
    """
    if not messages:
        raise TemplateError("there are no messages", param="messages")
    return [
        _normalise_one(message, f"messages[{index}]", content, arguments, knows_developer)
        for index, message in enumerate(messages)
    ]


def _normalise_one(
    message: Message, path: str, content: ContentFormat, arguments: ArgumentsFormat, knows_developer: bool
) -> Message:
    if not isinstance(message, dict):
        raise TemplateError(f"{path} should be an object", param=path)
    made = {key: value for key, value in message.items() if value is not None}
    role = made.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(sorted(ROLES))
        raise TemplateError(f"{path}.role should be one of {known}; it is {role!r:.60}", param=f"{path}.role")
    if role == "developer" and not knows_developer:
        made["role"] = "system"
    if "content" in made:
        made["content"] = _content(made["content"], f"{path}.content", content)
    if "tool_calls" in made:
        calls = _list(made.pop("tool_calls"), f"{path}.tool_calls")
        if calls:  # templates branch on whether there are any by whether the field is there
            made["tool_calls"] = [
                _tool_call(call, f"{path}.tool_calls[{index}]", arguments) for index, call in enumerate(calls)
            ]
    reasoning = next((made[name] for name in _REASONING_FIELDS if name in made), None)
    if reasoning is not None:
        made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
    return made


def _content(content: Any, path: str, form: ContentFormat) -> Any:
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{path}[{index}]") for index, part in enumerate(_list(content, path))]
    if form == "openai":
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(part: Any, path: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise TemplateError(f"{path} should be an object with type and text", param=path)
    kind = part.get("type", "text")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
        raise TemplateError(f"{path} should be a text part; parts of type {kind!r:.40} are not read", param=path)
    return {"type": "text", "text": text}


def _tool_call(call: Any, path: str, form: ArgumentsFormat) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TemplateError(f"{path} should have a function with a name", param=path)
    given = function.get("arguments")
    parsed = _parsed_arguments(given, f"{path}.function.arguments")
    if form == "string" and not isinstance(parsed, str):
        parsed = given if isinstance(given, str) and given else json.dumps(parsed, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": parsed}}


def _parsed_arguments(given: Any, path: str) -> dict[str, Any] | str:
    """The object, or the text as it is when a model once wrote arguments that are no JSON object."""
    if given is None or given == "":
        return {}
    if isinstance(given, dict):
        return given
    if not isinstance(given, str):
        raise TemplateError(f"{path} should be JSON text or an object", param=path)
    try:
        parsed = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return parsed if isinstance(parsed, dict) else given


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise TemplateError(f"{path} should be a list", param=path)
    return value


def with_empty_contents(messages: list[Message]) -> list[Message]:
    """The same messages with `content: ""` where there is none, for templates that take it for granted."""
    return [message if "content" in message else {**message, "content": ""} for message in messages]


def is_untrusted(message: Message) -> bool:
    """Whether special-token text in this message is text and nothing more."""
    return message["role"] in _UNTRUSTED_ROLES

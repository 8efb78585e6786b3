"""What is wrong with chat messages, said before anything is spent on them, with the path of the field at fault.

The form that a template wants of them is made in ``frontend.text``.
"""

from __future__ import annotations

from typing import Any

from frontend import errors

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Part type → the key that holds its text."""


def check(messages: list[dict[str, Any]]) -> None:
    """Raise ApiError unless these are messages with known roles and text contents."""
    if not messages:
        raise errors.invalid_value("messages", "'messages' must have at least one message.")
    for at, message in enumerate(messages):
        path = f"messages[{at}]"
        _check_role(message.get("role"), f"{path}.role")
        _check_content(message.get("content"), f"{path}.content")
        name = message.get("name")
        if name is not None and not isinstance(name, str):
            raise errors.invalid_type(f"{path}.name", f"Invalid type for '{path}.name': expected a string.")


def _check_role(role: object, path: str) -> None:
    if role is None:
        raise errors.missing(path)
    if not isinstance(role, str):
        raise errors.invalid_type(path, f"Invalid type for '{path}': expected a string.")
    if role not in ROLES:
        raise errors.invalid_value(path, f"Unknown role '{role[:64]}'; expected one of {', '.join(sorted(ROLES))}.")


def _check_content(content: object, path: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise errors.invalid_type(path, f"Invalid type for '{path}': expected a string or a list of parts.")
    for at, part in enumerate(content):
        if not isinstance(part, str):
            _check_part(part, f"{path}[{at}]")


def _check_part(part: object, path: str) -> None:
    if not isinstance(part, dict):
        raise errors.invalid_type(path, f"Invalid type for '{path}': expected an object with a type.")
    kind = part.get("type")
    if kind is None:
        raise errors.missing(f"{path}.type")
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        shown = kind[:64] if isinstance(kind, str) else type(kind).__name__
        raise errors.unsupported(f"{path}.type", f"Content parts of type '{shown}' are not supported; send text.")
    if part.get(key) is None:
        raise errors.missing(f"{path}.{key}")
    if not isinstance(part[key], str):
        raise errors.invalid_type(f"{path}.{key}", f"Invalid type for '{path}.{key}': expected a string.")

"""The shapes of the contract's objects: each function gives what is not as it should be, or an empty string."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Json = Any

CHAT_FINISH = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})
TEXT_FINISH = frozenset({"stop", "length", "content_filter"})
LOWEST_LOGPROB = -9999.0


def first(problems: Iterator[str]) -> str:
    """The first problem of several."""
    return next(problems, "")


def is_count(value: Json) -> bool:
    """A whole number of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def usage_problems(usage: Json) -> Iterator[str]:
    """Of a usage object: counts, their sum, and the details that are always there."""
    if not isinstance(usage, dict):
        yield "usage is not an object"
        return
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        if not is_count(usage.get(name)):
            yield f"usage.{name} is {usage.get(name)!r}, not a count"
            return
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        yield "usage.total_tokens is not the sum of the other two"
    for details, name, most in (
        ("prompt_tokens_details", "cached_tokens", usage["prompt_tokens"]),
        ("completion_tokens_details", "reasoning_tokens", usage["completion_tokens"]),
    ):
        value = usage.get(details)
        count = value.get(name) if isinstance(value, dict) else None
        if not is_count(count):
            yield f"usage.{details}.{name} is {count!r}, not a count"
        elif count > most:
            yield f"usage.{details}.{name} is {count}, more than {most}"


def envelope_problems(body: Json, kind: str, id_prefix: str) -> Iterator[str]:
    """Of what every answer and chunk begins with."""
    identity = body.get("id")
    if not isinstance(identity, str) or not identity.startswith(id_prefix) or len(identity) <= len(id_prefix):
        yield f"id is {identity!r}, not {id_prefix}…"
    if body.get("object") != kind:
        yield f"object is {body.get('object')!r}, not {kind!r}"
    if not is_count(body.get("created")) or body["created"] < 1_000_000_000:
        yield f"created is {body.get('created')!r}, not seconds since 1970"
    if not isinstance(body.get("model"), str) or not body["model"]:
        yield f"model is {body.get('model')!r}"
    if not isinstance(body.get("choices"), list):
        yield "choices is not a list"
    elif not all(isinstance(choice, dict) and is_count(choice.get("index")) for choice in body["choices"]):
        yield "a choice without an index"
    if "system_fingerprint" not in body:
        yield "no system_fingerprint"


def chat_choice_problems(choice: Json) -> Iterator[str]:
    """Of one choice of a whole chat completion."""
    message = choice.get("message")
    if not isinstance(message, dict):
        yield "a choice without a message"
        return
    if message.get("role") != "assistant":
        yield f"message.role is {message.get('role')!r}"
    content = message.get("content", ...)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        yield "message.content is " + ("missing" if content is ... else repr(content))
    if message.get("refusal", ...) is not None:
        yield "message.refusal is " + ("missing" if "refusal" not in message else repr(message["refusal"]))
    yield from said_problems(message, "message")
    if choice.get("finish_reason") not in CHAT_FINISH:
        yield f"finish_reason is {choice.get('finish_reason')!r}"
    if "logprobs" not in choice:
        yield "a choice without the key logprobs"


def text_choice_problems(choice: Json) -> Iterator[str]:
    """Of one choice of a whole plain completion."""
    if not isinstance(choice.get("text"), str):
        yield f"text is {choice.get('text')!r}"
    if choice.get("finish_reason") not in TEXT_FINISH:
        yield f"finish_reason is {choice.get('finish_reason')!r}"
    if "logprobs" not in choice:
        yield "a choice without the key logprobs"


def said_problems(said: Json, where: str) -> Iterator[str]:
    """Keys for tools and reasoning that are there with nothing in them."""
    for name in ("tool_calls", "function_call", "reasoning", "reasoning_content", "audio"):
        if name in said and said[name] in (None, []):
            yield f"{where}.{name} is {said[name]!r} where it is left out"


def logprob_problems(entry: Json, top: int) -> Iterator[str]:
    """Of one token's entry in a chat answer; ``top`` alternatives were asked for."""
    yield from _token_problems(entry)
    if not isinstance(entry, dict):
        return
    alternatives = entry.get("top_logprobs")
    if not isinstance(alternatives, list):
        yield f"top_logprobs is {alternatives!r}, not a list"
        return
    if not top <= len(alternatives) <= top + 1 or (top == 0 and alternatives):
        yield f"{len(alternatives)} top_logprobs where {top} were asked for"
    for alternative in alternatives:
        yield from _token_problems(alternative)
    given = [alternative.get("logprob") for alternative in alternatives[:top] if isinstance(alternative, dict)]
    values = [value for value in given if isinstance(value, float | int)]
    if values != sorted(values, reverse=True):
        yield f"top_logprobs are not in falling order: {values}"


def _token_problems(entry: Json) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"an entry of logprobs is {entry!r}"
        return
    if not isinstance(entry.get("token"), str):
        yield f"token is {entry.get('token')!r}"
    yield from value_problems(entry.get("logprob"))
    data = entry.get("bytes", ...)
    if data is ...:
        yield "an entry of logprobs without bytes"
    elif data is not None and not (isinstance(data, list) and all(is_count(b) and b < 256 for b in data)):
        yield f"bytes is {data!r}, not a list of bytes"


def value_problems(value: Json) -> Iterator[str]:
    """Of one log-probability."""
    if not isinstance(value, float | int) or isinstance(value, bool):
        yield f"logprob is {value!r}"
    elif value > 1e-6 or value < LOWEST_LOGPROB:
        yield f"logprob is {value}, outside {LOWEST_LOGPROB}…0"


def error_problems(error: Json, status: int) -> Iterator[str]:
    """Of an error object under its status."""
    if not isinstance(error, dict):
        yield f"error is {type(error).__name__}, not an object"
        return
    if missing := [name for name in ("message", "type", "param", "code") if name not in error]:
        yield f"error without {', '.join(missing)}"
    if not isinstance(error.get("message"), str) or not error["message"].strip():
        yield f"error.message is {error.get('message')!r}"
    if not isinstance(error.get("type"), str):
        yield f"error.type is {error.get('type')!r}"
    for name in ("param", "code"):
        if error.get(name) is not None and not isinstance(error[name], str):
            yield f"error.{name} is {error[name]!r}, neither a string nor null"
    expected = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "timeout_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    if isinstance(error.get("type"), str) and error["type"] != expected:
        yield f"error.type is {error['type']!r} where {expected!r} is right for {status}"


def is_printable_id(value: str) -> bool:
    """1 … 256 printable ASCII characters."""
    return re.fullmatch(r"[\x21-\x7e]{1,256}", value) is not None

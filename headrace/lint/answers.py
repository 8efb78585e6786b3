"""An answer as a client ends up with it, from either transport, and how two of them differ."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from headrace.lint.exchange import Exchange, accepted
from headrace.lint.verdicts import Wrong

LOGPROB_TOLERANCE = 5e-3
"""Between two runs of the same request; what runs beside a request may round its numbers otherwise."""

ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass
class Choice:
    """One choice of an answer."""

    index: int
    text: str = ""
    reasoning: str = ""
    finish_reason: object = None
    stop_reason: object = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Any] | None = None
    """Chat: one entry per token."""
    arrays: dict[str, list[Any]] | None = None
    """Completions: the four arrays."""
    token_ids: list[Any] | None = None


@dataclass
class Answer:
    """A whole answer."""

    exchange: Exchange
    choices: list[Choice]
    usage: dict[str, Any] | None

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> object:
        """Of the first choice."""
        return self.choices[0].finish_reason

    def tokens(self, name: str = "completion_tokens") -> int:
        """A count of the usage. Raises Wrong."""
        value = (self.usage or {}).get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise Wrong(f"usage has no {name}", self.exchange)
        return value


def answer_of(exchange: Exchange, *fields: str) -> Answer:
    """The answer in a reply; ``fields`` must not have been ignored. Raises NotOffered or Wrong."""
    accepted(exchange, *fields)
    answer = _folded(exchange) if exchange.streamed else _whole(exchange)
    if not answer.choices:
        raise Wrong("an answer without choices", exchange)
    return answer


def _whole(exchange: Exchange) -> Answer:
    body = exchange.json
    choices = []
    for entry in _objects(exchange, body, "choices"):
        choice = Choice(_index(exchange, entry))
        _add(exchange, choice, entry, _object(exchange, entry, "message") if exchange.chat else entry)
        choices.append(choice)
    return Answer(exchange, choices, _usage(exchange, body))


def _folded(exchange: Exchange) -> Answer:
    stream = exchange.events
    if stream.error is not None:
        raise Wrong("the stream ends with an error", exchange)
    choices: dict[int, Choice] = {}
    usage = None
    for chunk in stream.chunks:
        for entry in _objects(exchange, chunk, "choices"):
            choice = choices.setdefault(_index(exchange, entry), Choice(_index(exchange, entry)))
            _add(exchange, choice, entry, _object(exchange, entry, "delta") if exchange.chat else entry)
        usage = _usage(exchange, chunk) or usage
    return Answer(exchange, [choices[index] for index in sorted(choices)], usage)


def _add(exchange: Exchange, choice: Choice, entry: dict[str, Any], said: dict[str, Any]) -> None:
    choice.text += _text(exchange, said, "content" if exchange.chat else "text")
    choice.reasoning += _text(exchange, said, "reasoning_content") or _text(exchange, said, "reasoning")
    if entry.get("finish_reason") is not None:
        choice.finish_reason = entry["finish_reason"]
        choice.stop_reason = entry.get("stop_reason")
    if isinstance(entry.get("token_ids"), list):
        choice.token_ids = (choice.token_ids or []) + entry["token_ids"]
    _add_logprobs(exchange, choice, entry.get("logprobs"))
    for call in said.get("tool_calls") or []:
        _add_call(exchange, choice, call)


def _add_logprobs(exchange: Exchange, choice: Choice, logprobs: object) -> None:
    if logprobs is None:
        return
    if not isinstance(logprobs, dict):
        raise Wrong("logprobs is neither null nor an object", exchange)
    if exchange.chat:
        content = logprobs.get("content")
        if content is not None and not isinstance(content, list):
            raise Wrong("logprobs.content is not a list", exchange)
        choice.logprobs = (choice.logprobs or []) + (content or [])
        return
    choice.arrays = choice.arrays or {name: [] for name in ARRAYS}
    for name in ARRAYS:
        values = logprobs.get(name)
        if values is not None and not isinstance(values, list):
            raise Wrong(f"logprobs.{name} is not a list", exchange)
        choice.arrays[name] += values or []


def _add_call(exchange: Exchange, choice: Choice, call: object) -> None:
    if not isinstance(call, dict):
        raise Wrong("a tool call is not an object", exchange)
    if not exchange.streamed:
        choice.tool_calls.append(call)
        return
    index = call.get("index")
    if not isinstance(index, int) or index > len(choice.tool_calls):
        raise Wrong(f"tool call index {index!r} after {len(choice.tool_calls)} calls", exchange)
    if index == len(choice.tool_calls):
        choice.tool_calls.append({"function": {"name": "", "arguments": ""}})
    known, function = choice.tool_calls[index], call.get("function") or {}
    known.update({name: call[name] for name in ("id", "type") if call.get(name)})
    for name in ("name", "arguments"):
        known["function"][name] += function.get(name) or ""


def differences(one: Answer, other: Answer) -> list[str]:
    """What is not equal, ids, times and cache hits apart; empty when the answers are the same."""
    if len(one.choices) != len(other.choices):
        return [f"{len(one.choices)} choices and {len(other.choices)}"]
    found: list[str] = []
    for left, right in zip(one.choices, other.choices, strict=True):
        where = f"choice {left.index}: "
        for name in ("index", "text", "reasoning", "finish_reason", "stop_reason", "token_ids"):
            a, b = getattr(left, name), getattr(right, name)
            if a != b:
                found.append(f"{where}{name} {_short(a)} and {_short(b)}")
        if _calls(left) != _calls(right):
            found.append(f"{where}tool_calls {_short(_calls(left))} and {_short(_calls(right))}")
        a, b = _scores(left), _scores(right)
        if not _near(a, b):
            found.append(f"{where}logprobs {_short(a)} and {_short(b)}")
    if one.usage is not None and other.usage is not None and _counts(one.usage) != _counts(other.usage):
        found.append(f"usage {_counts(one.usage)} and {_counts(other.usage)}")
    return found


def _scores(choice: Choice) -> object:
    """Log-probabilities in either form; none at all when there is no token, as a stream says nothing of nothing."""
    if choice.arrays is not None:
        return choice.arrays if choice.arrays["tokens"] else None
    return choice.logprobs or None


def _calls(choice: Choice) -> list[Any]:
    functions: Iterable[dict[str, Any]] = (call.get("function") or {} for call in choice.tool_calls)
    return [(function.get("name"), function.get("arguments")) for function in functions]


def _counts(usage: dict[str, Any]) -> dict[str, Any]:
    flat = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    details = usage.get("completion_tokens_details")
    flat["reasoning_tokens"] = details.get("reasoning_tokens") if isinstance(details, dict) else None
    return flat


def _near(one: object, other: object) -> bool:
    """Equal, and numbers nearly so."""
    if isinstance(one, float | int) and isinstance(other, float | int):
        return one == other or math.isclose(one, other, rel_tol=1e-3, abs_tol=LOGPROB_TOLERANCE)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_near, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_near(one[key], other[key]) for key in one)
    return one == other


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:70]}…{text[-40:]}"


def _objects(exchange: Exchange, body: dict[str, Any], name: str) -> list[dict[str, Any]]:
    values = body.get(name)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise Wrong(f"{name} is not a list of objects", exchange)
    return values


def _object(exchange: Exchange, entry: dict[str, Any], name: str) -> dict[str, Any]:
    value = entry.get(name)
    if not isinstance(value, dict):
        raise Wrong(f"a choice without {name}", exchange)
    return value


def _index(exchange: Exchange, entry: dict[str, Any]) -> int:
    index = entry.get("index")
    if not isinstance(index, int) or isinstance(index, bool):
        raise Wrong(f"a choice with index {index!r}", exchange)
    return index


def _text(exchange: Exchange, said: dict[str, Any], name: str) -> str:
    value = said.get(name)
    if value is not None and not isinstance(value, str):
        raise Wrong(f"{name} is {type(value).__name__}, not a string", exchange)
    return value or ""


def _usage(exchange: Exchange, body: dict[str, Any]) -> dict[str, Any] | None:
    usage = body.get("usage")
    if usage is not None and not isinstance(usage, dict):
        raise Wrong("usage is not an object", exchange)
    return usage

"""JSON and server-sent events read without forgiving anything."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


class StrictError(ValueError):
    """Bytes that are not what they have to be."""


def decode_json(data: bytes) -> Any:
    """A JSON value: UTF-8, no NaN or Infinity, no key twice, no lone surrogate. Raises StrictError."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StrictError(f"not UTF-8 at byte {error.start}: {data[error.start : error.start + 8]!r}") from None
    if text.startswith("\ufeff"):
        raise StrictError("starts with a byte order mark")
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_twins)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except StrictError:
        raise
    except UnicodeEncodeError:
        raise StrictError("holds a lone surrogate") from None
    except (ValueError, RecursionError) as error:
        raise StrictError(f"not JSON: {error}") from None
    return value


def _no_constant(name: str) -> Any:
    raise StrictError(f"{name} is not JSON")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twin = next(key for key in keys if keys.count(key) > 1)
        raise StrictError(f"key {twin!r} twice in one object")
    return dict(pairs)


@dataclass
class EventStream:
    """An event stream as it was sent."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    """JSON of its data events, errors excepted."""
    error: dict[str, Any] | None = None
    done: int = 0
    """How many [DONE] came."""
    comments: int = 0
    faults: list[str] = field(default_factory=list)


def read_events(body: bytes) -> EventStream:
    """Read a whole event-stream body; what is not as it has to be is in ``faults``."""
    stream = EventStream()
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        stream.faults.append(f"not UTF-8 at byte {error.start}: {body[error.start : error.start + 8]!r}")
        text = body.decode("utf-8", "replace")
    lines = "\r\n" if "\r\n" in text else "\n"
    *blocks, rest = text.split(lines * 2)
    if rest:
        stream.faults.append(f"the body ends amid an event: {rest[:80]!r}")
    for block in blocks:
        _read_block(block, lines, stream)
    return stream


def _read_block(block: str, line_end: str, stream: EventStream) -> None:
    lines = block.split(line_end)
    if all(line.startswith(":") for line in lines):
        stream.comments += 1
        return
    data = [line for line in lines if line.startswith("data:")]
    if len(lines) != 1 or len(data) != 1:
        stream.faults.append(f"an event is one data line and a blank line, not {block[:120]!r}")
    for line in data:
        if not line.startswith("data: "):
            stream.faults.append(f"a data line starts with 'data: ': {line[:40]!r}")
        _read_data(line.removeprefix("data:").strip(), stream)


def _read_data(data: str, stream: EventStream) -> None:
    if stream.done:
        stream.faults.append(f"an event after [DONE]: {data[:80]!r}")
    if data == "[DONE]":
        stream.done += 1
        return
    try:
        value = decode_json(data.encode("utf-8"))
    except StrictError as error:
        stream.faults.append(f"an event's data: {error}: {data[:80]!r}")
        return
    if not isinstance(value, dict):
        stream.faults.append(f"an event's data is not an object: {data[:80]!r}")
    elif value.get("error"):
        stream.error = value
    else:
        stream.chunks.append(value)
